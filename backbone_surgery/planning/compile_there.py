"""Compile programs for chips that are not there, and write down what their compiler says.

Run as a script, in a process of its own: a compiler for TPUs or GPUs that is imported changes what
JAX looks for. It reads a request, as `planning/compilers.py` writes it, and needs JAX alone.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main(folder: Path) -> None:
    """Compile the program in a folder; `answer.json` and `program.hlo` are put beside it."""
    request = json.loads((folder / "request.json").read_text())
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    if request["platform"] == "gpu":
        import jax_plugins.xla_cuda12  # noqa: F401 - JAX would not look for it without a GPU
    topology = topologies.get_topology_desc(**request["topology"])
    count = int(np.prod(request["mesh"]))
    mesh = Mesh(np.array(topology.devices)[:count].reshape(request["mesh"]), ("batch", "model"))
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie(mesh, axes, order))
        for x, axes, order in zip(program.in_avals, request["axes"], request["orders"], strict=True)
    ]
    args, _ = jax.tree.unflatten(program.in_tree, leaves)
    begin = time.monotonic()
    lowered = jax.jit(program.call, donate_argnums=request["donated"]).lower(*args)
    answer: dict[str, Any] = {"error": None}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        answer["error"] = str(error)
    else:
        memory: Any = compiled.memory_analysis()
        answer |= {
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "new_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        }
        (folder / "program.hlo").write_text(str(compiled.as_text()))
    answer["seconds"] = time.monotonic() - begin
    (folder / "answer.json").write_text(json.dumps(answer))


def lie(mesh: Mesh, axes: list[Any], order: list[int] | None) -> Any:
    """Return how an array lies: over a mesh, and in memory."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return sharding if order is None else Format(Layout(tuple(order)), sharding)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
