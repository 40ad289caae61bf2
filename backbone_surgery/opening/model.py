"""The model of an opened, perhaps edited, graph.

It is a Functional model over the layers of a backbone, which stays the owner of the weights.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from backbone_surgery import graph, hosts
from backbone_surgery.errors import (
    SurgeryError,
    WeightMismatchError,
    closest,
    shown,
    shown_array,
    shown_ids,
)
from backbone_surgery.files import reading
from backbone_surgery.numbers import check_count, fits, read_array
from backbone_surgery.opening import quantizing
from backbone_surgery.opening.checkpoint import check_checkpoint, save
from backbone_surgery.opening.layers import RowConstant
from backbone_surgery.opening.training import TrainsOwnLayers


class WithControls(keras.Model):
    """A Functional model on a dict of inputs, some of which, the controls, have defaults."""

    defaults: dict[str, np.ndarray]

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream, with the controls filled in."""
        return super().__call__(self.with_defaults(inputs), *args, **kwargs)

    def stateless_call(
        self, trainable_variables: Any, non_trainable_variables: Any, inputs: Any, **kwargs: Any
    ) -> Any:
        """As upstream, with the controls filled in: `fit` and `predict` come this way on JAX."""
        inputs = self.with_defaults(inputs)
        return super().stateless_call(
            trainable_variables, non_trainable_variables, inputs, **kwargs
        )

    def with_defaults(self, inputs: Any) -> Any:
        """Make tensors of the inputs, and add one row of each control for each row of tokens."""
        check_names(self, inputs, self.defaults)
        dtypes = {t.name: t.dtype for t in self.inputs}
        given = [name for name in self.defaults if name in inputs]
        for name in given:
            check_numbers(self, name, inputs[name], self.defaults[name])
        inputs = {k: _tensors(v, dtypes.get(k)) for k, v in inputs.items()}
        ids = inputs["token_ids"]
        for name in given:
            wanted = (ids.shape[0], *self.input[name].shape[1:])
            shape = getattr(inputs[name], "shape", wanted)
            known = [None if n is None else m for n, m in zip(shape, wanted, strict=False)]
            if not fits(shape, known) or len(shape) != len(wanted):
                raise SurgeryError(
                    f"call of '{self.name}' at input '{name}': expected {dtypes[name]}"
                    f"{list(wanted)}. Received {shown_array(inputs[name])}. Pass a row for each "
                    "row of tokens."
                )
        missing = [name for name in self.defaults if name not in inputs]
        return {**inputs, **{name: _rows(name, self.defaults[name], ids) for name in missing}}

    def get_config(self) -> dict:
        """Refuse: an edit is kept as data, not as a graph."""
        raise SurgeryError(
            f"get_config at '{self.name}': expected a model whose layers can be rebuilt from a "
            "config. Received a graph that shares the layers of its backbone. Save a "
            "`CachedCausalLM` of it with `save_to_preset`, or its rewrites with `save_recipe`; "
            "`clone_layer_graph` copies a graph."
        )

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, see `get_config`: Keras would first write over the file."""
        self.get_config()


def check_names(
    model: keras.Model, inputs: Any, defaults: Iterable[str] = (), controls: Iterable[str] = ()
) -> None:
    """Refuse inputs that are not those of a model, by name: Keras would mix them up.

    Args:
        model: a Functional model on a dict of inputs.
        inputs: what it is called on.
        defaults: names of inputs that may be left out.
        controls: names of what the model takes elsewhere.

    Raises:
        SurgeryError: they are no dict, one of them is not the model's, or one is left out.
    """
    known = model.input
    if not isinstance(inputs, dict):
        raise SurgeryError(
            f"call of '{model.name}': expected a dict of inputs, {sorted(known)}. Received "
            f"{shown(inputs)}. Name each of them."
        )
    unknown = [name for name in inputs if name not in known]
    if unknown and unknown[0] in controls:
        raise SurgeryError(
            f"call of '{model.name}' at input '{unknown[0]}': expected inputs of the model. "
            "Received a control, which a call of a task does not take. Use "
            "`score(token_ids, controls=...)` for logits, or call `.opened` for hidden states."
        )
    if unknown:
        raise SurgeryError(
            f"call of '{model.name}' at input '{unknown[0]}': expected inputs of the model. "
            "Received one that it has not. Leave it out, or rename it. "
            f"{closest(unknown[0], known)}"
        )
    missing = [name for name in known if name not in inputs and name not in defaults]
    if missing:
        raise SurgeryError(
            f"call of '{model.name}' at input '{missing[0]}': expected a value, since there is "
            f"no default for it. Received {sorted(inputs)}. Pass it too."
        )


def check_numbers(model: keras.Model, name: str, value: Any, default: np.ndarray) -> None:
    """Refuse a control that is not finite, unless its default is not.

    Tensors are taken as they are: looking at one would wait for it.
    """
    tensors = (keras.KerasTensor, keras.Variable)
    if any(ops.is_tensor(x) or isinstance(x, tensors) for x in tree.flatten(value)):
        return
    if isinstance(value, np.ndarray) and value.dtype == bool:
        return
    array = read_array(value)
    if array is None or (np.isfinite(default).all() and not np.isfinite(array).all()):
        raise SurgeryError(
            f"call of '{model.name}' at input '{name}': expected finite numbers. Received "
            f"{shown(value)}. Pass numbers, a row for each row of tokens."
        )


class EditedBackbone(TrainsOwnLayers, WithControls):
    """A Functional model over the layers of a backbone, as `open_backbone` and `operate` make it.

    It is called like the backbone, on `{"token_ids", "padding_mask"}`, and gives the hidden
    states; with a `Capture` among the rewrites, `{"hidden_states", "captures"}`. Controls, the
    run-time inputs that rewrites declare, may be given under the names of their inputs; those left
    out take their defaults.

    The backbone stays the owner of the weights: saving, loading, LoRA and quantisation go through
    it, and every graph made from it sees the result at once.

    Attributes:
        owner: the `keras_hub` backbone, or the plain Functional model, that was opened.
        family: the `Family` that opened it.
        rewrites: the rewrites that were applied, in order.
        report: for each rewrite, the site paths at which it fired.
        defaults: `{input name: default of one row}` of the controls.
        trained_layers: layers that rewrites brought along to be trained. Where their variables
            are trainable, the model's own trainable variables are those alone.
        signals: `{name: tensor}` of its graph that rewrites emitted for later ones, such as
            whether a `Condition` is met.
        added_layers: the layers that edits brought along; pictures have them green.
        max_positions: how many positions the model has learned; `None` if it is not limited.
        made_under: names of the dtype policies of the process that rewrites were applied under;
            layers that a rewrite makes take these, unless it says otherwise.
    """

    def __init__(
        self,
        inputs: dict[str, keras.KerasTensor],
        outputs: Any,
        *,
        owner: keras.Model,
        family: Any,
        rewrites: tuple = (),
        report: tuple = (),
        defaults: Mapping[str, np.ndarray] | None = None,
        trained_layers: tuple = (),
        signals: Mapping[str, keras.KerasTensor] | None = None,
        added_layers: frozenset = frozenset(),
        made_under: tuple[str, ...] = (),
        name: str = "edited_backbone",
    ) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        remember(
            self,
            owner=owner,
            family=family,
            rewrites=tuple(rewrites),
            report=tuple(report),
            defaults=dict(defaults or {}),
            trained_layers=tuple(trained_layers),
            signals=dict(signals or {}),
            added_layers=added_layers,
            made_under=tuple(made_under),
            max_positions=family.max_positions(self, owner),
        )
        self.dtype_policy = family.policy(owner)
        graph.share(self)

    def with_defaults(self, inputs: Any) -> Any:
        """As for any model with controls; refuse ids and rows that the model has not learned.

        Ids are checked where they are no tensors yet, and where the mask says that they count.
        """
        given = inputs
        inputs = super().with_defaults(inputs)
        ids = inputs["token_ids"]
        self._check_ids(given["token_ids"], given["padding_mask"])
        time = ids.shape[1] if len(ids.shape) == 2 else None
        if time is not None and self.max_positions is not None and time > self.max_positions:
            raise SurgeryError(
                f"call of '{self.name}': expected rows of at most {self.max_positions} tokens, as "
                f"many positions as the model has learned. Received {time}. Cut the rows."
            )
        return inputs

    def _check_ids(self, ids: Any, mask: Any) -> None:
        if not (isinstance(ids, np.ndarray) and isinstance(mask, np.ndarray)):
            return
        try:
            count = self.token_embedding.input_dim
        except SurgeryError:  # the graph embeds tokens in another way
            return
        if ids.shape == mask.shape and (((ids < 0) | (ids >= count)) & (mask != 0)).any():
            raise SurgeryError(
                f"call of '{self.name}' at input 'token_ids': expected ids from 0 to {count - 1} "
                f"where `padding_mask` is not 0. Received {shown_ids(ids)}. Tokenize by the "
                "tokenizer of this model."
            )

    def also_train(self, layers: Iterable[keras.layers.Layer]) -> None:
        """Add layers to `trained_layers`, unless it is empty: then all layers train anyway."""
        if self.trained_layers:
            remember(self, trained_layers=(*self.trained_layers, *layers))

    @property
    def control_inputs(self) -> dict[str, keras.KerasTensor]:
        """The inputs beside the tokens and their mask, by name."""
        return {t.name: t for t in self.inputs if t.name not in ("token_ids", "padding_mask")}

    @property
    def inputs_by_hand(self) -> dict[str, keras.KerasTensor]:
        """Those that no rewrite declared: a user put them into the graph, without a default."""
        return {name: t for name, t in self.control_inputs.items() if name not in self.defaults}

    @property
    def captures(self) -> dict[str, keras.KerasTensor]:
        """The symbolic tensors that the model captures, by the path of their site."""
        return self.output["captures"] if isinstance(self.output, dict) else {}

    @staticmethod
    def hidden_states(outputs: Any) -> Any:
        """Return the hidden states among the outputs of a call."""
        return outputs["hidden_states"] if isinstance(outputs, dict) else outputs

    @property
    def token_embedding(self) -> Any:
        """The embedding of token ids, whose reverse gives the logits: a layer, or called as one."""
        return self.family.token_embedding(self)

    def save_weights(self, filepath: str, **kwargs: Any) -> None:
        """Save the weights of the owning backbone alone, in its own format.

        What rewrites trained is not among them; `save_recipe` keeps it. Layers that a plain
        `clone_fn` or `rewrite_nested` brought in are yours to save. A warning says how many
        trainable weights are left out.

        Raises:
            SurgeryError: the backbone is quantised by GPTQ or AWQ, which Keras does not save whole.
        """
        quantizing.check_saves(self.owner)
        owned = {id(v) for v in self.owner.weights}
        others = [v for v in self.weights if v.trainable and id(v) not in owned]
        if others:
            warnings.warn(
                f"save_weights at '{self.name}': {len(others)} trainable weights, such as "
                f"'{others[0].path}', are not the backbone's and are not saved. Keep what rewrites "
                "trained by `save_recipe`, and layers of your own by themselves.",
                stacklevel=2,
            )
        save(self.owner, filepath, **kwargs)

    def load_weights(self, filepath: str, **kwargs: Any) -> None:
        """Load a checkpoint of the owning backbone, as if nothing had been edited.

        Raises:
            WeightMismatchError: the file was saved from a model with other layers. Keras finds
                layers by their order alone, and would load the weights of one into another.
        """
        check_checkpoint(self.owner, filepath)
        with reading(filepath, "load_weights", "weights that Keras saved", WeightMismatchError):
            shardings = (getattr(v.value, "sharding", None) for v in self.owner.variables)
            with hosts.host_memory(any(getattr(s, "num_devices", 1) > 1 for s in shardings)):
                self.owner.load_weights(filepath, **kwargs)

    def enable_lora(self, rank: int, **kwargs: Any) -> None:
        """Enable LoRA on the owning backbone; see `keras_hub.models.Backbone.enable_lora`.

        Raises:
            SurgeryError: the rank is no positive int, no layer or one with LoRA is chosen, or the
                backbone is in GPTQ or AWQ. KerasHub would stop with all layers frozen.
        """
        if not hasattr(self.owner, "enable_lora"):
            raise SurgeryError(
                f"enable_lora at '{self.owner.name}': expected the owner of the weights to be a "
                f"keras_hub Backbone. Received {type(self.owner).__name__}. Call `enable_lora` on "
                "the backbone that the graph was cloned from."
            )
        check_count("enable_lora", "rank", rank, "columns")
        quantizing.check_lora(self.owner, "enable_lora")
        quantizing.check_targets(self.owner, kwargs.get("target_layer_names"))
        self.owner.enable_lora(rank, **kwargs)

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """Quantise the owning backbone; see `keras.Model.quantize`."""
        quantizing.quantize(self.owner, self.family, self.max_positions, mode, config, **kwargs)


def remember(model: keras.Model, **facts: Any) -> None:
    """Set attributes without tracking: another model named there is no sub-layer of this one."""
    for name, value in facts.items():
        object.__setattr__(model, name, value)


def arrays_in_place(variables: Iterable[keras.Variable]) -> list[Any]:
    """Return the arrays of variables, on JAX.

    Raises:
        SurgeryError: Keras has taken one; `value` would be a new one, as it is initialized.
    """
    arrays = [graph.array_of(v) for v in variables]
    if any(x is None or (hasattr(x, "is_deleted") and x.is_deleted()) for x in arrays):
        raise weights_taken()
    return arrays


def weights_taken() -> SurgeryError:
    """Return the error for weights whose arrays are gone."""
    return SurgeryError(
        "running a model: expected weights that are in place. Received some that were handed over, "
        "as `fit`, `evaluate` and `predict` of Keras do until they end, in any thread and for all "
        "models that share the arrays. Wait for them; if the weights are gone, load them again."
    )


def _tensors(value: Any, dtype: str | None) -> Any:
    """Make tensors of a structure of arrays and numbers; symbolic tensors stay."""

    def convert(x: Any) -> Any:
        return x if isinstance(x, keras.KerasTensor) else ops.convert_to_tensor(x, dtype=dtype)

    return tree.map_structure(convert, value)


def _rows(name: str, default: np.ndarray, token_ids: Any) -> Any:
    """Give each row of tokens the default of a control; in a graph, by a node of its own."""
    rows = RowConstant(default, name=f"default_{name}")
    return rows(token_ids) if isinstance(token_ids, keras.KerasTensor) else rows.call(token_ids)
