"""What is tested of every delta rule: in pieces, and its gradients on a CPU and elsewhere."""

import jax
import numpy as np
from keras import ops

from backbone_surgery import target
from tests.helpers import relative


def run_pieces(rule, arguments, shape):
    """Run a rule over a text in three pieces, from nothing; what is read, and the last state.

    Args:
        rule: the layer.
        arguments: its arguments by name, arrays [batch, time, ...].
        shape: of its state.
    """
    time = len(arguments["padding_mask"][0])
    state, parts = {"state": np.zeros(shape, "float32")}, []
    for start, stop in ((0, time // 2), (time // 2, time // 2 + 1), (time // 2 + 1, time)):
        piece = {k: ops.convert_to_tensor(v[:, start:stop]) for k, v in arguments.items()}
        if stop > start:
            read, state = rule.call_with_state(**piece, state=state)
            parts.append(np.asarray(read))
    return np.concatenate(parts, 1), state["state"]


def check_gradients(rule, arguments):
    """Compare gradients of how a CPU runs a rule with those of how a GPU and a TPU do."""
    names = [name for name in arguments if name != "padding_mask"]

    def total(*given):
        return ops.sum(ops.square(rule(**{**arguments, **dict(zip(names, given, strict=True))})))

    found = []
    for platform in ("cpu", "gpu"):
        with target.made_for(platform):
            found.append(jax.grad(total, range(len(names)))(*(arguments[n] for n in names)))
    for one, many in zip(*found, strict=True):
        assert relative(one, many) <= 1e-5
