"""Presets: find the backbone and preprocessor behind a name or a folder."""

import contextlib
import difflib
import json
import os
import weakref
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import keras
import keras_hub

from backbone_surgery import byte_pairs, graph, hosts, hugging_face
from backbone_surgery.bundled import bundled_models
from backbone_surgery.errors import SurgeryError, WeightMismatchError, closest
from backbone_surgery.files import as_path
from backbone_surgery.opening.checkpoint import check_layers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")

_names: weakref.WeakKeyDictionary[keras.Model, str] = weakref.WeakKeyDictionary()


def preset_path(preset: str | os.PathLike[str]) -> str:
    """Return where a preset is: the folder of a bundled model, or else what was given.

    Names of bundled models come before paths; `./tiny_gpt2` is the folder of that name.

    Raises:
        SurgeryError: it is no name and no path.
    """
    as_path(preset, "from_preset")
    return str(bundled_models().get(os.fspath(preset), os.fspath(preset)))


def find_vector(preset: str, name: str) -> Path:
    """Return the file of a control vector that comes with a model, in its folder's `vectors`."""
    folder = Path(preset_path(preset)) / "vectors"
    files = sorted(folder.glob("*.gguf")) + sorted(folder.glob("*.safetensors"))
    for path in files:
        if path.stem == name:
            return path
    if not files:
        _check_there(preset, str(folder.parent))
    raise SurgeryError(
        f"control vector '{name}' of '{preset}': expected one of the vectors that come with the "
        f"model. {closest(name, dict.fromkeys(p.stem for p in files))} Name one of these, or load "
        "a file."
    )


def load_preset(preset: str, load_weights: bool = True, **kwargs: Any) -> tuple[keras.Model, Any]:
    """Load a backbone and its preprocessor.

    Args:
        preset: see `CachedCausalLM.from_preset`.
        load_weights: whether to load the weights.
        **kwargs: for the backbone, such as `dtype`.

    Returns:
        The backbone, and the preprocessor, or `None` where a folder has no tokenizer.

    Raises:
        SurgeryError: there is no such folder, or it lacks `config.json` or a tokenizer file.
    """
    path = preset_path(preset)
    loader = _loader(preset, path)
    files = [(Path(path) / name).is_file() for name in _TOKENIZER_FILES]
    has_tokenizer = any(files) or not Path(path).is_dir()
    preprocessor = _load_preprocessor(preset, path, loader) if has_tokenizer else None
    return load_backbone(preset, load_weights=load_weights, **kwargs), preprocessor


def _check_there(preset: str, path: str) -> None:
    """Refuse a path where no model is; what is no path may be a preset."""
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise SurgeryError(
                f"from_preset at '{preset}': expected a folder in KerasHub or Hugging Face layout. "
                "Received one without `config.json`. Save one with `save_to_preset` or "
                "`save_pretrained`."
            )
    elif path.startswith((".", "/", "~")):
        raise SurgeryError(
            f"from_preset at '{preset}': expected a folder that exists. Received a path where "
            f"{'a file' if Path(path).is_file() else 'nothing'} is. Bundled models: "
            f"{', '.join(bundled_models()) or '(none)'}."
        )
    elif "://" not in path and path not in keras_hub.models.Backbone.presets:
        names = [*bundled_models(), *keras_hub.models.Backbone.presets]
        near = difflib.get_close_matches(path, names)
        raise SurgeryError(
            f"from_preset at '{preset}': expected a bundled model, a preset of KerasHub, a URL "
            "such as 'hf://owner/name', or a folder. Received none of these. "
            f"{'Did you mean ' + ' or '.join(near) + '?' if near else 'Check it.'} Bundled "
            f"models: {', '.join(bundled_models()) or '(none)'}."
        )


def load_backbone(preset: str, load_weights: bool = True, **kwargs: Any) -> keras.Model:
    """Load a backbone alone, and remember the name of the preset it came from."""
    path = preset_path(preset)
    loader = _loader(preset, path)
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = dtypes_of_layers(preset)
    on_host = hosts.host_memory(keras.distribution.distribution() is not None)
    as_assigned = graph.values_as_assigned() if load_weights else contextlib.nullcontext()
    with _in_words(preset), on_host, as_assigned:
        if hugging_face.is_hugging_face(loader):
            backbone = hugging_face.convert(loader, preset, load_weights, **kwargs)
        else:
            kwargs = {**_cap_of_task(preset, path), **kwargs}
            is_local = load_weights and Path(path).is_dir()
            file = _weights_file(preset, path) if is_local else None
            with contextlib.nullcontext() if file is None else _weights_in_words(preset, file):
                backbone = keras_hub.models.Backbone.from_preset(
                    path, load_weights=load_weights, **kwargs
                )
            if file is not None:
                check_layers(backbone, file, "from_preset")
    if preset in bundled_models() or not Path(preset).is_dir():
        _names[backbone] = preset
    return backbone


def _loader(preset: str, path: str) -> Any:
    """Return KerasHub's loader of a preset, or of a folder or repository of Hugging Face.

    Raises:
        SurgeryError: there is no model, or none that KerasHub loads.
    """
    _check_there(preset, path)
    try:
        with _in_words(preset):
            return hugging_face.find_loader(path)
    except SurgeryError:
        raise
    except ValueError as error:
        raise SurgeryError(
            f"from_preset at '{preset}': expected a model that KerasHub loads. Received another: "
            f"{error} Convert it to one of those that docs/families.md lists."
        ) from error


def _cap_of_task(preset: str, path: str) -> dict[str, Any]:
    """Return the cap of logits that the task of a preset has, for the backbone.

    KerasHub's task of Gemma 4 may have one, of its own.
    """
    if not graph.check_file_exists(path, "task.json"):
        return {}
    cap = graph.load_json(path, "task.json").get("config", {}).get("final_logit_cap")
    if cap is None:
        return {}
    own = graph.load_json(path)["config"].get("final_logit_soft_cap")
    if own is not None:
        raise SurgeryError(
            f"from_preset at '{preset}': expected one cap of logits. Received {own} of the "
            f"backbone in config.json, and {cap} of the task in task.json. KerasHub applies one "
            "after the other; set one of them to null."
        )
    return {"final_logit_soft_cap": cap}


def dtypes_of_layers(preset: str) -> Any:
    """Return what layers a folder says have dtypes of their own, as of a quantised model, if any.

    Tasks of KerasHub read that by themselves, its backbones do not.
    """
    file = Path(preset_path(preset)) / "config.json"
    if not file.is_file():
        return None
    with _in_words(preset):
        dtype = json.loads(file.read_text("utf-8")).get("config", {}).get("dtype")
    is_map = isinstance(dtype, dict) and dtype.get("class_name") == "DTypePolicyMap"
    return dtype if is_map else None


def preset_of(backbone: keras.Model) -> str | None:
    """Return the name of the preset a backbone was loaded from, if it has one and came this way."""
    return _names.get(backbone)


def keep_preset(copy: keras.Model, backbone: keras.Model) -> None:
    """Have a copy of a backbone be of the same preset."""
    if backbone in _names:
        _names[copy] = _names[backbone]


@contextlib.contextmanager
def _in_words(preset: str) -> Iterator[None]:
    """Say of what preset it is that KerasHub stumbles over a file that is not of its format."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, UnicodeDecodeError, JSONDecodeError) as error:
        raise SurgeryError(
            f"from_preset at '{preset}': expected files and arguments that KerasHub takes. "
            f"Received others ({type(error).__name__}: {str(error)[:200]}). Compare the JSON files "
            "with those of the original."
        ) from error


@contextlib.contextmanager
def _weights_in_words(preset: str, file: Path) -> Iterator[None]:
    """Say that the weights in a folder are damaged, or those of another model than its config."""
    try:
        yield
    except SurgeryError:
        raise
    except (OSError, ValueError) as error:
        raise WeightMismatchError(
            f"from_preset at '{preset}': expected weights that KerasHub loads into the model that "
            f"`config.json` describes. Received '{file.name}', at which it stopped "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). The file may be "
            "damaged, of another model, or quantised as KerasHub does not load it. Compare both "
            "files with those of the original."
        ) from error


def _weights_file(preset: str, path: str) -> Path:
    """Return the file of weights in a folder of KerasHub, or the index of those in shards."""
    found = [Path(path) / f"model.weights.{ending}" for ending in ("h5", "json")]
    for file in found:
        if file.is_file():
            return file
    raise SurgeryError(
        f"from_preset at '{preset}': expected weights, in {found[0].name} or {found[1].name} with "
        "its shards. Received a folder without them. Get them too, or pass `load_weights=False`."
    )


def _load_preprocessor(preset: str, path: str, loader: Any) -> Any:
    try:
        with _in_words(preset):
            preprocessor = hugging_face.load_preprocessor(loader)
        tokenizer, is_foreign = preprocessor.tokenizer, hugging_face.is_hugging_face(loader)
        byte_pairs.repair(tokenizer, byte_pairs.load_pipeline(tokenizer, path, is_foreign))
        return preprocessor
    except FileNotFoundError as error:
        raise SurgeryError(
            f"from_preset at '{preset}': expected the tokenizer files that KerasHub reads for this "
            f"architecture. Received a folder where {error} Recent `transformers` save only "
            "`tokenizer.json` and `tokenizer_config.json`; another file, such as a "
            "`tokenizer.model`, is copied from the original. To go without a preprocessor, remove "
            "the tokenizer files."
        ) from error
