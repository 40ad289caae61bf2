"""Steering over HTTP: named vectors, and from the field `steering` to controls of the engine."""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.numbers import is_int, read_finite, read_number
from backbone_surgery.rewriting import (
    Clamp,
    Condition,
    Control,
    ProjectOut,
    Rewrite,
    Schedule,
    Steer,
)
from backbone_surgery.rewriting.control import read_tokens
from backbone_surgery.rewriting.ranged import RangedRewrite
from backbone_surgery.rewriting.rewrite import by_control
from backbone_surgery.vectors import ControlVector
from backbone_surgery.vectors.vector import check_fits

_KEYS: dict[type, tuple[str, ...]] = {
    Steer: ("strength", "vector", "tokens", "schedule"),
    ProjectOut: ("strength", "vector", "blocks", "tokens"),
    RangedRewrite: ("strength", "tokens"),
    Condition: ("threshold", "tokens"),
}
"""What the object may hold that controls a rewrite of one of these classes."""

_EASYSTEER_KEYS = ("name", "scale", "layers", "apply")
_MOST_VECTORS = 256
_DEFAULTS = ("strength", "threshold", "amount")
"""Fields of rewrites that hold the default of their control."""


class Vectors:
    """The named vectors of a server, all of them checked against its model.

    Args:
        lm: the model.
        vectors: those that it begins with.
    """

    def __init__(self, lm: CachedCausalLM, vectors: Mapping[str, ControlVector]) -> None:
        self.lm = lm
        self._vectors: dict[str, ControlVector] = {}
        self._lock = threading.Lock()
        for name, vector in vectors.items():
            self.add(name, vector)

    def __getitem__(self, name: Any) -> ControlVector:
        vectors = self._vectors
        if not isinstance(name, str) or name not in vectors:
            raise SurgeryError(
                f"steering at vector {shown(name)}: expected the name of a vector that the server "
                f"knows. {closest(name, sorted(vectors))} Upload it first, to "
                "`/v1/steering/vectors`."
            )
        return vectors[name]

    def add(self, name: str, vector: ControlVector) -> None:
        """Keep a vector under a name, in the place of one that had it."""
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
            raise SurgeryError(
                f"vector {shown(name)}: expected a name of letters, digits and underscores. "
                "Received another. Rename it."
            )
        check_fits(self.lm, vector, f"vector '{name}'")
        with self._lock:
            if len(self._vectors) >= _MOST_VECTORS and name not in self._vectors:
                raise SurgeryError(
                    f"vector '{name}': expected at most {_MOST_VECTORS} vectors. Received one "
                    "more. Delete some."
                )
            self._vectors = {**self._vectors, name: vector}

    def read(self, name: str, data: bytes) -> ControlVector:
        """Read the bytes of a `.gguf` or `.safetensors` file, and keep the vector."""
        suffix = ".gguf" if data[:4] == b"GGUF" else ".safetensors"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"vector{suffix}"
            path.write_bytes(data)
            try:
                vector = ControlVector.load(path)
            except SurgeryError as error:
                raise SurgeryError(str(error).replace(str(path), name)) from error
        family = self.lm.opened.family.name
        if vector.info.get("family", family) != family:
            raise SurgeryError(
                f"vector '{name}': expected one made for a model of family '{family}'. Received "
                f"one of '{vector.info['family']}'. Use a vector of this model."
            )
        self.add(name, vector)
        return vector

    def delete(self, name: str) -> None:
        """Forget a vector."""
        self[name]
        with self._lock:
            self._vectors = {k: v for k, v in self._vectors.items() if k != name}

    def describe(self) -> list[dict[str, Any]]:
        """Return what is known of each vector."""
        return [
            {
                "name": name,
                "hidden_dim": vector.hidden_dim,
                "blocks": sorted(vector.directions),
                "norms": {b: float(np.linalg.norm(d)) for b, d in vector.directions.items()},
            }
            for name, vector in sorted(self._vectors.items())
        ]


def _default(rewrite: Rewrite, strength: float | None) -> Any:
    """Return what the control of a rewrite is where a request does not say; the server may."""
    if isinstance(rewrite, Clamp):
        values = rewrite.values if strength is None else strength
        return {"features": [*rewrite.features], "values": values}
    if strength is not None:
        return strength
    return next((getattr(rewrite, name) for name in _DEFAULTS if hasattr(rewrite, name)), None)


def describe_controls(lm: CachedCausalLM, strengths: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return for each control its name, what it is, where it acts, and its inputs.

    An input that was put into the graph by hand is one of kind `Input`.

    Args:
        lm: that is steered.
        strengths: of the server, in the place of those of the model.
    """
    edits = [f for f in lm.opened.report if isinstance(f.rewrite, Rewrite) and f.rewrite.control]
    starts = [f"{fired.rewrite.control}_" for fired in edits]
    # Of two controls `mood` and `mood_b`, an input `mood_b_strength` is the second one's.
    owners = {
        k: max((s for s in starts if k.startswith(s)), key=len, default=None)
        for k in lm.opened.defaults
    }
    described = []
    for fired in edits:
        rewrite, name = fired.rewrite, fired.rewrite.control
        inputs = {k: x for k, x in lm.opened.defaults.items() if owners[k] == f"{name}_"}
        described.append(
            {
                "name": name,
                "kind": type(rewrite).__name__,
                "sites": list(fired.sites),
                "default": _default(rewrite, strengths.get(name)),
                "tokens": getattr(rewrite, "tokens", None),
                "inputs": {
                    k: {"shape": list(x.shape), "dtype": x.dtype.name} for k, x in inputs.items()
                },
            }
        )
    own: dict[str, Any] = {"kind": "Input", "sites": [], "tokens": None}
    for name, tensor in lm.opened.inputs_by_hand.items():
        facts = {"shape": list(tensor.shape[1:]), "dtype": tensor.dtype}
        default = strengths.get(name)
        described.append({"name": name, **own, "default": default, "inputs": {name: facts}})
    return described


def read_steering(
    lm: CachedCausalLM,
    vectors: Vectors,
    steering: Mapping[str, Any],
    length: int,
    strengths: Mapping[str, float],
) -> dict[str, Any]:
    """Turn the field `steering` of a request into controls.

    Args:
        lm: that is steered.
        vectors: named ones.
        steering: the field.
        length: tokens that a text may have.
        strengths: those of the server, of controls that the field gives none.

    Raises:
        SurgeryError: a control, key or vector that is not known, or a value that says nothing.
    """
    rewrites = by_control(lm.opened.rewrites)
    known = [*rewrites, *lm.opened.inputs_by_hand]
    if "vectors" in steering and "vectors" not in rewrites:
        steering = _of_easysteer(steering, rewrites, vectors, strengths)
    controls: dict[str, Any] = {}
    for name, value in {**strengths, **steering}.items():
        if name not in known:
            raise SurgeryError(
                f"steering at '{name}': expected a control of this model. "
                f"{closest(name, known)} `GET /v1/steering` lists them."
            )
        rewrite = rewrites.get(name)
        kinds = [kind for kind in _KEYS if isinstance(rewrite, kind)]
        if isinstance(value, Mapping) and rewrite is not None and kinds:
            amount = "threshold" if kinds[0] is Condition else "strength"
            says_none = value.get(amount) is None and value.get("schedule") is None
            own = {amount: strengths[name]} if says_none and name in strengths else {}
            controls[name] = _control(rewrite, {**value, **own}, _KEYS[kinds[0]], vectors, length)
        elif isinstance(value, bool | str) or value is None:
            raise SurgeryError(
                f"steering at '{name}': expected a number, or an object. Received {shown(value)}. "
                f'Pass `{{"{name}": 0.5}}`, say.'
            )
        else:
            controls[name] = value if rewrite is None else _by_site(value)
    return controls


def _control(
    rewrite: Any, value: Mapping[str, Any], keys: Sequence[str], vectors: Vectors, length: int
) -> Control:
    where = f"steering at '{rewrite.name}'"
    unknown = [key for key in value if key not in keys]
    if unknown:
        raise SurgeryError(
            f"{where}: expected {', '.join(keys)}. Received '{unknown[0]}'. "
            f"{closest(unknown[0], keys)}"
        )
    strength, schedule = value.get("strength"), value.get("schedule")
    if "strength" in keys and not rewrite.strength and strength is None and schedule is None:
        amounts = "a `strength` or a `schedule`" if "schedule" in keys else "a `strength`"
        raise SurgeryError(
            f"{where}: expected {amounts}, since it is 0 by default here. Received "
            f'{shown(sorted(value))}. Pass `"strength": 1.5`, say.'
        )
    if schedule is not None:
        strength = _schedule(where, schedule, 1.0 if strength is None else strength, length)
    tokens = value.get("tokens")
    if tokens is not None:
        tokens = read_tokens(tokens, where)
    directions: Any = vectors[value["vector"]] if value.get("vector") is not None else None
    if isinstance(rewrite, ProjectOut):
        directions = _span(where, directions, value.get("blocks"))
    return _made(where, _by_site(strength), directions, tokens, value.get("threshold"))


def _span(where: str, vector: ControlVector | None, blocks: Any) -> np.ndarray | None:
    """Return the directions of a vector, of some blocks or of all: float[blocks, hidden_dim]."""
    if vector is None and blocks is not None:
        raise SurgeryError(
            f"{where}: expected `blocks` beside a `vector`. Received no vector. Name one."
        )
    if vector is None:
        return None
    chosen = vector if blocks is None else _of_blocks(vector, blocks, f"{where}, 'blocks'")
    return np.stack([*chosen.directions.values()])


def _by_site(value: Any) -> Any:
    """Make a list of numbers those of the sites of one row, which is what a request is."""
    array = read_finite(value) if isinstance(value, list) else None
    return value if array is None or array.ndim != 1 or len(array) < 2 else [value]


def _made(where: str, *parts: Any) -> Control:
    """Make a `Control`, and say which one if it cannot be."""
    try:
        return Control(*parts)
    except SurgeryError as error:
        raise SurgeryError(str(error).replace("Control", where, 1)) from error


def _schedule(where: str, schedule: Any, strength: Any, length: int) -> Schedule:
    """Return a schedule of strengths, from factors for each generated token."""
    factors = read_finite(schedule) if isinstance(schedule, list) else None
    if factors is None or factors.ndim != 1 or read_number(strength) is None:
        raise SurgeryError(
            f"{where}: expected `schedule` to be a list of numbers, factors of one `strength`. "
            f"Received {shown(schedule)}, and strength {shown(strength)}. Pass a factor for each "
            "generated token; the last one holds."
        )
    if len(factors) > length:
        raise SurgeryError(
            f"{where}: expected `schedule` to have at most {length} factors, as many as a text has "
            f"tokens here. Received {len(factors)}. Leave out the others, which could never act."
        )
    return Schedule([float(strength) * float(factor) for factor in schedule])


def _of_easysteer(
    steering: Mapping[str, Any],
    rewrites: Mapping[str, Any],
    vectors: Vectors,
    strengths: Mapping[str, float],
) -> dict[str, Any]:
    """Read EasySteer's `{"vectors": [{"name", "scale", "layers", "apply"}]}`.

    Each vector acts through the control of its name, or, if there is none, through the first
    control that no other vector takes; those that the server gives a strength come last.
    """
    listed = steering["vectors"]
    entries = listed if isinstance(listed, list) else []
    if set(steering) != {"vectors"} or not entries or not all(isinstance(e, dict) for e in entries):
        raise SurgeryError(
            "steering at 'vectors': expected a list of objects with name and scale, and nothing "
            f"beside it. Received {shown(dict(steering))}. `GET /v1/steering` lists controls."
        )
    names = [entry.get("name") for entry in entries]
    steers = [n for n, r in rewrites.items() if isinstance(r, Steer)]
    free = sorted((n for n in steers if n not in names), key=lambda n: n in strengths)
    result: dict[str, Any] = {}
    for entry in entries:
        unknown = [key for key in entry if key not in _EASYSTEER_KEYS]
        if unknown:
            raise SurgeryError(
                f"steering at 'vectors': expected {', '.join(_EASYSTEER_KEYS)}. Received "
                f"'{unknown[0]}', which means nothing here. Leave it out."
            )
        name = entry.get("name")
        vector = vectors[name]
        is_free = name not in rewrites and bool(free)
        control = free.pop(0) if is_free else name if name in steers else None
        if control is None or control in result:
            raise SurgeryError(
                f"steering at vector {shown(name)}: expected a `Steer` for each vector. Received "
                f"{len(entries)} vectors for a model with: {', '.join(steers) or 'none'}. Serve it "
                "with more."
            )
        if entry.get("layers") is not None:
            vector = _of_blocks(vector, entry["layers"], "steering at 'layers'")
        scale = 1.0 if entry.get("scale") is None else entry["scale"]
        result[control] = _made(f"steering at '{name}'", scale, vector, _tokens(entry))
    return result


def _of_blocks(vector: ControlVector, blocks: Any, where: str) -> ControlVector:
    listed = blocks if isinstance(blocks, list) else [blocks]
    if not listed or not all(is_int(b) and b in vector.directions for b in listed):
        raise SurgeryError(
            f"{where}: expected blocks that the vector has, "
            f"{sorted(vector.directions)}. Received {shown(blocks)}. Choose among them."
        )
    return ControlVector({b: vector.directions[b] for b in listed}, vector.info)


def _tokens(entry: Mapping[str, Any]) -> str:
    """Read `apply` as the tokens that are steered."""
    apply = entry.get("apply")
    if apply is None:
        return "all"
    known = {"all": ("all", "all"), "prompt": ("all", None), "generated": (None, "all")}
    parts = (apply.get("prompt"), apply.get("generation")) if isinstance(apply, dict) else ()
    tokens = [name for name, meant in known.items() if meant == parts]
    if not tokens or set(apply) - {"prompt", "generation"}:
        raise SurgeryError(
            'steering at \'apply\': expected {"prompt": "all" or null, "generation": "all" or '
            f"null}}. Received {shown(apply)}. Pass `tokens` to a control for other ranges."
        )
    return tokens[0]
