"""Make the fixtures of `tests/rewriting/test_lora.py`: an adapter of PEFT for each tiny model.

The models are those of `make_hf_fixtures.py` and `make_hf_family_fixtures.py`. Each folder holds a
random LoRA adapter as PEFT saved it, and the logits that PEFT gives with it for the longest of
the model's prompts. This does it:

    pip install torch transformers peft typer
    python scripts/make_peft_fixtures.py --output tests/fixtures/peft
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import peft
import torch
import transformers
import typer
from make_hf_fixtures import Oracle, load_model

ATTENTION = "q_proj|k_proj|v_proj|o_proj"
MLP = "gate_proj|up_proj|down_proj"
LINEAR = "in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|out_proj"
GEMMA_4 = f"{ATTENTION}|{MLP}|per_layer_input_gate|per_layer_projection"
STREAMS = "linear_left|linear_right|modality_router|prediction_coefs|correction_coefs"
FUSED = "query_key_value|dense|dense_4h_to_h"

LARGEST_FOLDER = 60_000


@dataclass(frozen=True)
class Adapter:
    """What is adapted, and how.

    Attributes:
        modules: last parts of their names, joined by `|`.
        attention: which implementation of attention `transformers` takes.
        dtype: of the saved factors.
        settings: more of `LoraConfig`.
    """

    modules: str = f"{ATTENTION}|{MLP}"
    attention: str = "eager"
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)


PATTERNS = {"rank_pattern": {"v_proj": 3, "1.*o_proj": 1}, "alpha_pattern": {"down_proj": 7}}

ADAPTERS = {
    "bloom": Adapter(f"{FUSED}|dense_h_to_4h"),
    "falcon": Adapter(FUSED, attention="sdpa"),
    "gemma": Adapter(settings={"use_rslora": True}),
    "gemma2": Adapter(settings=PATTERNS),
    "gemma3_text": Adapter(settings={"use_rslora": True, **PATTERNS}),
    "gemma3n_text": Adapter(f"{GEMMA_4}|{STREAMS}"),
    "gemma4_moe": Adapter(f"{ATTENTION}|mlp.gate_proj|mlp.up_proj|mlp.down_proj"),
    "gemma4_text": Adapter(GEMMA_4),
    "gpt2": Adapter("c_attn|c_proj", settings={"fan_in_fan_out": True}),
    "gpt_neox": Adapter(FUSED),
    "gpt_oss": Adapter(ATTENTION),
    "llama": Adapter(settings=PATTERNS),
    "mistral": Adapter(dtype=torch.bfloat16),
    "mixtral": Adapter(r"1\.self_attn\.(q_proj|v_proj)"),
    "opt": Adapter("q_proj|k_proj|v_proj|out_proj|fc2"),
    "phi3": Adapter("qkv_proj|o_proj|gate_up_proj|down_proj"),
    "qwen2": Adapter("q_proj|v_proj"),
    "qwen2_moe": Adapter(f"{ATTENTION}|{MLP}"),
    "qwen3": Adapter(dtype=torch.float16),
    "qwen3_5": Adapter(f"{ATTENTION}|{MLP}|{LINEAR}"),
    "qwen3_5_moe": Adapter(f"{ATTENTION}|{MLP}|{LINEAR}"),
    "qwen3_moe": Adapter(ATTENTION),
    "smollm3": Adapter(),
}


def folder_of(name: str, fixtures: Path) -> Path:
    """Return the folder of a model."""
    own = fixtures / f"hf_{name}"
    return own if own.is_dir() else fixtures / "hf_families" / name


def make(name: str, adapter: Adapter, base: Path, folder: Path) -> None:
    """Make one fixture in place of the one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(sum(name.encode()))
    model = load_model(base, adapter.attention)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=5,
        target_modules=rf".*\.({adapter.modules})",
        lora_dropout=0.1,
        **adapter.settings,
    )
    model = peft.get_peft_model(model, config).eval()
    for key, value in model.named_parameters():
        if "lora_" in key:
            value.data.normal_(0, 0.1).copy_(value.data.to(adapter.dtype))
    expected = np.load(base / "expected.npz")
    longest = expected["lengths"].argmax()
    logits = Oracle(model).logits(expected["token_ids"][longest].tolist())
    plain = expected["logits"][longest]
    effect = np.abs(logits - plain).max() / np.abs(plain).max()
    if not 0.02 < effect < 50:
        raise ValueError(f"{name}: expected an adapter that changes logits. Received {effect}.")
    model.to(adapter.dtype).save_pretrained(folder)
    (folder / "README.md").unlink()
    np.savez_compressed(folder / "expected.npz", logits=logits)
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > LARGEST_FOLDER:
        raise ValueError(f"{name}: expected at most {LARGEST_FOLDER} bytes. Received {size}.")
    typer.echo(f"{name}: {size} bytes, logits change by {effect:.2f} of the largest")


def main(
    fixtures: Annotated[Path, typer.Option(help="Folder of the models.")] = Path("tests/fixtures"),
    output: Annotated[Path, typer.Option(help="Folder for the fixtures.")] = Path(
        "tests/fixtures/peft"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Names of fixtures; all if none.")] = None,
) -> None:
    """Make the fixtures."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in only or ADAPTERS:
        make(name, ADAPTERS[name], folder_of(name, fixtures), output / name)


if __name__ == "__main__":
    typer.run(main)
