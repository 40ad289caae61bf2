"""Train top-k sparse autoencoders of blocks of a bundled model, for steering by a feature.

    KERAS_BACKEND=jax python scripts/train_autoencoders.py tiny_gpt2 --output autoencoders

Stories of the grammar run through the model, and a top-k autoencoder (Gao et al. 2024,
arXiv:2406.04093) learns to give back the hidden states after each block. `bs.SparseAutoencoder`
reads the folders, and `bs.tune(..., autoencoders=...)` chooses features of them.
`notebooks/05_sparse_autoencoders.ipynb` goes the same way step by step.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import keras
import numpy as np
import pyarrow.parquet as pq
import typer
from safetensors.numpy import save_file
from tiny_models import write_stories

import backbone_surgery as bs

BLOCKS = (3, 4)
STORIES, STORY_SEED = 400, 12
LATENTS, KEPT = 1024, 16
STEPS, BATCH_SIZE = 600, 1024


class TopK(keras.Model):
    """A top-k autoencoder of hidden states float[batch, size].

    Args:
        center: float32[size], the mean of the hidden states.
    """

    def __init__(self, center: np.ndarray) -> None:
        super().__init__()
        start = np.random.default_rng(1).normal(size=(LATENTS, len(center))).astype("float32")
        start /= np.linalg.norm(start, axis=1, keepdims=True)
        fixed = keras.initializers.Constant
        unit = keras.constraints.UnitNorm(axis=1)
        self.encoder = self.add_weight(start.shape, fixed(start), name="encoder")
        self.bias = self.add_weight((LATENTS,), "zeros", name="bias")
        self.decoder = self.add_weight(start.shape, fixed(start), name="decoder", constraint=unit)
        self.center = self.add_weight(center.shape, fixed(center), name="center")

    def call(self, x):
        """Give the states back from their `KEPT` largest features."""
        latents = keras.ops.relu((x - self.center) @ keras.ops.transpose(self.encoder) + self.bias)
        smallest = keras.ops.top_k(latents, KEPT)[0][..., -1:]
        return keras.ops.where(latents >= smallest, latents, 0.0) @ self.decoder + self.center


def hidden_states(lm: bs.CachedCausalLM, block: int) -> np.ndarray:
    """Return what stands after a block over all tokens of stories but the first, float32."""
    site = f"blocks.{block}"
    with tempfile.TemporaryDirectory() as folder:
        stories = Path(folder) / "stories.jsonl"
        rows = [json.dumps({"text": text}) for text in write_stories(STORY_SEED, STORIES)]
        stories.write_text("\n".join(rows) + "\n")
        files = bs.harvest(lm, stories, Path(folder) / "states", site, "text", verbose=0)
        tables = [pq.read_table(file, columns=["position", site]) for file in files]
    parts = []
    for table in tables:
        states = table[site].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
        parts.append(states[table["position"].to_numpy() > 0])
    return np.concatenate(parts).astype("float32")


def train_autoencoder(lm: bs.CachedCausalLM, block: int, folder: Path) -> float:
    """Train the autoencoder of a block, and save it as `sparsify` does.

    Returns:
        The share of the variance that it does not explain.
    """
    states = hidden_states(lm, block)
    chosen = np.random.default_rng(0).integers(0, len(states), STEPS * BATCH_SIZE)
    model = TopK(states.mean(axis=0))
    model.compile(keras.optimizers.Adam(1e-3), loss="mse")
    model.fit(states[chosen], states[chosen], batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    weights = {
        "encoder.weight": model.encoder,
        "encoder.bias": model.bias,
        "W_dec": model.decoder,
        "b_dec": model.center,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: np.array(v.value) for k, v in weights.items()}, folder / "sae.safetensors")
    config = {"activation": "topk", "k": KEPT, "num_latents": LATENTS}
    (folder / "cfg.json").write_text(json.dumps(config))
    some = states[:4096]
    error = np.asarray(model.predict_on_batch(some)) - some
    return float((error**2).mean() / some.var(axis=0).mean())


def autoencoders_of(model: str, lm: bs.CachedCausalLM, folder: Path) -> dict[int, str]:
    """Return the folders of the autoencoders of a model by block; train those that are missing."""
    found = {}
    for block in BLOCKS:
        own = folder / model / f"blocks.{block}"
        if not (own / "cfg.json").exists():
            unexplained = train_autoencoder(lm, block, own)
            typer.echo(f"{model} block {block}: {unexplained:.1%} of the variance is left")
        found[block] = str(own)
    return found


def main(
    model: Annotated[str, typer.Argument(help="tiny_gpt2 or tiny_gemma.")],
    output: Annotated[Path, typer.Option(help="Folder to write to.")],
) -> None:
    """Train the autoencoders of a bundled model."""
    autoencoders_of(model, bs.CachedCausalLM.from_preset(model), output)


if __name__ == "__main__":
    typer.run(main)
