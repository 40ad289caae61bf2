"""Private KerasHub that loads presets."""

from typing import Any

from keras_hub.src.utils.preset_utils import (
    PresetLoader,
    check_file_exists,
    find_subclass,
    get_file,
    get_preset_loader,
    jax_memory_cleanup,
    load_json,
)
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

__all__ = [
    "OpenLoader",
    "SafetensorLoader",
    "check_file_exists",
    "find_subclass",
    "get_file",
    "get_preset_loader",
    "jax_memory_cleanup",
    "load_json",
]


class OpenLoader(TransformersPresetLoader):
    """A loader of a model of Hugging Face that KerasHub has no converter for: it is given one.

    Args:
        preset: a folder or repository.
        config: its `config.json`.
    """

    def __init__(self, preset: str, config: dict[str, Any]) -> None:
        PresetLoader.__init__(self, preset, config)
        self.converter: Any = None
