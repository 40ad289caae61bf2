"""Presets: find the backbone and preprocessor behind a name or a folder."""

import weakref
from pathlib import Path
from typing import Any

import keras
import keras_hub

from backbone_surgery.errors import SurgeryError, closest

_PACKAGE = Path(__file__).resolve().parent.parent
_BUNDLED = (_PACKAGE / "models", _PACKAGE.parent / "models")
"""Where bundled models are: inside an installed package, or next to it in a source checkout."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")

_names: weakref.WeakKeyDictionary[keras.Model, str] = weakref.WeakKeyDictionary()


def bundled_models() -> dict[str, Path]:
    """Return the folder of each bundled model, by name."""
    folders = (f for root in _BUNDLED if root.is_dir() for f in sorted(root.iterdir()))
    return {f.name: f for f in folders if (f / "config.json").is_file()}


def find_vector(preset: str, name: str) -> Path:
    """Return the file of a control vector that comes with a model, in its folder's `vectors`."""
    folder = bundled_models().get(preset, Path(preset)) / "vectors"
    found = sorted(folder.glob("*.gguf")) + sorted(folder.glob("*.safetensors"))
    for path in found:
        if path.stem == name:
            return path
    raise SurgeryError(
        f"control vector '{name}' of '{preset}': expected one of the vectors that come with the "
        f"model. {closest(name, dict.fromkeys(p.stem for p in found))} Name one of these, or load "
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
    bundled = bundled_models()
    path = str(bundled.get(preset, preset))
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise SurgeryError(
                f"from_preset at '{preset}': expected a folder in KerasHub or Hugging Face layout. "
                "Received one without `config.json`. Save one with `save_to_preset` or "
                "`save_pretrained`."
            )
        has_tokenizer = any((Path(path) / name).is_file() for name in _TOKENIZER_FILES)
    elif preset.startswith((".", "/", "~")):
        raise SurgeryError(
            f"from_preset at '{preset}': expected a folder that exists. Received a path where "
            f"there is none. Bundled models: {', '.join(bundled) or '(none)'}."
        )
    else:
        has_tokenizer = True
    preprocessor = _load_preprocessor(preset, path) if has_tokenizer else None
    return load_backbone(preset, load_weights=load_weights, **kwargs), preprocessor


def load_backbone(preset: str, **kwargs: Any) -> keras.Model:
    """Load a backbone alone, and remember the name of the preset it came from."""
    path = str(bundled_models().get(preset, preset))
    backbone = keras_hub.models.Backbone.from_preset(path, **kwargs)
    if not Path(preset).is_dir():
        _names[backbone] = preset
    return backbone


def preset_of(backbone: keras.Model) -> str | None:
    """Return the name of the preset a backbone was loaded from, if it has one and came this way."""
    return _names.get(backbone)


def _load_preprocessor(preset: str, path: str) -> Any:
    try:
        return keras_hub.models.CausalLMPreprocessor.from_preset(path)
    except FileNotFoundError as error:
        raise SurgeryError(
            f"from_preset at '{preset}': expected the tokenizer files that KerasHub reads for this "
            f"architecture. Received a folder where {error} Recent `transformers` save only "
            "`tokenizer.json`. For GPT-2, `tokenizer.backend_tokenizer.model.save(folder)` writes "
            "the other files; for Gemma, copy the original `tokenizer.model`. To go without a "
            "preprocessor, remove the tokenizer files."
        ) from error
