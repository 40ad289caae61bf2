"""Models of Hugging Face, as KerasHub's converters load them, checked for what these leave out.

A converter reads some settings of `config.json` and some tensors of the files, and passes over all
others. Here the backbone is given what it can have; what it cannot have is refused, and so are
weights that nothing has read. Seen in KerasHub 0.32 and `transformers` 5.24.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import safetensors

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.families import as_in_hugging_face
from backbone_surgery.hugging_face.converters import CONVERTERS
from backbone_surgery.hugging_face.defaults import filled, text_of
from backbone_surgery.hugging_face.files import FilesOfFloatExperts, TensorFiles
from backbone_surgery.hugging_face.settings import (
    SETTINGS,
    check_settings,
    further,
    is_tied,
    respelled,
)
from backbone_surgery.hugging_face.tokens import byte_pairs, llama

_NO_WEIGHTS = re.compile(
    r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$"  # made anew, not learned
    r"|(^|\.)(mtp|vision|visual|audio|embed_vision|embed_audio|multi_modal)"  # not of the text
)


_FILES = ("model.safetensors", "model.safetensors.index.json")
_HEADS = ("lm_head.weight", "embed_out.weight")
_TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def is_hugging_face(loader: Any) -> bool:
    """Whether a loader of KerasHub is for a causal LM of Hugging Face."""
    config = loader.config
    is_keras = "registered_name" in config or "model_type" not in config
    return not is_keras and text_of(config)[0] in SETTINGS


def find_loader(path: str) -> Any:
    """Return KerasHub's loader of a preset or of a model of Hugging Face, with our converters.

    Raises:
        ValueError: neither KerasHub nor this library converts a model of its type.
    """
    try:
        loader = graph.get_preset_loader(path)
    except ValueError:  # KerasHub has no converter
        loader = graph.OpenLoader(path, graph.load_json(path))
        if not _is_ours(loader):
            raise
    if _is_ours(loader):
        loader.converter = CONVERTERS[text_of(loader.config)[0]]
    return loader


def _is_ours(loader: Any) -> bool:
    return is_hugging_face(loader) and text_of(loader.config)[0] in CONVERTERS


def load_preprocessor(loader: Any) -> Any:
    """Load the preprocessor of a causal LM.

    Args:
        loader: see `find_loader`.
    """
    models, preset = keras_hub.models, loader.preset
    if _is_ours(loader):
        return loader.load_preprocessor(loader.converter.preprocessor_cls)
    if loader.config.get("model_type") == "gpt2":  # KerasHub reads no `tokenizer.json` of it
        tokenizer = byte_pairs(models.GPT2Tokenizer, preset)
        return loader.load_preprocessor(models.GPT2CausalLMPreprocessor, tokenizer=tokenizer)
    if loader.config.get("model_type") == "llama":  # KerasHub forgets what begins and ends a text
        tokenizer = llama(preset)
        return loader.load_preprocessor(models.Llama3CausalLMPreprocessor, tokenizer=tokenizer)
    own = loader.check_backbone_class()
    if own.__module__ == as_in_hugging_face.__name__:  # KerasHub has a preprocessor for its own
        cls = graph.find_subclass(preset, models.CausalLMPreprocessor, own.__base__)
        return loader.load_preprocessor(cls, "preprocessor.json")
    return models.CausalLMPreprocessor.from_preset(preset)


def convert(loader: Any, preset: str, load_weights: bool, **kwargs: Any) -> keras.Model:
    """Load a backbone by KerasHub's converter.

    Args:
        loader: KerasHub's loader of the folder or repository, see `is_hugging_face`.
        preset: what the user called it.
        load_weights: whether to load the weights.
        **kwargs: for the backbone.

    Raises:
        SurgeryError: the config has what KerasHub's backbone has not, the converter leaves out a
            tensor, or it stops.
    """
    whole = filled(loader.config)
    kind, text = text_of(whole)
    with _in_words(preset, kind):
        _check_adapter(preset, Path(loader.preset))
        check_settings(preset, kind, text, _is_ours(loader))
        config, own = respelled(kind, whole), further(kind, text)
        found = loader.converter.convert_backbone_config(config)
        make = as_in_hugging_face.maker(kind, text, loader.check_backbone_class())
        backbone = make(**{**found, **own, **kwargs})
    if load_weights:
        _check_files(preset, Path(loader.preset))
        graph.jax_memory_cleanup(backbone)
        is_float = kind == "gpt_oss" and text.get("quantization_config") is None
        found = (
            FilesOfFloatExperts(loader.preset, backbone) if is_float else TensorFiles(loader.preset)
        )
        with found as files, _in_words(preset, kind):
            loader.converter.convert_weights(backbone, files, config)
            files.finish()
            _check_all_read(preset, kind, text, files, _is_ours(loader))
    return backbone


def _check_files(preset: str, folder: Path) -> None:
    """Refuse a folder without `.safetensors` files, or with two sets of them."""
    if not folder.is_dir():
        return
    there = [(folder / name).is_file() for name in _FILES]
    if not any(there):
        raise SurgeryError(
            f"from_preset at '{preset}': expected weights in {_FILES[0]}, or {_FILES[1]} with its "
            "shards. Received a folder without either. Save the model anew by `save_pretrained` of "
            "a recent `transformers`, or pass `load_weights=False`."
        )
    if all(there):
        raise SurgeryError(
            f"from_preset at '{preset}': expected either {_FILES[0]} or {_FILES[1]}. Received "
            "both, of which `transformers` reads the first and KerasHub the second. Remove the one "
            "that is stale."
        )


def _check_adapter(preset: str, folder: Path) -> None:
    """Refuse a folder with an adapter beside the weights, which `transformers` would load too."""
    if (folder / "adapter_config.json").is_file():
        raise SurgeryError(
            f"from_preset at '{preset}': expected a model without an adapter. Received "
            "`adapter_config.json` beside it. Move the adapter's files to a folder of their own, "
            "and put it into the model with `bs.Lora`; or merge it with `merge_and_unload` of PEFT "
            "and save the model."
        )


def _check_all_read(
    preset: str, kind: str, text: dict[str, Any], files: TensorFiles, is_ours: bool
) -> None:
    """Refuse a file with weights that the converter left out; a head may be that of the table."""
    left = [name for name in files.unread() if not _NO_WEIGHTS.search(name)]
    if text.get("num_kv_shared_layers"):
        first = text["num_hidden_layers"] - text["num_kv_shared_layers"]
        left = [name for name in left if not _is_borrowed(name, first)]
    if is_tied(kind, text):
        heads = [name for name in left if name.endswith(_HEADS)]
        left = [name for name in left if name not in heads]
        _check_heads(preset, files, heads)
    if left:
        how = "" if is_ours else " If that is what you want, load it with KerasHub's `from_preset`."
        raise SurgeryError(
            f"from_preset at '{preset}': expected a file whose weights the converter of "
            f"'{kind}' reads all. Received {len(left)} tensors that it leaves out, such as "
            f"'{left[0]}'. Compare config.json with the original.{how}"
        )


def _check_heads(preset: str, files: TensorFiles, heads: list[str]) -> None:
    """Refuse a head in the files that is another than the table of tokens it is to be tied to."""
    tables = [name for name in files.read if name.endswith(_TABLES)]
    for head in heads:
        for table in tables:
            if not np.array_equal(files.get_tensor(head), files.get_tensor(table)):
                raise SurgeryError(
                    f"from_preset at '{preset}': expected '{head}' to be '{table}', since the "
                    "model ties its head to the table of tokens. Received another head, which "
                    "`transformers` uses. Set `tie_word_embeddings` to false in config.json if "
                    "the architecture has heads of their own, or take the tensor out of the file."
                )


def _is_borrowed(name: str, first: int) -> bool:
    """Whether a tensor makes keys or values of a block that takes those of an earlier one."""
    found = re.search(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    return found is not None and int(found[1]) >= first


@contextlib.contextmanager
def _in_words(preset: str, kind: str) -> Iterator[None]:
    """Say of what preset it is that a converter stops at."""
    try:
        yield
    except SurgeryError:
        raise
    except (
        AttributeError,
        FileNotFoundError,
        LookupError,
        TypeError,
        ValueError,
        safetensors.SafetensorError,
    ) as error:
        raise SurgeryError(
            f"from_preset at '{preset}': expected a config and `.safetensors` files that "
            f"the converter of '{kind}' takes. Received others ({type(error).__name__}: "
            f"{str(error)[:200]}). Compare them with those of the original."
        ) from error
