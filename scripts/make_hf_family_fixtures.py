"""Make the fixtures of `tests/opening/test_hf_families.py`: a tiny model of each family.

As `make_hf_fixtures.py`, but without tokenizers and texts, and for every family: each folder is a
random model saved by `transformers`, with the logits and greedy continuations that it gave. The
weights are rounded to float16 and saved so, which halves the files and loses nothing. This does it:

    pip install torch transformers sentencepiece protobuf typer
    python scripts/make_hf_family_fixtures.py --output tests/fixtures/hf_families

A config has what KerasHub and `transformers` agree on; the table in the tests says what is left
out. Each `Recipe` names changes of its config that must change the logits: so the fixture would
notice if a window, a cap or a scaling were lost. Seeds are tried in turn until the weights make a
strong fixture.
"""

import itertools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
import transformers
import typer
from make_hf_fixtures import (
    VOCABULARY_SIZE,
    Oracle,
    expect_arrays,
    load_model,
    make_model,
    weaknesses,
)

LARGEST_FOLDER = 150_000
LEAST_EFFECT = 1e-4
"""How much a change named in `matters` must change some logit, relative to the largest.

Twenty times what the tests allow."""


@dataclass(frozen=True)
class Recipe:
    """One fixture.

    Attributes:
        config: of the model.
        matters: changes of the config, one by one, that must change the logits.
        saved: what `config.json` says otherwise than the config, since KerasHub reads it so.
        embedding_scale: standard deviation of the token embedding.
        scales: what some weights are multiplied by, so that texts do not repeat one token.
        mxfp4: whether the experts are saved in four bits, as published.
        attention: which implementation of attention `transformers` takes.
    """

    config: transformers.PretrainedConfig
    matters: tuple[dict[str, Any], ...] = ()
    saved: dict[str, Any] = field(default_factory=dict)
    embedding_scale: float = 0.3
    scales: dict[str, float] = field(default_factory=dict)
    mxfp4: bool = False
    attention: str = "eager"


def make_config(model_type: str, **kwargs: Any) -> transformers.PretrainedConfig:
    """Return the config of a tiny model; what a config has not, it does not take."""
    common = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": VOCABULARY_SIZE - 1,
        "pad_token_id": 0,
    }
    return transformers.AutoConfig.for_model(model_type, **{**common, **kwargs})


def rope(theta: float, kind: str = "default", **kwargs: Any) -> dict[str, Any]:
    """Return parameters of rotary positions."""
    return {"rope_type": kind, "rope_theta": theta, **kwargs}


LLAMA_3 = rope(
    500.0,  # with 4 frequencies: one is kept, one smoothed, two are scaled
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=40,
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA_3 = {
    "sliding_attention": rope(10_000.0),
    "full_attention": rope(1_000_000.0, "linear", factor=8.0),
}

RECIPES = {
    "llama": Recipe(
        make_config(
            "llama", rope_parameters=LLAMA_3, max_position_embeddings=320, rms_norm_eps=1e-6
        ),
        matters=({"rope_parameters": rope(500.0)},),
        saved={"rope_scaling": LLAMA_3},
    ),
    "mistral": Recipe(
        make_config(
            "mistral",
            rope_parameters=rope(1000.0),
            num_key_value_heads=1,
            head_dim=12,
            sliding_window=5,
        ),
        matters=({"sliding_window": 6}, {"rope_parameters": rope(10_000.0)}),
    ),
    "qwen2": Recipe(
        make_config("qwen2", rope_parameters=rope(1000.0), tie_word_embeddings=True),
        matters=({"rope_parameters": rope(10_000.0)},),
    ),
    "qwen3": Recipe(
        make_config(
            "qwen3",
            rope_parameters=rope(1000.0),
            num_key_value_heads=1,
            head_dim=12,
            rms_norm_eps=1e-5,
        ),
        matters=({"rope_parameters": rope(10_000.0)},),
    ),
    "smollm3": Recipe(
        make_config("smollm3", rope_parameters=rope(1000.0), no_rope_layers=[1, 0, 1]),
        matters=({"no_rope_layers": [1, 1, 1]}, {"rope_parameters": rope(10_000.0)}),
    ),
    "phi3": Recipe(
        make_config(
            "phi3",
            rope_parameters=rope(
                10_000.0,
                "longrope",
                short_factor=[1.0, 1.5, 2.5, 4.0],
                long_factor=[2.0, 4.0, 8.0, 16.0],
                original_max_position_embeddings=40,
            ),
            original_max_position_embeddings=40,
            max_position_embeddings=80,
            tie_word_embeddings=False,
        ),
        matters=({"rope_parameters": rope(10_000.0)},),
    ),
    "opt": Recipe(
        make_config("opt", ffn_dim=48, dropout=0.0),
        matters=({"activation_function": "gelu"},),
        embedding_scale=0.1,
    ),
    "gpt_neox": Recipe(
        make_config(
            "gpt_neox",
            rope_parameters=rope(1000.0, partial_rotary_factor=0.5),
            hidden_act="gelu_new",
            tie_word_embeddings=True,
        ),
        matters=(
            {"rope_parameters": rope(1000.0, partial_rotary_factor=1.0)},
            {"use_parallel_residual": False},
        ),
        embedding_scale=0.1,
    ),
    "bloom": Recipe(
        make_config("bloom", hidden_size=36, num_hidden_layers=2, num_attention_heads=6),
        embedding_scale=0.1,
        scales={"word_embeddings_layernorm": 0.1},
    ),
    "falcon": Recipe(
        make_config(
            "falcon",
            alibi=True,
            multi_query=False,
            num_kv_heads=4,
            parallel_attn=False,
            bias=True,
            ffn_hidden_size=48,
            tie_word_embeddings=True,
        ),
        matters=({"activation": "gelu_new"},),
        embedding_scale=0.1,
        attention="sdpa",  # the other one adds the biases of ALiBi twice
    ),
    "mixtral": Recipe(
        make_config(
            "mixtral",
            rope_parameters=rope(1000.0),
            sliding_window=5,
            num_local_experts=4,
            intermediate_size=24,
        ),
        matters=({"sliding_window": 6}, {"num_experts_per_tok": 1}),
    ),
    "qwen2_moe": Recipe(
        make_config(
            "qwen2_moe",
            rope_parameters=rope(1000.0),
            shared_expert_intermediate_size=40,
            norm_topk_prob=False,
            **EXPERTS,
        ),
        matters=({"norm_topk_prob": True}, {"num_experts_per_tok": 1}),
    ),
    "qwen3_moe": Recipe(
        make_config(
            "qwen3_moe",
            rope_parameters=rope(1000.0),
            head_dim=12,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            **EXPERTS,
        ),
        matters=({"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
    ),
    "gpt_oss": Recipe(
        make_config(
            "gpt_oss",
            max_position_embeddings=131_072,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=32,
            num_key_value_heads=1,
            head_dim=12,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        matters=(
            {"sliding_window": 7},
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            {"rope_parameters": rope(150_000.0)},
            {"swiglu_limit": 70.0},
        ),
        saved={
            "sliding_window": 5,  # KerasHub's window is one wider than it says
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
        },
        mxfp4=True,
    ),
    "gemma3_text": Recipe(
        make_config(
            "gemma3_text",
            num_hidden_layers=6,
            intermediate_size=24,
            head_dim=12,
            query_pre_attn_scalar=12,
            sliding_window=6,
            rope_parameters=GEMMA_3,
            final_logit_softcapping=2.0,
        ),
        matters=(
            {"sliding_window": 7},
            {"final_logit_softcapping": None},
            {"rope_parameters": {**GEMMA_3, "full_attention": rope(1_000_000.0)}},
            {"rope_parameters": {**GEMMA_3, "sliding_attention": rope(1000.0)}},
        ),
        embedding_scale=0.1,
    ),
}


def four_bit_experts(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random experts of GPT-OSS in MXFP4: 32 numbers of four bits share an exponent."""
    experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    tensors = {}
    for name, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
        exponents = torch.randint(123, 126, shape, generator=generator)  # 2 to the -4, -3 or -2
        tensors[f"{name}_proj_blocks"] = blocks.to(torch.uint8)
        tensors[f"{name}_proj_scales"] = exponents.to(torch.uint8)
    return tensors


def save_in_four_bits(folder: Path, config: Any, seed: int) -> None:
    """Put experts in four bits in the place of the saved ones."""
    generator = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        del tensors[f"{prefix}gate_up_proj"], tensors[f"{prefix}down_proj"]
        packed = four_bit_experts(config, generator).items()
        tensors |= {f"{prefix}{name}": tensor for name, tensor in packed}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4"})


def change_config(folder: Path, **kwargs: Any) -> None:
    """Write other values to the saved config."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **kwargs}, indent=2) + "\n", encoding="utf-8")


def save(recipe: Recipe, seed: int, folder: Path) -> None:
    """Save the weights of a seed, in float16."""
    shutil.rmtree(folder, ignore_errors=True)
    model = make_model(recipe.config, seed, recipe.embedding_scale)
    for (name, tensor), (part, scale) in itertools.product(
        model.state_dict().items(), recipe.scales.items()
    ):
        if part in name:
            tensor.mul_(scale)
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if recipe.mxfp4:
        save_in_four_bits(folder, recipe.config, seed)


def check_effects(name: str, recipe: Recipe, folder: Path, prompt: list[int]) -> None:
    """Refuse a fixture that would not notice if something of its config were lost."""
    logits = Oracle(load_model(folder, recipe.attention)).logits(prompt)
    for change in recipe.matters:
        other = Oracle(load_model(folder, recipe.attention, **change)).logits(prompt)
        effect = np.abs(other - logits).max() / np.abs(logits).max()
        if not effect > LEAST_EFFECT:
            raise ValueError(
                f"{name}: expected {change} to change the logits by {LEAST_EFFECT} or more. "
                f"Received {effect:.1e}. Change its config."
            )


def make(name: str, recipe: Recipe, folder: Path) -> None:
    """Make one fixture in place of the one that is there, from the first seed that is strong."""
    for seed in itertools.count():
        save(recipe, seed, folder)
        oracle = Oracle(load_model(folder, recipe.attention))
        arrays = expect_arrays(seed, VOCABULARY_SIZE - 1, oracle)
        weak = list(weaknesses(oracle.margin, arrays))
        if not weak:
            break
        typer.echo(f"{name}, seed {seed}: not {weak[0][0]}, but {weak[0][1]}")
    longest = arrays["token_ids"][-1].tolist() + arrays["greedy"][-1].tolist()
    check_effects(name, recipe, folder, longest)
    change_config(folder, **recipe.saved)
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > LARGEST_FOLDER:
        raise ValueError(
            f"{name}: expected at most {LARGEST_FOLDER} bytes. Received {size}. Make it smaller."
        )
    typer.echo(
        f"{name}: seed {seed}, {size} bytes, best two logits at least {oracle.margin:.1e} apart"
    )


def main(
    output: Annotated[Path, typer.Option(help="Folder for the fixtures.")] = Path(
        "tests/fixtures/hf_families"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Names of fixtures; all if none.")] = None,
) -> None:
    """Make the fixtures."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in only or RECIPES:
        make(name, RECIPES[name], output / name)


if __name__ == "__main__":
    typer.run(main)
