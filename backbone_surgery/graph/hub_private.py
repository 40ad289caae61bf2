"""Private KerasHub that loads presets."""

from keras_hub.src.utils.preset_utils import (
    check_file_exists,
    get_preset_loader,
    jax_memory_cleanup,
    load_json,
)
from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

__all__ = [
    "SafetensorLoader",
    "check_file_exists",
    "get_preset_loader",
    "jax_memory_cleanup",
    "load_json",
]
