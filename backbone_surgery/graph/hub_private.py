"""Private KerasHub that loads presets."""

from keras_hub.src.utils.preset_utils import get_preset_loader, jax_memory_cleanup
from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

__all__ = ["SafetensorLoader", "get_preset_loader", "jax_memory_cleanup"]
