"""What a rewrite is: frozen data that knows which nodes to put where, and its run-time controls."""

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import keras
import numpy as np

from backbone_surgery import graph
from backbone_surgery.errors import SelectorError, SurgeryError, closest, shown
from backbone_surgery.graph.emission import Emitted
from backbone_surgery.opening.layers import TokenPositions
from backbone_surgery.opening.site import BesideInput, BlockInput, Place, Site, is_block, select


@dataclass(frozen=True)
class Rows:
    """The rows that controls are bound for.

    Attributes:
        prompt_lengths: int[batch], number of prompt tokens of each row.
        sites: the paths of the sites at which the rewrite fired.
        shapes: `{input name: shape of one row}` of the graph.
        defaults: `{input name: default of one row}` of the graph.
        max_positions: how many positions the model has learned, if it is limited.
        lengths: int[batch], how many tokens of each row the model runs at most, if that is known.
    """

    prompt_lengths: np.ndarray
    sites: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    defaults: Mapping[str, np.ndarray] = field(default_factory=dict)
    max_positions: int | None = None
    lengths: np.ndarray | None = None

    @property
    def batch(self) -> int:
        """How many rows there are."""
        return len(self.prompt_lengths)


@dataclass
class Surgery:
    """One rewrite being applied to one graph: what it may read, declare and report.

    Attributes:
        model: the `EditedBackbone` being rewritten.
        places: its sites, in the order in which they run.
        token_ids: int[batch, time], an input of the new graph.
        padding_mask: int[batch, time], likewise.
        positions: int32[batch, time], the number of each token within its row.
        inputs: the inputs declared so far, by name.
        defaults: the default of one row, for each of them that has one.
        mapping: `{id(old tensor): new tensor}`, as far as the graph has been replayed.
        earlier: the rewrites that are applied in the same replay, before this one.
        fired: the paths of the sites that were rewritten.
        trained: layers that the rewrite brings along to be trained, see `train`.
        stream: the hidden states that go into the block being visited.
        beside: what goes into it beside them, see `Family.beside`.
    """

    model: Any
    places: list[Place]
    token_ids: keras.KerasTensor
    padding_mask: keras.KerasTensor
    positions: keras.KerasTensor
    inputs: dict[str, keras.KerasTensor]
    defaults: dict[str, np.ndarray]
    mapping: dict[int, Any]
    earlier: tuple["Surgery", ...] = ()
    fired: list[str] = field(default_factory=list)
    trained: list[keras.layers.Layer] = field(default_factory=list)
    stream: keras.KerasTensor | None = None
    beside: keras.KerasTensor | None = None
    _shared: dict[str, Any] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The number of the site being rewritten, among those that the rewrite fires at."""
        return len(self.fired) - 1

    @property
    def trained_so_far(self) -> tuple[keras.layers.Layer, ...]:
        """The layers that are to be trained, of this rewrite and of all before it."""
        own = [layer for surgery in (*self.earlier, self) for layer in surgery.trained]
        return (*self.model.trained_layers, *own)

    def select(self, selector: str) -> list[Place]:
        """Return the sites that a selector picks; raises when it picks none."""
        chosen = set(select(selector, [p.path for p in self.places]))
        return [p for p in self.places if p.path in chosen]

    def sites_of(self, shape: tuple[int | None, ...], place: Place) -> str:
        """Say which sites of a block hold tokens of a shape, for errors at a site of that block."""
        near = [p.path for p in self.places if p.block == place.block]
        fits = [p.path for p in self.places if p.path in near and p.shape[2:] == shape]
        return f"Sites of {list(shape)} here are {', '.join(fits) or 'none'}."

    def train(self, layer: keras.layers.Layer) -> None:
        """Declare a layer to be trained: where there is one, `fit` leaves the backbone alone."""
        if layer not in self.trained:
            self.trained.append(layer)

    def control(
        self, name: str, default: Any, shape: tuple[int | None, ...] | None = None
    ) -> keras.KerasTensor:
        """Declare a run-time input: `default.dtype[batch, *shape]`.

        Args:
            name: name of the input, unique in the graph.
            default: array of one row, used where a call leaves the control out.
            shape: the shape of one row, with `None` where it may vary; by default that of
                `default`.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise SurgeryError(
                f"operate at control {shown(name)}: expected a name of letters, digits and "
                "underscores. Received one that is not. Give the rewrite another name."
            )
        if name in self.inputs:
            raise SurgeryError(
                f"operate at control '{name}': expected a name that no other rewrite declares. "
                f"Received a graph with inputs {sorted(self.inputs)}. Give the rewrite another "
                "name."
            )
        default = np.asarray(default)
        shape = default.shape if shape is None else shape
        tensor = keras.Input(shape, dtype=default.dtype.name, name=name)
        self.inputs[name] = tensor
        self.defaults[name] = default
        return tensor

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Make something at the first site that needs it, and share it with the others."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def signal(self, name: str) -> keras.KerasTensor:
        """Return what an earlier rewrite emitted under this name, if it runs before this site."""
        if name not in self.model.signals:
            raise SurgeryError(
                f"operate at when='{name}': expected the name of a Condition that comes before. "
                f"{closest(name, self.model.signals)} Put the Condition into the list, first."
            )
        tensor = self.mapping.get(id(self.model.signals[name]))
        if tensor is None:
            raise SurgeryError(
                f"operate at when='{name}': expected sites in blocks after the one that the "
                "Condition watches. Received an earlier site, where it is not known yet. Steer "
                "later blocks, or watch an earlier one."
            )
        return tensor


class Rewrite(abc.ABC):
    """A change to an opened graph, as frozen data. Subclass it to write your own.

    `SiteRewrite` is the base for a change at sites; this one is for changes of any other shape.
    Make the subclass a frozen dataclass. Decorate it with
    `keras.saving.register_keras_serializable(package)` too, and recipes can hold it.

    Attributes:
        whole_blocks: whether the visitor is offered each decoder block as one layer, a nested
            model, instead of the layers inside it.
        captures: whether what the visitor emits becomes an output of the model, instead of a signal
            for later rewrites.
        files: names of fields that are paths of files. In a recipe they are empty: what was read
            is in other fields of the rewrite as the model remembers it.
    """

    whole_blocks: ClassVar[bool] = False
    captures: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Return the callback that makes the change, as for `clone_layer_graph`.

        The callback may return `backbone_surgery.graph.KEEP` for a node it leaves alone. It
        appends what it changed to `surgery.fired`. What it emits becomes a signal or a capture,
        under a name that must not be taken.
        """

    def rebuild(self, surgery: Surgery) -> tuple[Any, Emitted]:
        """Replay the graph by `visitor`: the new signals and outputs, and what is emitted."""
        return self.replay(surgery, self.visitor(surgery))

    def replay(self, surgery: Surgery, visit: graph.CloneFn) -> tuple[Any, Emitted]:
        """Replay the graph by a callback, on the positions of the new graph."""

        def with_positions(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(layer, TokenPositions):
                return surgery.positions
            return visit(layer, *args, **kwargs)

        # Signals first: a steered block must find the condition replayed that it depends on.
        wanted = [surgery.model.signals, surgery.model.output]
        enter = (lambda nested: not is_block(nested)) if self.whole_blocks else True
        return graph.replay(wanted, surgery.mapping, with_positions, enter, per_use=True)

    def applied(self, surgery: Surgery) -> "Rewrite":
        """Return the rewrite as the new model keeps it, with the layers that it built."""
        return self

    def get_config(self) -> dict[str, Any]:
        """Return the fields by name: what a recipe keeps."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Rewrite":
        """Make a rewrite of its fields."""
        return cls(**config)

    @property
    def control(self) -> str | None:
        """The name under which `generate(controls=...)` addresses this rewrite, if any."""
        return None

    def before(self, end: int, bound: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return what stands in for some inputs where only the tokens before `end` count.

        A prefix cache compares controls by their values. Two values that act alike on those tokens
        get equal stand-ins here. By default there are none, and the values themselves count.

        Args:
            end: a position, the length of the prompt at most.
            bound: `{input name: array[1, ...]}` of all inputs, for one row.
        """
        return {}

    def bind(self, value: Any, rows: Rows) -> Mapping[str, np.ndarray]:
        """Turn the value of the control into `{input name: array[batch, ...]}`.

        `value` is `None` where the call leaves the control out. Where the shape of an input leaves
        a size open, what comes past the end of a value is taken to be its last entry.
        """
        raise SurgeryError(
            f"controls at {type(self).__name__}: expected a rewrite that declares a control. "
            f"Received the value {shown(value)} for one that declares none. Leave it out of "
            "`controls`."
        )


def beside_blocks(places: Iterable[Place], surgery: Surgery) -> list[Place]:
    """Return the sites of what goes beside the hidden states, of whole blocks among some sites."""
    paths = {f"{place.path}.{surgery.model.family.beside}" for place in places}
    return [place for place in surgery.places if place.path in paths]


def by_control(rewrites: Iterable[Any]) -> dict[str, Rewrite]:
    """Return those that declare a control, by its name."""
    return {r.control: r for r in rewrites if isinstance(r, Rewrite) and r.control}


class SiteRewrite(Rewrite):
    """A rewrite that puts nodes of its own at some sites."""

    at: str

    @abc.abstractmethod
    def apply(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Return what stands at a site from now on, computed from what stood there."""

    def choose(self, surgery: Surgery) -> list[Place]:
        """Return the sites to rewrite."""
        return surgery.select(self.at)

    def visitor(self, surgery: Surgery) -> graph.CloneFn:
        """Apply the rewrite at the chosen sites."""
        return AtSites({p.nodes: [(self, surgery, p)] for p in self.choose(surgery)}, [surgery])

    def checked(self, x: keras.KerasTensor, place: Place, surgery: Surgery) -> keras.KerasTensor:
        """Apply the rewrite, and refuse a result that does not fit the site."""
        surgery.fired.append(place.path)
        new = self.apply(x, place, surgery)
        if not isinstance(new, keras.KerasTensor) or new.shape[2:] != x.shape[2:]:
            received = new.shape if isinstance(new, keras.KerasTensor) else shown(new)
            raise SelectorError(
                f"{type(self).__name__} at '{place.path}': expected a tensor of shape {x.shape}, "
                f"as stands there. Received {received}. Make the rewrite keep the shape of its "
                "site."
            )
        return new


class AtSites:
    """The callback of rewrites at sites, one or several: at each site they act in their order."""

    def __init__(
        self,
        chosen: dict[tuple[Any, ...], list[tuple[SiteRewrite, Surgery, Place]]],
        surgeries: list[Surgery],
    ) -> None:
        self.chosen, self.surgeries = chosen, surgeries

    def extend(self, later: "AtSites") -> None:
        """Let other rewrites act after these, in the same replay."""
        for nodes, edits in later.chosen.items():
            self.chosen.setdefault(nodes, []).extend(edits)
        self.surgeries.extend(later.surgeries)

    def __call__(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Rewrite a node, if it holds one of the chosen sites."""
        if isinstance(layer, BlockInput):
            # From the mark on, so that the mark stays where a whole block is replaced.
            stream = layer(args[0])
            for surgery in self.surgeries:
                surgery.stream = stream
            return stream
        if isinstance(layer, BesideInput):
            beside = layer(args[0])
            for surgery in self.surgeries:
                surgery.beside = beside
            return beside
        edits = self.chosen.get(graph.visited_node())
        if edits is None:
            return graph.KEEP

        def edited(x: keras.KerasTensor) -> keras.KerasTensor:
            for rewrite, surgery, place in edits:
                x = rewrite.checked(x, place, surgery)
            return x

        if isinstance(layer, Site):
            return layer(edited(args[0]))
        role = layer.inner_site
        return layer.split_around(lambda x: Site(role)(edited(x)), *args)


class ControlledRewrite(SiteRewrite):
    """A rewrite at sites with a control of its own name.

    Attributes:
        name: what the inputs that it declares begin with.
    """

    name: str

    @property
    def control(self) -> str:
        """The name of the control."""
        return self.name

    def layer_name(self, place: Place) -> str:
        """Return the name of the layer that the rewrite puts at a site."""
        return f"{self.name}_{place.path.replace('.', '_')}"
