"""Make the fixtures of `tests/rewriting/test_llama_cpp.py`: logits of llama.cpp.

Each tiny model of Hugging Face is converted and run by llama.cpp, once with a control vector that
this project wrote, and once with an adapter that `save_peft` wrote. See `llama_cpp_peer.py` for
what it takes:

    python scripts/make_llama_cpp_fixtures.py llama_cpp_python-*/vendor/llama.cpp
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
import typer
from llama_cpp_peer import LlamaCpp, convert_adapter, convert_model

import backbone_surgery as bs

KINDS = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Models whose plain logits llama.cpp computes as `transformers` does.

Of Gemma and BLOOM they differ by 3e-4 and more: it takes GELU out of a table in float16.
"""


def folder_of(name: str, fixtures: Path) -> Path:
    """Return the folder of a model."""
    own = fixtures / f"hf_{name}"
    return own if own.is_dir() else fixtures / "hf_families" / name


def run(name: str, fixtures: Path, vector: Path, sources: Path) -> dict[str, np.ndarray]:
    """Return the logits of the longest prompt, float32[tokens, vocabulary], by what is applied."""
    folder = folder_of(name, fixtures)
    with np.load(folder / "expected.npz") as arrays:
        longest = arrays["lengths"].argmax()
        token_ids, expected = arrays["token_ids"][longest].tolist(), arrays["logits"][longest]
    with tempfile.TemporaryDirectory() as temporary:
        model, adapter = Path(temporary, "model.gguf"), Path(temporary, "adapter.gguf")
        convert_model(sources, folder, model)
        backbone = bs.CachedCausalLM.from_preset(str(folder)).backbone
        edited = bs.operate(backbone, [bs.Lora("tuned", fixtures / "peft" / name)])
        bs.save_peft(edited, "tuned", Path(temporary, "adapter"))
        convert_adapter(sources, Path(temporary, "adapter"), folder, adapter)
        peer = LlamaCpp(model)
        plain = peer.logits(token_ids)
        error = np.abs(plain - expected).max() / np.abs(expected).max()
        if error > 1e-5:
            raise ValueError(f"{name}: plain logits differ from those of transformers by {error}.")
        typer.echo(f"{name}: plain logits are within {error:.1e} of those of transformers")
        steered, adapted = peer.logits(token_ids, vector), peer.logits(token_ids, None, adapter)
    return {f"{name}_steered": steered, f"{name}_adapted": adapted}


def main(
    sources: Annotated[Path, typer.Argument(help="Folder of llama.cpp's sources.")],
    fixtures: Annotated[Path, typer.Option(help="Folder of the models.")] = Path("tests/fixtures"),
) -> None:
    """Make the fixtures."""
    output = fixtures / "llama_cpp"
    output.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    vector = bs.ControlVector({block: rng.normal(size=32).astype("float32") for block in (1, 2)})
    path = output / "vector.gguf"
    path.unlink(missing_ok=True)
    vector.save(path)
    logits: dict[str, np.ndarray] = {}
    for name in KINDS:
        logits |= run(name, fixtures, path, sources)
    np.savez_compressed(output / "expected.npz", **logits)


if __name__ == "__main__":
    typer.run(main)
