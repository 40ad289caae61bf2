"""A model and what runs it, as JSON: all that its texts depend on."""

import hashlib
import importlib.metadata
import json
from typing import Any

from backbone_surgery import target
from backbone_surgery.byte_pairs import pipeline_of
from backbone_surgery.errors import SurgeryError
from backbone_surgery.opening.placement import placement_of
from backbone_surgery.presets import preset_of
from backbone_surgery.recipes.recipe import edit_digest, versions

_LEFT_OUT = ("name", "trainable", "config_file", "tokenizer")
"""What the configuration of a preprocessor or a tokenizer holds that tokens do not depend on."""
_SPECIAL = ("start_token_id", "end_token_id", "end_token2_id")
"""Attributes of a tokenizer that KerasHub does not keep in its configuration."""


def described(operation: str, lm: Any) -> dict[str, Any]:
    """Return what is to be known of a model and of the code that runs it, as JSON.

    Args:
        operation: named in the error.
        lm: a `CachedCausalLM`.

    Raises:
        SurgeryError: the edit has no description, see `save_recipe`.
    """
    try:
        edit = edit_digest(lm.opened)
    except SurgeryError as error:
        raise SurgeryError(
            f"{operation} at 'lm': expected an edit that a recipe can hold, since its digest tells "
            f"one model from another. Received another one: {error}"
        ) from error
    owner = lm.opened.owner
    rewrites = [type(rewrite).__name__ for rewrite in lm.opened.rewrites]
    precision = [lm.programs.precision, target.precision_of_jax()]
    asked = {"precision": precision} if any(precision) else {}
    return {
        "model": {"class": type(owner).__name__, "preset": preset_of(owner), **asked},
        "edit": {"rewrites": rewrites, "digest": edit},
        "tokenizer": tokenizer_digest(lm.preprocessor),
        "mesh": _mesh(lm),
        "versions": {**versions(), "jax": importlib.metadata.version("jax")},
    }


def _mesh(lm: Any) -> dict[str, int] | None:
    """Return the axes of the mesh that a model lies on: sums round by how devices share them."""
    placement = placement_of(lm.opened.owner.variables)
    return None if placement is None else dict(placement.mesh.shape)


def tokenizer_digest(preprocessor: Any) -> str | None:
    """Return the digest of how a preprocessor makes tokens of text, and text of tokens.

    It is the same in each process, and for what was saved and loaded again.
    """
    if preprocessor is None:
        return None
    tokenizer = preprocessor.tokenizer
    parts = [
        *map(_settings, (preprocessor, tokenizer)),
        getattr(tokenizer, "vocabulary", None) or list(tokenizer.get_vocabulary()),
        list(getattr(tokenizer, "merges", None) or ()),
        [getattr(tokenizer, name, None) for name in _SPECIAL],
        sorted(getattr(tokenizer, "special_token_ids", ())),
        pipeline_of(tokenizer),
    ]
    total = hashlib.sha256(json.dumps(parts, default=repr, sort_keys=True).encode())
    total.update(getattr(tokenizer, "proto", None) or b"")  # of SentencePiece
    return f"sha256:{total.hexdigest()}"


def _settings(layer: Any) -> tuple[str, dict[str, Any]]:
    """Return the class of a preprocessor or tokenizer, and what it was configured with."""
    config = dict(layer.get_config())
    if "unsplittable_tokens" in config:  # KerasHub makes this list of a set
        config["unsplittable_tokens"] = sorted(config["unsplittable_tokens"] or ())
    for name in config:
        if name.endswith("_converter"):  # of images: text depends on whether there is one
            config[name] = config[name] is not None
    return type(layer).__name__, {k: v for k, v in config.items() if k not in _LEFT_OUT}
