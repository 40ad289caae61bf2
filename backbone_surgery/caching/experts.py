"""`ChosenExperts`: a mixture that runs the chosen experts alone, while few tokens are run.

KerasHub runs all experts on each token. For one token most of what is read is then of no use, and
reading weights is what decoding waits for.
"""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph, target
from backbone_surgery.kernels import gpu, gpu_experts
from backbone_surgery.opening.experts import Experts, MixedExperts, TopExperts, largest
from backbone_surgery.opening.site import Identity

_PIECE_BYTES = 2**22
"""How much is copied at a time on a CPU: less than its cache holds."""

_MOST_PAIRS = 16
"""Of a token and an expert that are run one by one on a TPU: each is written out in the program."""

_TURN_BYTES = 5 * 2**20
"""What a TPU reads of all experts while a turn of one begins: about 9 µs by a v5e's compiler."""

_MOST_SHARE, _MOST_OWN_SHARE = 0.9, 0.6
"""Largest share of the experts that is run one by one, after the cost of a turn.

The second is for devices that have experts of their own, since one of them has the most to run.
"""


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
        if not isinstance(layer, Identity):
            if not getattr(layer, "keeps_zeros", False):
                return None
            is_edited = True
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

        placement, platform = target.placement(), target.platform()
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
            with target.made_for(platform):
                kernels = SimpleNamespace(**bank)
                if has_own:
                    made = self._run_own(x, given, kernels, used, which)
                else:
                    made = self._run_few(x, given, kernels, used)
            return jax.lax.psum(made, along)

        def part(axis):
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, along)

        specs = by_rows, by_rows, {name: part(axis) for name, axis in axes.items()}
        program = jax.shard_map(
            run, mesh=placement.mesh, in_specs=specs, out_specs=by_rows, check_vma=False
        )
        return program(x, given, bank)

    def _run_own(self, x, given, bank, rows, which):
        """Run the experts of one device, whose kernels these are: share number `which` of all."""
        batch, time, _ = x.shape
        tokens, count = rows * time, given.shape[-1]
        own = getattr(bank, next(iter(self.axes))).shape[0]
        weights = ops.slice(self._weights(given[:rows]), (0, 0, which * own), (rows, time, own))
        weights = _filled_up(weights, batch)  # the rows of no use choose none
        if self._few_are_chosen(tokens, count, bank, _MOST_OWN_SHARE):
            return self._run_in_turn(x, weights, bank, tokens)
        if target.platform() == "gpu" and tokens * self.top_k < self._most_pairs(own):
            made = self._run(x[:rows], weights[:rows], bank, partial(largest, k=self.top_k))
            return _filled_up(made, x.shape[0])
        return self.mixed.mix(x, weights, _Kernels(bank, self.compute_dtype))

    def _run_few(self, x, given, bank, rows):
        """Run the experts that are chosen; all, where so many tokens choose most of them."""
        batch, time, _ = x.shape
        if rows * time * self.top_k < self._most_pairs(given.shape[-1]):
            return self._run_pairs(x, given, bank, rows)
        if self._few_are_chosen(rows * time, given.shape[-1], bank, _MOST_SHARE):
            weights = self._weights(given[:rows])
            return _filled_up(self._run_in_turn(x[:rows], weights, bank, rows * time), batch)
        return self.mixed.mix(x, self._weights(given), _Kernels(bank, self.compute_dtype))

    def _weights(self, given):
        return given if self.chooser is None else self.chooser(given)

    def _most_pairs(self, count):
        """Return from how many pairs of a token and an expert on these are not run by themselves.

        They are few on a TPU, which takes one kernel after the other; a GPU needs a kernel for it.
        """
        most = {"tpu": min(count, _MOST_PAIRS + 1), "gpu": count if gpu.available() else 0}
        return most.get(target.platform(), count)

    def _few_are_chosen(self, tokens, count, bank, most):
        """Tell whether a TPU gains by running those of all experts in turn that any token weighs.

        Not where XLA shares each expert: in a loop, devices would exchange sums at each turn.
        """
        if target.platform() != "tpu" or not target.has_orders():
            return False
        kernels = [getattr(bank, name) for name in self.mixed.shared]
        size = sum(math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize for x in kernels)
        share = 1 - (1 - self.top_k / count) ** tokens  # if all are as likely
        return share < most * size / (size + _TURN_BYTES)

    def _run_pairs(self, x, given, bank, rows):
        # On a TPU the rows of no use go through the experts of a lone token: fewer kernels.
        batch, time, _ = x.shape
        is_lone = rows * time == 1 and target.platform() == "tpu" and target.has_orders()
        choose = self.chooser.choose if self.chooser else partial(largest, k=self.top_k)
        x = x if is_lone else x[:rows]
        return _filled_up(self._run(x, given[:rows], bank, choose), batch)

    def _run(self, x, given, bank, choose):
        """Run the chosen experts on each token, or those of one token on all."""
        batch, time, hidden_dim = x.shape
        tokens = given.shape[0] * time
        shares, index = (ops.reshape(y, (tokens * self.top_k,)) for y in choose(given))
        chosen = _Chosen(bank, index, self.compute_dtype)
        each = ops.reshape(x, (tokens, batch * time // tokens, hidden_dim))
        made = self.mixed.expert(ops.repeat(each, self.top_k, axis=0), chosen)
        made = ops.reshape(made * shares[:, None, None], (tokens, self.top_k, *each.shape[1:]))
        return ops.reshape(ops.sum(made, axis=1), (batch, time, hidden_dim))

    def _run_in_turn(self, x, weights, bank, used_tokens):
        """Run the experts that any token weighs on all tokens, one after the other.

        So many of the tokens weigh any.
        """
        batch, time, hidden_dim = x.shape
        tokens, count = batch * time, weights.shape[-1]
        weights = ops.transpose(ops.reshape(weights, (tokens, count)))
        # A token whose weights are NaN chooses no expert: its sum is NaN from the start.
        is_lost = ops.any(ops.isnan(weights), axis=0)[:, None]
        first = ops.where(is_lost, np.nan, ops.zeros((tokens, hidden_dim), "float32"))
        is_used = ops.cast(ops.any(ops.abs(weights) > 0, axis=1), "int32")
        turns, used = min(used_tokens * self.top_k, count), ops.sum(is_used)
        _, order = ops.top_k(is_used, turns)
        each = ops.reshape(x, (1, tokens, hidden_dim))

        def run(i, total):
            which = ops.slice(order, (i,), (1,))
            made = self.mixed.expert(each, _Chosen(bank, which, self.compute_dtype))
            share = ops.slice(weights, (which[0], 0), (1, tokens))
            return total + ops.cast(made[0] * ops.transpose(share), "float32")

        def turn(i, total):
            return ops.cond(i < used, lambda: run(i, total), lambda: total)

        total = ops.fori_loop(0, turns, turn, ops.cast(first, "float32"))
        return ops.reshape(ops.cast(total, x.dtype), (batch, time, hidden_dim))

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
    """

    def __init__(self, bank: keras.layers.Layer, index: Any, dtype: str) -> None:
        super().__init__(bank)
        self.index, self.dtype = index, dtype

    def project(self, x: Any, name: str) -> Any:
        """Multiply float[chosen, tokens, inputs] by the kernels of the experts.

        The kernels are copied together before they are multiplied. On a CPU that is done in pieces
        that stay in its cache, so that memory is read once and not written. Not so for kernels in
        half precision: XLA on a CPU would make float32 of the whole bank, in a loop. Nothing is
        copied on a GPU, by a kernel, and on a TPU, where they are multiplied in turn: XLA makes one
        kernel of that and the taking.
        """
        kernel = self.kernel(name)
        experts, inputs, outputs = kernel.shape
        chosen, tokens, _ = x.shape
        if target.platform() == "tpu":
            return ops.stack([self._times_one(x, kernel, i) for i in range(chosen)])
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

    def _times_one(self, x: Any, kernel: Any, which: int) -> Any:
        """Multiply the tokens of one of the experts by its kernel, float[tokens, outputs].

        A product of one row would become a sum, which no matrix unit computes: so the tokens of
        the others are multiplied along.
        """
        # Without a sign none can be counted from the end.
        start = [ops.cast(i, "uint32") for i in (self.index[which], 0, 0)]
        one = ops.slice(kernel, start, (1, *kernel.shape[1:]))[0]
        # Else XLA may turn all of them, once.
        one = ops.cast(target.in_order(one, axes=target.order_of_kernel(one.shape)), self.dtype)
        if x.shape[1] > 1:
            return target.in_order(ops.matmul(x[which], one))
        return ops.matmul(x[:, 0], one)[which : which + 1]

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
