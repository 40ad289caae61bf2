"""`ChosenExperts`: a mixture that runs the chosen experts alone, while few tokens are run.

KerasHub runs all experts on each token. For one token most of what is read is then of no use, and
reading weights is what decoding waits for.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.kernels import gpu, gpu_experts, tpu, tpu_choice, tpu_experts
from backbone_surgery.opening.experts import Experts, MixedExperts, TopExperts, largest
from backbone_surgery.opening.site import Identity

_PIECE_BYTES = 2**22
"""How much is copied at a time on a CPU: less than its cache holds."""

_MOST_SHARE = 0.9
"""Largest share of the experts that a TPU runs without the others."""

_MOST_MADE = 2**26
"""Bytes that one of its products makes at most: for all tokens by each of these experts."""


class Choice(NamedTuple):
    """What is known of the weights of experts.

    Attributes:
        top_k: how many of a token are not zero, at most.
        chooser: what makes the weights out of `given`; `None` if `given` are the weights.
        given: float[batch, time, experts].
    """

    top_k: int
    chooser: TopExperts | None
    given: keras.KerasTensor


def choice_of(weights: keras.KerasTensor, compute_dtype: str) -> Choice | None:
    """Return which experts may have a weight that is not zero, or `None` if all may.

    It is known where the weights come from `TopExperts`, and nothing was put between that gives
    weight to an expert that had none. Layers with `keeps_zeros` do not.

    Args:
        weights: of the experts, in the graph.
        compute_dtype: of the layer that runs them.
    """
    given, is_edited = weights, False
    while True:
        node = graph.node_of(given)
        layer = node.operation
        if type(layer) is TopExperts:
            if is_edited or layer.compute_dtype != compute_dtype:
                return Choice(layer.top_k, None, weights)
            return Choice(layer.top_k, layer, node.input_tensors[0])
        if getattr(layer, "keeps_zeros", False):
            is_edited = True
        elif not isinstance(layer, Identity):
            return None
        given = node.input_tensors[0]


def axes_shared(mixed: MixedExperts, devices: int) -> dict[str, int] | None:
    """Return the axis along which each weight of the experts is split over devices.

    For weights without values, that along which it would be split.

    Returns:
        `{attribute of the bank: axis}`; `None` if they do not share all of them so.
    """
    if devices == 1 or not mixed.shared:
        return None
    axes: dict[str, int] = {}
    for name, axis in mixed.axes(devices).items():
        variable = getattr(mixed.bank, name)
        if axis is None or variable.shape[axis] % devices:
            return None
        array, shape = graph.array_of(variable), list(variable.shape)
        shape[axis] //= devices
        if hasattr(array, "sharding") and array.sharding.shard_shape(array.shape) != tuple(shape):
            return None
        axes[name] = axis
    return axes


class ChosenExperts(keras.layers.Layer):
    """Compute what a `MixedExperts` computes, reading for each token the experts that it weighs.

    Args:
        mixed: the layer.
        top_k: how many weights of a token are not zero, at most.
        chooser: what chooses them, if it is called on router logits: then they are sorted once.
        devices: how many of a mesh share the weights.

    Call arguments:
        x: float[batch, time, hidden_dim].
        given: float[batch, time, experts], the weights, or the logits.

    Returns:
        float[batch, time, hidden_dim].
    """

    def __init__(
        self,
        mixed: MixedExperts,
        top_k: int,
        chooser: TopExperts | None = None,
        devices: int = 1,
        **kwargs,
    ) -> None:
        name = f"chosen_{mixed.name}" + (f"_by_{chooser.name}" if chooser else "")
        super().__init__(dtype=mixed.dtype_policy, name=name, **kwargs)
        self.mixed, self.top_k, self.chooser = mixed, top_k, chooser
        self.axes = axes_shared(mixed, devices)

    def call(self, x, given):
        """Run the experts that each token weighs; all, once that would read as many kernels."""
        batch, time, _ = ops.shape(x)
        rows = target.rows_of_use(batch) if isinstance(batch, int) else batch
        if self.axes:
            if target.on_mesh():
                return self._run_on_each(x, given, rows)
            return self.mixed(x, self._weights(given))
        if isinstance(rows, int) and isinstance(time, int):
            return self._run_few(x, given, self.mixed.bank, rows)
        return self.mixed(x, self._weights(given))

    def _run_on_each(self, x, given, rows):
        """Run on each device of a mesh its part of the experts, and add up what they give.

        That is a part of the features of all, or some of the experts.
        """
        import jax
        from jax.sharding import PartitionSpec

        placement = target.placement()
        along, by_rows = placement.axes_of_heads, PartitionSpec(placement.rows_axis(x.shape[0]))
        has_own, whole = 0 in self.axes.values(), self.mixed.whole
        axes = {**dict.fromkeys(whole, 0 if has_own else None), **self.axes}
        with graph.as_stored():
            bank = {name: ops.convert_to_tensor(getattr(self.mixed.bank, name)) for name in axes}

        def run(x, given, bank):
            used, which = min(rows, x.shape[0]), jax.lax.axis_index(along)
            if not has_own:
                added = [name for name in whole if whole[name]]
                bank |= {name: ops.where(which == 0, bank[name], 0) for name in added}
            kernels = SimpleNamespace(**bank)
            if has_own:
                made = self._run_own(x, given, kernels, used, which)
            else:
                made = self._run_few(x, given, kernels, used)
            return jax.lax.psum(made, along)

        def part(axis):
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, along)

        specs = by_rows, by_rows, {name: part(axis) for name, axis in axes.items()}
        return placement.share_out(run, (x, given, bank), specs, by_rows)

    def _run_own(self, x, given, bank, rows, which):
        """Run the experts of one device, whose kernels these are: share number `which` of all."""
        batch, time, _ = x.shape
        tokens, count = rows * time, given.shape[-1]
        own = getattr(bank, next(iter(self.axes))).shape[0]
        if self._few_are_used(tokens, count, x, bank):
            return self._run_used(x, given, bank, tokens, own, which * own)
        weights = ops.slice(self._weights(given[:rows]), (0, 0, which * own), (rows, time, own))
        if target.platform() == "gpu" and self._few_are_chosen(tokens, own):
            return self._run(x, weights, bank, partial(largest, k=self.top_k))
        return self.mixed.mix(x, _filled_up(weights, batch), _Kernels(bank, self.compute_dtype))

    def _run_few(self, x, given, bank, rows):
        """Run the experts that are chosen; all, where so many tokens choose most of them."""
        tokens, count = rows * x.shape[1], given.shape[-1]
        if self._few_are_used(tokens, count, x, bank):
            return self._run_used(x, given, bank, tokens, count)
        if self._few_are_chosen(tokens, count):
            choose = self.chooser.choose if self.chooser else partial(largest, k=self.top_k)
            return self._run(x, given[:rows], bank, choose)
        return self.mixed.mix(x, self._weights(given), _Kernels(bank, self.compute_dtype))

    def _weights(self, given):
        return given if self.chooser is None else self.chooser(given)

    def _few_are_chosen(self, tokens, count):
        """Tell whether each token runs its experts by itself: a CPU does, a GPU by a kernel."""
        can = {"cpu": True, "gpu": gpu.available()}.get(target.platform(), False)
        return can and tokens * self.top_k < count

    def _few_are_used(self, tokens, count, x, bank):
        """Tell whether a TPU runs on all tokens those experts alone that any of them weighs."""
        run, dtype = x.shape[0] * x.shape[1], self.compute_dtype
        kernels = [getattr(bank, name) for name in self.mixed.shared]
        kernels = [kernel for kernel in kernels if len(kernel.shape) == 3]
        can = kernels and all(tpu_experts.takes(run, kernel, dtype) for kernel in kernels)
        if not can or not tpu.available():
            return False
        turns = min(tokens * self.top_k, kernels[0].shape[0])
        made = turns * run * max(kernel.shape[2] for kernel in kernels) * np.dtype(dtype).itemsize
        share = 1 - (1 - self.top_k / count) ** tokens  # if all are as likely
        return share < _MOST_SHARE and made <= _MOST_MADE

    def _run(self, x, given, bank, choose):
        """Run the chosen experts on each token of use, by itself."""
        batch, time, hidden_dim = x.shape
        rows = given.shape[0]
        shares, index = (ops.reshape(y, (rows * time * self.top_k,)) for y in choose(given))
        each = ops.repeat(ops.reshape(x[:rows], (rows * time, 1, hidden_dim)), self.top_k, axis=0)
        made = self.mixed.expert(each, _Chosen(bank, index, self.compute_dtype))
        made = ops.reshape(made * shares[:, None, None], (rows * time, self.top_k, hidden_dim))
        return _filled_up(ops.reshape(ops.sum(made, axis=1), (rows, time, hidden_dim)), batch)

    def _run_used(self, x, given, bank, tokens, own, first=0):
        """Run on all tokens the experts that any of the first so many weighs.

        The bank has its own ones, so many, from number `first` of all on.
        """
        each = ops.reshape(x, (1, -1, x.shape[-1]))
        used = tpu_choice.used_experts(
            ops.reshape(given, (each.shape[1], -1)),
            self.chooser.weigh if self.chooser else lambda weights: weights,
            turns=min(tokens * self.top_k, own),
            tokens=tokens,
            own=own,
            first=first,
        )
        chosen = _Chosen(bank, used.order, self.compute_dtype, used.count)
        made = self.mixed.expert(each, chosen) * used.shares[..., None]
        return ops.reshape(ops.cast(ops.sum(made, axis=0), x.dtype), x.shape)

    def compute_output_spec(self, x, given):
        """Return what the layer says of itself."""
        return keras.KerasTensor(x.shape, self.compute_dtype)


def _filled_up(made: Any, batch: int) -> Any:
    """Add empty rows, up to as many as the batch has."""
    empty = batch - made.shape[0]
    return ops.pad(made, [[0, empty], [0, 0], [0, 0]]) if empty else made


class _Kernels(Experts):
    """Kernels as they are stored, computed with in a dtype."""

    def __init__(self, bank: Any, dtype: str) -> None:
        super().__init__(bank)
        self.dtype = dtype

    def kernel(self, name: str) -> Any:
        return ops.cast(super().kernel(name), self.dtype)


class _Chosen(Experts):
    """Chosen experts of a bank: what is float[experts, ...] of all is float[chosen, ...] of these.

    Weights are cast after they are taken: cast before, the whole bank would be read.

    Args:
        bank: the layer that owns the kernels.
        index: int[chosen], which experts they are.
        dtype: the dtype that is computed in.
        used: how many of them, the first ones, a TPU is to run.
    """

    def __init__(self, bank: Any, index: Any, dtype: str, used: Any = None) -> None:
        super().__init__(bank)
        self.index, self.dtype, self.used = index, dtype, used

    def project(self, x: Any, name: str) -> Any:
        """Multiply float[chosen, tokens, inputs] by the kernels of the experts.

        The kernels are copied together before they are multiplied. On a CPU that is done in pieces
        that stay in its cache, so that memory is read once and not written. Not so for kernels in
        half precision: XLA on a CPU would make float32 of the whole bank, in a loop. Nothing is
        copied on a GPU and on a TPU, by a kernel for each. That of a TPU takes the tokens of one
        expert for all, too.
        """
        kernel = self.kernel(name)
        experts, inputs, outputs = kernel.shape
        if target.platform() == "tpu":
            return tpu_experts.product_of_used(x, kernel, self.index, self.used)
        chosen, tokens, _ = x.shape
        if target.platform() == "gpu":
            total = gpu_experts.product_of_chosen(x[:, 0], kernel, self.index)
            return ops.cast(total, x.dtype)[:, None]
        in_pieces = (
            target.platform() == "cpu"
            and keras.backend.standardize_dtype(kernel.dtype) == "float32"
        )
        size = _piece(inputs, chosen * outputs * kernel.dtype.itemsize) if in_pieces else inputs
        if size == inputs:
            return ops.matmul(x, self._take(kernel, self.index))
        count = inputs // size
        pieces = ops.reshape(kernel, (experts * count, size, outputs))

        def add(i: Any, total: Any) -> Any:
            part = ops.slice(x, (0, 0, i * size), (chosen, tokens, size))
            product = ops.matmul(part, self._take(pieces, self.index * count + i))
            return total + ops.cast(product, "float32")

        total = ops.fori_loop(0, count, add, ops.zeros((chosen, tokens, outputs), "float32"))
        return ops.cast(total, x.dtype)

    def vector(self, name: str) -> Any:
        return self._take(super().vector(name), self.index)

    def kernel(self, name: str) -> Any:
        """Return a weight of the bank as it lies, in the dtype in which it is stored."""
        with graph.as_stored():
            return super().kernel(name)

    def _take(self, kernel: Any, index: Any) -> Any:
        """Take entries of the first axis; all are there, and nothing need look whether they are."""
        if keras.config.backend() != "jax":
            return ops.cast(ops.take(kernel, index, axis=0), self.dtype)
        import jax.numpy as jnp

        return ops.cast(jnp.take(kernel, index, axis=0, mode="clip"), self.dtype)


def _piece(inputs: int, row_bytes: int) -> int:
    """Return how many inputs of a kernel to take at a time on a CPU."""
    most = max(_PIECE_BYTES // row_bytes, 1)
    return max(size for size in range(1, min(inputs, most) + 1) if inputs % size == 0)
