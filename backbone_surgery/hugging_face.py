"""Models of Hugging Face, as KerasHub's converters load them, checked for what these leave out.

A converter reads some settings of `config.json` and some tensors of the files, and passes over all
others. Here the backbone is given what it can have; what it cannot have is refused, and so are
weights that nothing has read. Seen in KerasHub 0.32 and `transformers` 5.24.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError
from backbone_surgery.families.as_in_hugging_face import maker
from backbone_surgery.hugging_face_settings import (
    SETTINGS,
    check_settings,
    filled,
    further,
    is_tied,
    respelled,
    text_of,
)

_NO_WEIGHTS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$"  # made anew, not learned
    r"|(^|\.)(mtp|vision|visual|audio|embed_vision|embed_audio|multi_modal)"  # not of the text
)


_FILES = ("model.safetensors", "model.safetensors.index.json")


def is_hugging_face(loader: Any) -> bool:
    """Whether a loader of KerasHub is for a causal LM of Hugging Face."""
    config = loader.config
    is_keras = "registered_name" in config or "model_type" not in config
    return not is_keras and text_of(config)[0] in SETTINGS


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
        check_settings(preset, kind, text)
        config, own = respelled(kind, whole), further(kind, text)
        found = loader.converter.convert_backbone_config(config)
        make = maker(kind, text, loader.check_backbone_class())
        backbone = make(**{**found, **own, **kwargs})
    if load_weights:
        _check_files(preset, Path(loader.preset))
        graph.jax_memory_cleanup(backbone)
        is_float = kind == "gpt_oss" and text.get("quantization_config") is None
        found = _FilesOfFloatExperts(loader.preset, backbone) if is_float else _Files(loader.preset)
        with found as files, _in_words(preset, kind):
            loader.converter.convert_weights(backbone, files, config)
            files.finish()
            _check_all_read(preset, kind, text, files)
    return backbone


class _Files(graph.SafetensorLoader):
    """The tensors of a model, which remember what was read of them."""

    def __init__(self, preset: str) -> None:
        super().__init__(preset)
        self.read: set[str] = set()

    def get_prefixed_key(self, hf_weight_key: str, dict_like: Any) -> str:
        """Return the name of a tensor in the files, as upstream."""
        if ".vision_model." in hf_weight_key:  # `transformers` 5 saves names without it
            if not any(name.endswith(hf_weight_key) for name in dict_like.keys()):
                hf_weight_key = hf_weight_key.replace(".vision_model.", ".")
        name = super().get_prefixed_key(hf_weight_key, dict_like)
        self.read.add(name)
        return name

    def port_weight(
        self, keras_variable: Any, hf_weight_key: str, hook_fn: Callable | None = None
    ) -> None:
        """As upstream, but no hook rounds to float16, as those of Mistral do."""

        def hook(tensor: np.ndarray, shape: list[int]) -> np.ndarray:
            return np.asarray(hook_fn(tensor.view(_Unrounded), shape))  # type: ignore[misc]

        super().port_weight(keras_variable, hf_weight_key, hook_fn and hook)

    def unread(self) -> list[str]:
        """Return the names of the tensors that nothing has read."""
        if self.safetensor_config is None:
            names = {name for file in self.safetensor_files.values() for name in file.keys()}
        else:
            names = set(self.safetensor_config["weight_map"])
        return sorted(names - self.read)

    def finish(self) -> None:
        """Load what a converter does not."""


class _FilesOfFloatExperts(_Files):
    """The tensors of a GPT-OSS that was saved in floats: the converter reads MXFP4 experts alone.

    It is given zeros for these, and the kernels are loaded afterwards.
    """

    def __init__(self, preset: str, backbone: Any) -> None:
        super().__init__(preset)
        self.banks = [block.sparse_moe_block.experts for block in backbone.transformer_layers]

    def get_tensor(self, hf_weight_key: str) -> np.ndarray:
        """Return a tensor of the files, or zeros in MXFP4 for the kernels of experts."""
        name, _, part = hf_weight_key.rpartition("_")
        if part not in ("blocks", "scales"):
            return super().get_tensor(hf_weight_key)
        experts, inputs, outputs = getattr(self.banks[0], name.rpartition(".")[2]).shape
        size = (experts, outputs, 1)
        return np.zeros((*size, inputs // 2) if part == "blocks" else size, np.uint8)

    def finish(self) -> None:
        """Load the kernels of the experts, [experts, inputs, outputs] in both."""
        for i, bank in enumerate(self.banks):
            for name in ("gate_up_proj", "down_proj"):
                kernels = self.get_tensor(f"model.layers.{i}.mlp.experts.{name}")
                getattr(bank, name).assign(kernels)


class _Unrounded(np.ndarray):
    """An array that stays what it is where it is to become float16."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return self if dtype == np.float16 else super().astype(dtype, *args, **kwargs)


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


def _check_all_read(preset: str, kind: str, text: dict[str, Any], files: "_Files") -> None:
    """Refuse a file with weights that the converter left out; a head may be that of the table."""
    left = [name for name in files.unread() if not _NO_WEIGHTS.search(name)]
    if text.get("num_kv_shared_layers"):
        first = text["num_hidden_layers"] - text["num_kv_shared_layers"]
        left = [name for name in left if not _is_borrowed(name, first)]
    if is_tied(kind, text):
        heads = [name for name in left if name.endswith("lm_head.weight")]
        left = [name for name in left if name not in heads]
        _check_heads(preset, files, heads)
    if left:
        raise SurgeryError(
            f"from_preset at '{preset}': expected a file whose weights KerasHub's converter of "
            f"'{kind}' reads all. Received {len(left)} tensors that it leaves out, such as "
            f"'{left[0]}'. Compare config.json with the original. If that is what you want, load "
            "it with `keras_hub.models.Backbone.from_preset`."
        )


def _check_heads(preset: str, files: "_Files", heads: list[str]) -> None:
    """Refuse a head in the files that is another than the table of tokens it is to be tied to."""
    tables = [name for name in files.read if name.endswith(("embed_tokens.weight", "wte.weight"))]
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
            f"KerasHub's converter of '{kind}' takes. Received others ({type(error).__name__}: "
            f"{str(error)[:200]}). Compare them with those of the original."
        ) from error
