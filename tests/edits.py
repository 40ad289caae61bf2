"""Every rewrite as one edit in three forms: the rewrite, its run-time inputs, and plain NumPy."""

import json

import keras
import numpy as np
from safetensors.numpy import save_file

import backbone_surgery as bs
from backbone_surgery.opening.site import places
from tests.numpy_models import weights_of
from tests.transcoders import arrays, decode, encode, save_gemma_scope_2

TIME, SIZE = 6, 32


@keras.saving.register_keras_serializable("edits")
class Scaled(keras.layers.Layer):
    """A wrapper of a block, with a weight of its own."""

    def __init__(self, block):
        super().__init__(name=f"scaled_{block.name}")
        self.block = block
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x + self.scale * keras.ops.tanh(self.block(0.5 * x))


class Edit:
    """One rewrite, the inputs it is given, and the same edit in NumPy."""

    def __init__(self, rewrite, in_numpy, **inputs):
        self.rewrite, self.in_numpy, self.inputs = rewrite, in_numpy, inputs


def steer(rng, _):
    vector = rng.normal(size=SIZE).astype("float32")
    strength = np.array([[1.5], [-0.5]], "float32")

    def in_numpy(model):
        model.blocks[1].at("block", lambda x, _: x + strength[:, :, None] * vector)

    return Edit(bs.Steer("mood", {1: vector}), in_numpy, mood_strength=strength)


def patch(rng, _):
    value = rng.normal(size=(2, 1, SIZE)).astype("float32")

    def hook(x, _):
        x = x.copy()
        x[0, 2], x[1, 4] = value[0, 0], value[1, 0]
        return x

    return Edit(
        bs.Patch("blocks.1"),
        lambda model: model.blocks[1].at("block", hook),
        patch_positions=np.array([[[2]], [[4]]]),
        patch_value_0=value,
    )


def patch_along(rng, _):
    value, directions = rng.normal(size=(2, 1, SIZE)).astype("float32"), rng.normal(size=(2, SIZE))
    onto = np.linalg.pinv(directions) @ directions

    def hook(x, _):
        x = x.copy()
        for row, position in enumerate((2, 4)):
            x[row, position] += onto @ (value[row, 0] - x[row, position])
        return x

    return Edit(
        bs.Patch("blocks.1", name="along", directions=directions),
        lambda model: model.blocks[1].at("block", hook),
        along_positions=np.array([[[2]], [[4]]]),
        along_value_0=value,
    )


def patch_heads(rng, _):
    mask = np.array([[[1, 0, 0, 1]], [[0, 1, 0, 0]]], "float32")
    value = rng.normal(size=(2, 1, 4, 8)).astype("float32")

    def hook(x, _):
        x = x.copy()
        x[0, 2, [0, 3]], x[1, 4, 1] = value[0, 0, [0, 3]], value[1, 0, 1]
        return x

    return Edit(
        bs.Patch("blocks.0.head_outputs", name="some"),
        lambda model: model.blocks[0].at("head_outputs", hook),
        some_positions=np.array([[[2]], [[4]]]),
        some_value_0=value,
        some_heads=mask,
    )


def clamp(rng, _):
    features, values = np.array([[3, 20], [5, -1]]), rng.normal(size=(2, 2)).astype("float32")

    def hook(x, _):
        x = x.copy()
        x[0, :, 3], x[0, :, 20], x[1, :, 5] = *values[0], values[1, 0]
        return x

    return Edit(
        bs.Clamp("blocks.0.mlp_output"),
        lambda model: model.blocks[0].at("mlp_output", hook),
        clamp_features=features,
        clamp_values=values,
    )


def ablate(rng, _):
    mask = np.array([[[1, 0, 0, 1]], [[0, 1, 0, 0]]], "float32")
    keep = 1 - mask[:, 0, None, :, None]
    return Edit(
        bs.Ablate("blocks.0.head_outputs"),
        lambda model: model.blocks[0].at("head_outputs", lambda x, _: x * keep),
        ablate_heads=mask,
    )


def ablate_pattern(rng, _):
    def hook(x, _):
        return x * np.array([1, 1, 0, 1])[None, :, None, None]

    rewrite = bs.Ablate("blocks.1.attention_pattern", heads=[2], name="pattern")
    return Edit(rewrite, lambda model: model.blocks[1].at("attention_pattern", hook))


def skip(rng, _):
    amount = np.array([[0.25], [0.75]], "float32")

    def in_numpy(model):
        share = amount[:, :, None]
        model.blocks[1].at("block", lambda x, before: x + share * (before - x))

    return Edit(bs.Skip("blocks.1"), in_numpy, skip_amount=amount)


def insert(rng, _):
    dense = keras.layers.Dense(SIZE, name="extra")
    dense.build((None, None, SIZE))
    kernel, _ = weights_of(dense)
    return Edit(
        bs.Insert("blocks.1.mlp_output", dense),
        lambda model: model.blocks[1].at("mlp_output", lambda x, _: x @ kernel),
    )


def replace(rng, backbone):
    sites = {place.path: place.tensor for place in places(bs.open_backbone(backbone))}
    width = sites["blocks.0.mlp_hidden"].shape[-1]
    dense = keras.layers.Dense(width, activation="tanh", name="other_mlp")
    dense.build((None, None, SIZE))
    kernel, _ = weights_of(dense)
    return Edit(
        bs.Replace("blocks.0.mlp_hidden", dense),
        lambda model: model.blocks[0].at("mlp_hidden", lambda _, x: np.tanh(x @ kernel)),
    )


def low_rank(rng, backbone):
    first = bs.operate(backbone, [bs.LowRank("blocks.1.query", rank=2, alpha=4)]).rewrites[0]
    (adapter,) = first.adapters.values()
    adapter.up.assign(rng.normal(size=adapter.up.shape))
    down, up = weights_of(adapter)

    def hook(x, source):
        return x + 2 * (source @ down @ up).reshape(x.shape)

    return Edit(first, lambda model: model.blocks[1].at("query", hook))


def reft(rng, backbone):
    first = bs.operate(backbone, [bs.Reft("tone", rank=3, at="blocks.1")]).rewrites[0]
    (layer,) = first.interventions.values()
    layer.towards.assign(rng.normal(size=layer.towards.shape))
    layer.bias.assign(rng.normal(size=3))
    along, towards, bias = weights_of(layer)
    strength = np.array([1.5, -0.5], "float32")

    def hook(h, _):
        change = h @ towards.T + bias - h @ along.T
        return h + strength[:, None, None] * (change @ along)

    return Edit(first, lambda model: model.blocks[1].at("block", hook), tone_strength=strength)


def knockout(rng, _):
    heads = np.array([[[1, 0, 0, 1]], [[0, 1, 0, 0]]], "float32")

    def hook(x, _):
        lost = np.zeros_like(x)
        lost[..., 3:, 1:3] = x[..., 3:, 1:3] * heads[:, 0, :, None, None]
        return np.where(
            lost.any(axis=-1, keepdims=True), (x - lost) / (1 - lost.sum(-1, keepdims=True)), x
        )

    return Edit(
        bs.Knockout("cut", queries=(3, None), keys=(1, 3), at="blocks.1.attention_pattern"),
        lambda model: model.blocks[1].at("attention_pattern", hook),
        cut_heads=heads,
    )


def project_out(rng, _):
    rows = rng.normal(size=(2, SIZE))
    keep = (np.eye(SIZE) - np.linalg.pinv(rows) @ rows).astype("float32")
    strength = np.array([1.0, 0.25], "float32")[:, None, None]

    def hook(h, _):
        return h + strength * (h @ keep - h)

    return Edit(
        bs.ProjectOut("none", rows, at="blocks.1.mlp_output"),
        lambda model: model.blocks[1].at("mlp_output", hook),
        none_strength=strength[:, 0, 0],
    )


def wrap(rng, _):
    def in_numpy(model):
        model.blocks[1].wrap(lambda x, block: x + np.tanh(block(0.5 * x)))

    return Edit(bs.Wrap("blocks.1", Scaled), in_numpy)


def repeat(rng, _):
    def in_numpy(model):
        model.blocks.insert(2, model.blocks[1].copy())

    return Edit(bs.Repeat("blocks.1", times=2), in_numpy)


def reorder(rng, _):
    def in_numpy(model):
        model.blocks = [model.blocks[1], model.blocks[0], model.blocks[-1].copy()]

    return Edit(bs.Reorder([1, 0, -1]), in_numpy)


def remove(rng, _):
    return Edit(bs.Remove("blocks.-1"), lambda model: model.blocks.pop())


def learned(rng, _):
    vector = rng.normal(size=SIZE).astype("float32")

    def in_numpy(model):
        model.blocks[0].at("mlp_output", lambda x, _: x + 0.5 * vector)

    steer = bs.Steer("taste", {0: vector}, "blocks.*.mlp_output", strength=0.5, trainable=True)
    return Edit(steer, in_numpy)


def save_autoencoder(folder, rng, size, latents=40, k=6):
    """Save an autoencoder of random weights as `sparsify` does, and return the weights."""
    folder.mkdir(exist_ok=True)
    weights = {
        "encoder.weight": rng.normal(size=(latents, size)).astype("float32"),
        "encoder.bias": rng.normal(size=latents).astype("float32"),
        "W_dec": rng.normal(size=(latents, size)).astype("float32"),
        "b_dec": rng.normal(size=size).astype("float32"),
    }
    save_file(weights, folder / "sae.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"activation": "topk", "k": k}))
    return weights


def sparse_autoencoder(rng, _, folder=None):
    k = 3
    w = save_autoencoder(folder, rng, SIZE, latents=12, k=k)

    def hook(x, _):
        features = np.maximum((x - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"], 0)
        least = np.sort(features, axis=-1)[..., -k, None]
        return np.where(features >= least, features, 0) @ w["W_dec"] + w["b_dec"]

    return Edit(
        bs.SparseAutoencoder("blocks.1", str(folder)),
        lambda model: model.blocks[1].at("block", hook),
    )


def transcoder(rng, _, folder=None):
    w, read = arrays(rng), []
    path = save_gemma_scope_2(folder / "transcoder", w)

    def in_numpy(model):
        model.blocks[1].at("mlp_norm", lambda s, _: read.append(s) or s)
        model.blocks[1].at(
            "mlp_output", lambda *_: decode(read[-1], encode(read[-1], w, "jumprelu"), w)
        )

    return Edit(bs.Transcoder("blocks.1.mlp_output", path), in_numpy)


EDITS = {
    f.__name__: f
    for f in (
        steer,
        patch,
        patch_along,
        patch_heads,
        clamp,
        ablate,
        ablate_pattern,
        skip,
        insert,
        replace,
        transcoder,
        low_rank,
        reft,
        project_out,
        knockout,
        wrap,
        repeat,
        reorder,
        learned,
        sparse_autoencoder,
        remove,
    )
}
