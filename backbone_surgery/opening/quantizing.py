"""Quantising the backbone under an edit, as KerasHub's own task quantises it."""

import copy
import itertools
import types
from collections.abc import Collection
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph, hosts
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.opening.calibration_texts import read_texts
from backbone_surgery.opening.family import Family
from backbone_surgery.opening.packed_axes import laid_out

CALIBRATED = ("gptq", "awq")
MODES = ("int8", "int4", *CALIBRATED)


def quantize(
    owner: keras.Model,
    family: Family,
    max_positions: int | None,
    mode: str | None,
    config: Any,
    filters: Any = None,
    **kwargs: Any,
) -> None:
    """Quantise all of a backbone, whatever an edit of it leaves out.

    GPTQ and AWQ calibrate each block of the backbone in turn, without the edit, where KerasHub's
    task for the architecture says that its blocks are. The first is given what the backbone gives
    it, where KerasHub's task leaves some of that out.

    Args:
        owner: of the weights.
        family: of its blocks.
        max_positions: how many positions the model has learned; `None` if it is not limited.
        mode: see `keras.Model.quantize`, as for what follows.
        config: a quantization config, which says the mode too, and for GPTQ and AWQ the texts.
        filters: which layers to quantise.
        **kwargs: others.

    Raises:
        SurgeryError: it is another mode of Keras; a layer is quantised already, or none is chosen;
            there is LoRA, which GPTQ and AWQ do not know, or weights in half precision, which GPTQ
            does not; several processes hold the model; there are no texts, or they have tokens
            that the model has not, or are longer than its positions; KerasHub does not say where
            the blocks are; or they may be given more than hidden states, as those of Gemma 3n and 4
            and RWKV-7.
    """
    chosen = mode or getattr(config, "mode", None)
    if chosen not in MODES:
        raise SurgeryError(
            f"quantize at '{owner.name}': expected one of {', '.join(MODES)}. Received "
            f"{shown(chosen)}, which leaves tables in float and can't be saved. Pass one of these."
        )
    layers = _able(owner, chosen, filters)
    if chosen in CALIBRATED:
        hosts.refuse(owner, f"quantize to {chosen}", "Quantise there, and save a recipe.")
        _check_calibration(family, max_positions, chosen, config)
        config = _prepared(owner, family, config)
    able = {id(layer) for layer in layers}  # Keras stops at others that have not been built
    try:
        with graph.calibrating(), laid_out(owner, layers, chosen, config):
            owner.quantize(mode, config=config, filters=lambda x: id(x) in able, **kwargs)
    except BaseException as error:
        if any(layer.quantization_mode is not None for layer in layers):
            error.add_note(
                f"The backbone '{owner.name}' is quantised in part now. Load the model anew."
            )
        raise
    finally:
        if chosen in CALIBRATED:  # the layers keep this config
            config.dataset = config.quantization_layer_structure = None


def _prepared(owner: keras.Model, family: Family, config: Any) -> Any:
    """Return a copy of a config of GPTQ or AWQ, with token ids for texts, and blocks named."""
    embedding = getattr(owner, "token_embedding", None)
    config = copy.copy(config)
    config.dataset = read_texts(config, getattr(embedding, "input_dim", 2**31))
    config.tokenizer = config.tokenizer or str  # of token ids nothing is left to be done
    if config.quantization_layer_structure is None:
        config.quantization_layer_structure = _structure(owner, family, config.mode)
    return config


def _able(owner: keras.Model, mode: str | None, filters: Any) -> list[keras.Layer]:
    """Return the layers that are quantised; refuse those that Keras would stop at midway."""
    able = [
        layer
        for layer in graph.layers_within(owner)
        if type(layer).quantize is not keras.layers.Layer.quantize
        and not graph.sublayers(layer)
        and _is_chosen(layer, filters)
    ]
    # Keras rounds tables to int8 and int4 alone.
    left_out = keras.layers.Embedding if mode in CALIBRATED else ()
    quantised = [layer for layer in able if not isinstance(layer, left_out)]
    if not quantised:
        raise SurgeryError(
            f"quantize at 'filters': expected to choose layers that Keras can quantise. Received "
            f"{shown(filters)}, which chooses none. Leave it out for all of them."
        )
    done = [x.name for x in able if x.quantization_mode is not None]
    if done:
        raise SurgeryError(
            f"quantize at '{owner.name}': expected layers that are not quantised yet. Received "
            f"'{done[0]}' among others, which is. Load the model anew, or leave them out by "
            "`filters`."
        )
    if mode in CALIBRATED and any(getattr(x, "lora_enabled", False) for x in able):
        raise SurgeryError(
            f"quantize at '{owner.name}': expected a backbone without LoRA, which {mode} does not "
            "know. Received one with it. Fold it in by `merge` first."
        )
    halves = [x.variable_dtype for x in able if x.variable_dtype in ("bfloat16", "float16")]
    if mode == "gptq" and halves:
        raise SurgeryError(
            f"quantize at '{owner.name}': expected weights in float32, which Keras calibrates by "
            f"gptq. Received some in {halves[0]}. Load the model in float32 or mixed_{halves[0]}, "
            "or take awq."
        )
    return quantised


def _is_chosen(layer: keras.Layer, filters: Any) -> bool:
    """Tell whether filters choose a layer."""
    try:
        return graph.is_chosen(layer, filters)
    except Exception as error:  # whatever the user's function runs into
        if callable(filters):
            expected = "a function that tells of each layer whether to quantise it"
            received = f"{shown(filters)}, which fails at layer '{layer.name}' with {error!r}"
        else:
            expected = "a regular expression, a list of them, or a function of a layer"
            received = f"{shown(filters)} ({error})"
        raise SurgeryError(
            f"quantize at 'filters': expected {expected}. Received {received}. Pass one that "
            "chooses layers."
        ) from error


def _check_calibration(family: Family, max_positions: int | None, mode: str, config: Any) -> None:
    """Refuse blocks and texts that Keras would stop at midway, or calibrate on something else."""
    if family.further:
        raise SurgeryError(
            f"quantize to {mode}: expected blocks that take hidden states alone, which Keras can "
            f"calibrate. Received blocks of {family.name}, which can take "
            f"{' and '.join(family.further)} too. Take int8 or int4."
        )
    length = getattr(config, "sequence_length", 0)
    if max_positions is not None and length > max_positions:
        raise SurgeryError(
            f"quantize at 'config': expected texts of at most {max_positions} tokens, as many "
            f"positions as the model has learned. Received sequence_length={length}. Make the "
            f"config with sequence_length={max_positions}."
        )


def check_lora(owner: keras.Model, operation: str) -> None:
    """Refuse LoRA beside layers in GPTQ or AWQ: Keras would stop midway; `operation` is named.

    Raises:
        SurgeryError: there are such layers.
    """
    for mode in _calibrated(owner):
        raise SurgeryError(
            f"{operation} at '{owner.name}': expected a backbone in float, int8 or int4 for LoRA. "
            f"Received one in {mode}. Use `LowRank`, or quantise to int8."
        )


def check_targets(owner: keras.Model, names: Any) -> None:
    """Refuse layers for LoRA that KerasHub finds none of, or stops at with all layers frozen.

    Raises:
        SurgeryError: no layer is chosen, or one that has LoRA.
    """
    names = owner.default_lora_layer_names() if names is None else names
    able = [x for x in graph.layers_within(owner) if x.weights and hasattr(x, "enable_lora")]
    listed = [] if isinstance(names, str) or not isinstance(names, Collection) else names
    chosen = [x for x in able if x.name in listed]
    if not chosen:
        raise SurgeryError(
            f"enable_lora at 'target_layer_names': expected a list with names of layers that take "
            f"LoRA, such as {', '.join(dict.fromkeys(x.name for x in able))}. Received "
            f"{shown(names)}. Pass some of these."
        )
    done = [x.name for x in chosen if getattr(x, "lora_enabled", False)]
    if done:
        raise SurgeryError(
            f"enable_lora at '{owner.name}': expected layers without LoRA. Received '{done[0]}' "
            "among others, which has it. Fold it in by `merge` first, or load the model anew."
        )


def check_saves(owner: keras.Model) -> None:
    """Refuse to have Keras save a backbone in GPTQ or AWQ, whose zero points it leaves out.

    Raises:
        SurgeryError: it is quantised in one of these ways.
    """
    for mode in _calibrated(owner):
        raise SurgeryError(
            f"save_weights at '{owner.name}': expected weights that Keras saves whole. Received "
            f"some quantised to {mode}, of which it leaves out the zero points. Use "
            "`save_recipe`."
        )


def _calibrated(owner: keras.Model) -> set[str]:
    """Return which of GPTQ and AWQ some layers are quantised to."""
    return {layer.quantization_mode for layer in graph.layers_within(owner)} & {*CALIBRATED}


def _structure(owner: keras.Model, family: Family, mode: str) -> dict[str, Any]:
    """Return what runs before the blocks, and the blocks, as KerasHub's task names them."""
    tasks = [task for task in vars(keras_hub.models).values() if hasattr(task, "generate")]
    for cls, task in itertools.product(type(owner).__mro__, tasks):
        if getattr(task, "backbone_cls", None) is cls:
            view = types.SimpleNamespace(backbone=owner)
            structure = task.get_quantization_layer_structure(view, mode)
            if structure is not None:
                blocks = structure["sequential_blocks"]
                return {**structure, "pre_block_layers": [_before(owner, family, blocks[0])]}
    raise SurgeryError(
        f"quantize at '{owner.name}': expected a backbone whose blocks KerasHub can calibrate one "
        f"by one. Received a {type(owner).__name__}. Name them in `quantization_layer_structure` "
        "of the config, or take int8 or int4."
    )


def _before(owner: keras.Model, family: Family, block: keras.Layer) -> keras.Model:
    """Return a model of token ids that gives what a backbone gives its first block, without images.

    KerasHub's task for OPT, BLOOM and Gemma 3 looks tokens up, and leaves out positions, a norm and
    a scale.
    """
    node = next(n for n in graph.graph_nodes(owner) if n.operation is block)
    hidden_states, *_ = family.arguments(block, node.arguments.args, node.arguments.kwargs)
    mapping = {id(t): t for t in owner.inputs}
    mapping.update((id(mixed), text) for mixed, text in family.without_images(owner))
    (hidden_states,), _ = graph.replay([hidden_states], mapping, lambda *_, **__: graph.KEEP)
    return keras.Model(owner.input["token_ids"], hidden_states)
