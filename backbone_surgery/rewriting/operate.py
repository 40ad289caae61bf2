"""Pass 2, operate: apply rewrites to a backbone's graph, in order, and get a new model."""

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import tree

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening import site
from backbone_surgery.opening.layers import TokenPositions
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.rewriting import (
    Ablate,
    Capture,
    Clamp,
    Knockout,
    LowRank,
    Patch,
    ProjectOut,
    Reft,
    Rewrite,
    Skip,
    Steer,
    Surgery,
)

_LOCAL = (Ablate, Capture, Clamp, Knockout, LowRank, Patch, ProjectOut, Reft, Skip, Steer)


@dataclass(frozen=True)
class Fired:
    """Where one rewrite fired: paths of sites, or names of layers for a plain `clone_fn`."""

    rewrite: Any
    sites: tuple[str, ...]

    def __repr__(self) -> str:
        name = getattr(self.rewrite, "name", None) or getattr(self.rewrite, "__name__", None)
        return f"Fired({type(self.rewrite).__name__}{f' {name!r}' if name else ''} at {self.sites})"


@contextlib.contextmanager
def _names_in_words() -> Iterator[None]:
    """Say what to do where Keras finds two layers of one name in a model."""
    try:
        yield
    except ValueError as error:
        name = re.match(r'The name "(.+)" is used \d+ times in the model', str(error))
        if name is None:
            raise
        raise SurgeryError(
            f"operate at layer '{name[1]}': expected layers of different names in one block, and "
            "beside the blocks. Received a second one of that name. Give the layer that you put in "
            "a `name` of its own."
        ) from error


@graph.building()
@_names_in_words()
def operate(backbone: keras.Model, rewrites: Iterable[Any]) -> EditedBackbone:
    """Apply rewrites to a backbone, in order, and return a new model. Nothing is mutated.

    Args:
        backbone: a backbone, a Functional model cloned from one, or an edited backbone, whose own
            rewrites stay.
        rewrites: `Rewrite` data, or plain `clone_fn(layer, *args, **kwargs)` functions. A plain
            function before the first `Rewrite` sees the layers of the backbone itself, decoder
            blocks included; a later one sees the opened graph.

    Returns:
        An `EditedBackbone`. Its `report` says where each rewrite fired.

    Raises:
        SurgeryError: `backbone` is no model that can be opened; a rewrite matches nothing, or is
            none; two rewrites have a control of the same name; or a rewrite removes from the graph
            what an earlier one trains or declared as a control.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> steer = bs.Steer("mood", {1: np.ones(8)})
        >>> bs.operate(backbone, [steer]).report[0].sites
        ('blocks.1',)
    """
    model = backbone
    before = backbone if isinstance(backbone, EditedBackbone) else None
    applied: list[Any] = []
    report: list[Fired] = []
    added = set(before.added_layers if before else ())
    for group in _groups(_listed(rewrites)):
        if not isinstance(group[0], Rewrite):
            known = _layers(model)
            model, fired = _apply_clone_fn(model, group[0])
            added |= _layers(model) - known
            applied.append(group[0])
            report.append(Fired(group[0], tuple(fired)))
            continue
        for i, rewrite in enumerate(group):
            _check_name(rewrite, [*(before.rewrites if before else ()), *applied, *group[:i]])
        opened = open_backbone(model)
        model, surgeries = _apply(opened, group)
        added |= _layers(model) - _layers(opened)
        for rewrite, surgery in zip(group, surgeries, strict=True):
            applied.append(rewrite.applied(surgery))
            report.append(Fired(applied[-1], tuple(surgery.fired)))
    opened = open_backbone(model)
    policies = [keras.config.dtype_policy().name] if applied else []
    return EditedBackbone(
        opened.input,
        opened.output,
        owner=before.owner if before else backbone,
        family=opened.family,
        rewrites=(*(before.rewrites if before else ()), *applied),
        report=(*(before.report if before else ()), *report),
        defaults=opened.defaults,
        trained_layers=opened.trained_layers,
        signals=opened.signals,
        added_layers=frozenset(added),
        made_under=tuple(dict.fromkeys((*(before.made_under if before else ()), *policies))),
    )


def _layers(model: keras.Model) -> set[Any]:
    return {node.operation for node in graph.all_nodes(model)}


def _listed(rewrites: Iterable[Any]) -> list[Any]:
    single = callable(rewrites) or isinstance(rewrites, Rewrite | keras.KerasTensor)
    if single or not np.iterable(rewrites):
        raise SurgeryError(
            f"operate: expected a list of rewrites. Received {shown(rewrites)}. Put each rewrite "
            "in a list."
        )
    listed = list(rewrites)
    for rewrite in listed:
        if not isinstance(rewrite, Rewrite) and not graph.is_function(rewrite):
            raise SurgeryError(
                f"operate: expected each rewrite to be a `backbone_surgery.Rewrite` or a "
                f"`clone_fn(layer, *args, **kwargs)`. Received {shown(rewrite)} of type "
                f"{type(rewrite).__name__}. Pass an instance or a function."
            )
    return listed


def _check_name(rewrite: Rewrite, earlier: list[Any]) -> None:
    """Refuse two controls of one name: `controls={name: value}` would reach one of them."""
    for other in earlier:
        if rewrite.control and isinstance(other, Rewrite) and other.control == rewrite.control:
            raise SurgeryError(
                f"operate at control '{rewrite.control}': expected a name that no other rewrite "
                f"declares. Received {type(rewrite).__name__} and {type(other).__name__} of that "
                "name. Give the rewrite another name."
            )


def _groups(rewrites: list[Any]) -> list[list[Any]]:
    """Put those together, in order, that one replay can apply."""
    groups: list[list[Any]] = []
    for rewrite in rewrites:
        together = groups and _is_local(rewrite) and _is_local(groups[-1][-1])
        if together and not (rewrite.captures and any(r.captures for r in groups[-1])):
            groups[-1].append(rewrite)
        else:
            groups.append([rewrite])
    return groups


def _is_local(rewrite: Any) -> bool:
    """Tell whether a rewrite keeps what it finds at its sites, and needs no more of earlier ones.

    A subclass may do something else.
    """
    return type(rewrite) in _LOCAL and getattr(rewrite, "condition", None) is None


def _apply(model: EditedBackbone, rewrites: list[Rewrite]) -> tuple[EditedBackbone, list[Surgery]]:
    """Apply one rewrite to an opened graph, or several in one replay."""
    surgery = _begin(model)
    surgeries = [surgery]
    for _ in rewrites[1:]:
        earlier = tuple(surgeries)
        surgeries.append(replace(surgery, earlier=earlier, fired=[], trained=[], _shared={}))
    if len(rewrites) == 1:
        (signals, outputs), emitted = rewrites[0].rebuild(surgery)
    else:
        visits: list[Any] = [r.visitor(s) for r, s in zip(rewrites, surgeries, strict=True)]
        for later in visits[1:]:
            visits[0].extend(later)
        (signals, outputs), emitted = rewrites[0].replay(surgery, visits[0])
    for rewrite, own in zip(rewrites, surgeries, strict=True):
        if not own.fired:
            raise SurgeryError(
                f"operate with {shown(rewrite)}: expected a rewrite that changes the graph. "
                "Received one that fired nowhere. Check it."
            )
    emitted_once = {name: tensors[0] for name, tensors in emitted.items()}
    if any(rewrite.captures for rewrite in rewrites):
        outputs = _with_captures(outputs, emitted_once)
    else:
        signals = {**signals, **emitted_once}
    _check_controls(rewrites[-1], surgery.defaults, [outputs, signals])
    trained = surgeries[-1].trained_so_far
    _check_trained(rewrites[-1], trained, [outputs, signals])
    derived = _derived(model, surgery.inputs, outputs, surgery.defaults, signals, trained)
    return derived, surgeries


def _begin(model: EditedBackbone) -> Surgery:
    inputs = {t.name: t for t in tree.flatten(model.input)}
    token_ids, padding_mask = inputs["token_ids"], inputs["padding_mask"]
    return Surgery(
        model=model,
        places=site.places(model),
        token_ids=token_ids,
        padding_mask=padding_mask,
        positions=TokenPositions(name="positions")(token_ids, padding_mask),
        inputs=dict(inputs),
        defaults=dict(model.defaults),
        mapping={id(t): t for t in inputs.values()},
    )


def _with_captures(outputs: Any, captured: dict[str, keras.KerasTensor]) -> Any:
    """Add captures to the outputs of a model: from the first one on, they are a dict."""
    before = outputs if isinstance(outputs, dict) else {"hidden_states": outputs, "captures": {}}
    return {**before, "captures": {**before["captures"], **captured}}


def _check_controls(rewrite: Rewrite, defaults: dict[str, Any], tensors: Any) -> None:
    """Refuse a graph in which a control does nothing, as when its block was removed."""
    nodes = graph.topological_nodes(tree.flatten(tensors))
    used = {node.operation.name for node in nodes if node.is_input}
    lost = [name for name in defaults if name not in used]
    if lost:
        raise SurgeryError(
            f"operate with {shown(rewrite)}: expected every control to reach the outputs "
            f"afterwards. Received a graph in which nothing uses {', '.join(lost)} any more. Leave "
            "out the rewrite that declared it, or apply it later, elsewhere."
        )


def _check_trained(rewrite: Any, trained: Iterable[keras.layers.Layer], tensors: Any) -> None:
    """Refuse a graph without the weights of an earlier rewrite: `fit` would train nothing."""
    nodes = graph.topological_nodes(tree.flatten(tensors))
    used = {id(v) for node in nodes for v in getattr(node.operation, "weights", ())}
    lost = [x.name for x in trained if x.weights and not any(id(v) in used for v in x.weights)]
    if lost:
        raise SurgeryError(
            f"operate with {shown(rewrite)}: expected every layer that is to be trained to reach "
            f"the outputs afterwards. Received a graph in which nothing uses {', '.join(lost)} any "
            "more. Leave out the rewrite that brought it, or apply it later."
        )


def _apply_clone_fn(model: keras.Model, clone_fn: Any) -> tuple[keras.Model, list[str]]:
    """Apply a plain `clone_fn` to a graph, opened or not."""
    graph.graph_nodes(model)  # Refuses what has no graph.
    fired: list[str] = []

    def visit(layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = clone_fn(layer, *args, **kwargs)
        if not graph.is_plain_call(result, layer, args, kwargs):
            fired.append(layer.name)
        return result

    opened = isinstance(model, EditedBackbone)
    mapping = {id(t): t for t in tree.flatten(model.input)}
    wanted = [model.signals if opened else {}, model.output]
    (signals, outputs), emitted = graph.replay(wanted, mapping, visit, per_use=opened)
    if emitted:
        raise SurgeryError(
            f"operate with {clone_fn!r}: expected a clone_fn that changes the graph. Received one "
            f"that emits {sorted(emitted)}. Use `clone_layer_graph` with `collect` for that."
        )
    if not fired:
        warnings.warn(
            f"operate with {clone_fn!r}: the clone_fn left every layer as it was. Plain functions "
            "see decoder blocks only before the first Rewrite; later, their sub-layers.",
            stacklevel=5,
        )
    if opened:
        _check_trained(clone_fn, model.trained_layers, [outputs, signals])
        derived = _derived(
            model, model.input, outputs, model.defaults, signals, model.trained_layers
        )
        return derived, fired
    return keras.Model(model.input, outputs, name=model.name), fired


def _derived(
    model: EditedBackbone,
    inputs: Any,
    outputs: Any,
    defaults: Any,
    signals: Any,
    trained_layers: tuple,
) -> EditedBackbone:
    return EditedBackbone(
        {t.name: t for t in tree.flatten(inputs)},
        outputs,
        owner=model.owner,
        family=model.family,
        defaults=defaults,
        trained_layers=trained_layers,
        signals=signals,
    )
