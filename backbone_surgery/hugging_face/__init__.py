"""Models of Hugging Face: folders and repositories, read by KerasHub's converters or our own."""

from backbone_surgery.hugging_face.convert import (
    convert,
    find_loader,
    is_hugging_face,
    load_preprocessor,
)

__all__ = ["convert", "find_loader", "is_hugging_face", "load_preprocessor"]
