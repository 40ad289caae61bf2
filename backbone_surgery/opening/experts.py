"""Mixtures of experts as weightless layers: choosing experts, running them, balancing their load.

The weights stay in the layers of the block: its router, and its *bank*, the layer that owns the
kernels of all experts, each float[experts, inputs, outputs].
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from backbone_surgery import target

ROUTER, EXPERT_WEIGHTS = "router", "expert_weights"
"""Roles of the sites that count experts on their last axis, float[batch, time, experts]."""


def largest(x: Any, k: int) -> tuple[Any, Any]:
    """Return the `k` largest numbers of the last axis, and where they are, as `ops.top_k` does.

    On a mesh of GPUs all are sorted: to look for the largest, XLA gathers the rows of all devices.
    """
    if not (target.platform() == "gpu" and target.on_mesh()):
        return ops.top_k(x, k)
    from jax import lax

    index = lax.broadcasted_iota("int32", x.shape, x.ndim - 1)
    order = ops.where(ops.isnan(x), -math.inf, -x)  # what is no number comes first
    _, index, x = lax.sort((order, index, x), num_keys=1)
    return x[..., :k], index[..., :k]


def among_largest(x: Any, k: int) -> Any:
    """Tell of each number of the last axis whether `largest` returns it; NaN counts as the least.

    It needs no sorting, which kernels of a TPU don't have.
    """
    place = ops.cast(ops.broadcast_to(ops.arange(x.shape[-1]), x.shape), "float32")
    x, is_chosen = ops.where(ops.isnan(x), -math.inf, x), ops.zeros(x.shape, "bool")
    for _ in range(k):
        best = ops.max(ops.where(is_chosen, -math.inf, x), axis=-1, keepdims=True)
        is_best = ops.equal(x, best) & ~is_chosen
        first = ops.min(ops.where(is_best, place, math.inf), axis=-1, keepdims=True)
        is_chosen = is_chosen | ops.equal(place, first)
    return is_chosen


class TopExperts(keras.layers.Layer):
    """Choose experts for each token: turn router logits into the weights of the experts.

    Args:
        top_k: how many experts are chosen for a token.
        normalize: whether the weights of the chosen experts are made to sum to one.
        chosen_first: whether the experts are chosen by their logits, and the softmax is over those
            alone. Else it is over all experts, before some are chosen.
        upcast: whether the softmax is in float32.

    Call arguments:
        logits: float[batch, time, experts].

    Returns:
        float[batch, time, experts]: zero for an expert that is not chosen. None is, where all
        logits are minus infinity, as several `Ablate` may leave them together.
    """

    def __init__(
        self,
        top_k: int,
        normalize: bool = True,
        chosen_first: bool = False,
        upcast: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.top_k, self.normalize = top_k, normalize
        self.chosen_first, self.upcast = chosen_first, upcast

    def call(self, logits):
        return self.spread(*self.choose(logits), logits.shape[-1])

    def choose(self, logits):
        """Return the weights of the chosen experts and their numbers, [batch, time, top_k]."""
        best, index = largest(logits if self.chosen_first else self._softmax(logits), self.top_k)
        if self.chosen_first:
            best = self._softmax(best)
        elif self.normalize:
            best = best / ops.sum(best, axis=-1, keepdims=True)
        is_any_left = ops.not_equal(ops.max(logits, axis=-1, keepdims=True), -math.inf)
        return ops.where(is_any_left, best, ops.zeros_like(best)), index

    def spread(self, shares, index, count):
        """Return the weights of all `count` experts, of those that are chosen."""
        chosen = ops.one_hot(index, count, dtype=shares.dtype)
        return ops.sum(chosen * shares[..., None], axis=-2)

    def weigh(self, logits):
        """Return what a call does, as float32, by operations that kernels of a TPU have."""
        scores = logits if self.chosen_first else self._softmax(logits)
        scores = ops.cast(scores, "float32")
        is_chosen = among_largest(scores, self.top_k) | ops.isnan(scores)
        if self.chosen_first:
            best = ops.cast(self._softmax(ops.where(is_chosen, scores, -math.inf)), "float32")
        else:
            best = ops.where(is_chosen, scores, 0.0)
            best = best / ops.sum(best, axis=-1, keepdims=True) if self.normalize else best
        is_none_left = ops.all(ops.equal(logits, -math.inf), axis=-1, keepdims=True)
        return ops.where(is_none_left, 0.0, best)

    def _softmax(self, logits):
        scores = ops.cast(logits, "float32") if self.upcast else logits
        return ops.cast(ops.softmax(scores, axis=-1), self.compute_dtype)

    def compute_output_spec(self, logits):
        return keras.KerasTensor(logits.shape, self.compute_dtype)


class BalancedLoad(keras.layers.Layer):
    """Hand router logits on, and in training add the loss that keeps all experts in use.

    Args:
        loss: `(float[tokens, experts], padding_mask) -> float[]`, from router logits.

    Call arguments:
        logits: float[batch, time, experts].
        padding_mask: int[batch, time].
    """

    def __init__(self, loss: Callable[[Any, Any], Any], **kwargs) -> None:
        super().__init__(**kwargs)
        self.loss = loss

    def call(self, logits, padding_mask, training=None):
        if training:
            self.add_loss(self.loss(ops.reshape(logits, (-1, logits.shape[-1])), padding_mask))
        return logits

    def compute_output_spec(self, logits, padding_mask, training=None):
        return keras.KerasTensor(logits.shape, logits.dtype)


class Experts:
    """The kernels of a bank, as one pass over its experts reads them.

    Args:
        bank: the layer that owns the kernels.
    """

    def __init__(self, bank: keras.layers.Layer) -> None:
        self.bank = bank

    def project(self, x: Any, name: str) -> Any:
        """Multiply float[experts, tokens, inputs] by a kernel, float[experts, inputs, outputs].

        As one einsum over tokens without experts, XLA on a CPU copies the kernel, at each call.
        """
        return ops.matmul(x, self.kernel(name))

    def vector(self, name: str) -> Any:
        """Return a weight float[experts, size], such as a bias, as float[experts, 1, size]."""
        return self.kernel(name)[:, None]

    def kernel(self, name: str) -> Any:
        """Return a weight of the bank as it lies, in the dtype that is computed in."""
        return ops.convert_to_tensor(getattr(self.bank, name))


Expert = Callable[[Any, Experts], Any]
"""What each expert computes, `(x, experts) -> y`, float[experts, tokens, hidden_dim] both."""


class MixedExperts(keras.layers.Layer):
    """Run all experts on each token, and mix what they give by their weights.

    Args:
        bank: the layer of the block that owns the kernels.
        expert: what each expert computes with them.
        shared: `{attribute of the bank: axis}`: along which axis devices can share a kernel. 2 is
            what it makes, 1 what it reads (of a bias 1 is what it makes), `None` says that they
            cannot: then they share the experts.
        whole: `{attribute of the bank: whether it is added}`: its other weights, which devices
            that share features hold whole. What is added to sums is added by one of them.

    Call arguments:
        x: float[batch, time, hidden_dim].
        weights: float[batch, time, experts].

    Returns:
        float[batch, time, hidden_dim].
    """

    def __init__(
        self,
        bank: keras.layers.Layer,
        expert: Expert,
        shared: Mapping[str, int | None] | None = None,
        whole: Mapping[str, bool] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.bank, self.expert = bank, expert
        self.shared, self.whole = dict(shared or {}), dict(whole or {})

    def call(self, x, weights):
        return self.mix(x, weights, Experts(self.bank))

    def mix(self, x, weights, experts):
        """Run all experts whose kernels are given, by as many weights."""
        batch, time, hidden_dim = ops.shape(x)
        count = weights.shape[-1]
        tokens = ops.reshape(x, (1, batch * time, hidden_dim))
        each = ops.broadcast_to(tokens, (count, batch * time, hidden_dim))
        shares = ops.transpose(ops.reshape(weights, (batch * time, count)))
        made = self.expert(each, experts) * shares[..., None]
        return ops.reshape(ops.sum(made, axis=0), (batch, time, hidden_dim))

    def axes(self, devices: int) -> dict[str, int | None]:
        """Return along which axis so many devices share each weight.

        Where they cannot share what it is for, each has experts of its own, if these divide.
        """
        counts = {getattr(self.bank, name).shape[0] for name in self.shared}
        if None in self.shared.values() and all(count % devices == 0 for count in counts):
            return dict.fromkeys(self.shared, 0)
        return self.shared

    def compute_output_spec(self, x, weights):
        return keras.KerasTensor(x.shape, self.compute_dtype)
