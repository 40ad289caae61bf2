"""The schema of `recipe.json`."""

import re
from typing import Any

import jsonschema

from backbone_surgery.errors import RecipeError

FORMAT = "backbone_surgery.recipe"
VERSION = 1
DELTAS = "deltas.safetensors"
POLICIES = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")

_NAME = {"type": "string", "minLength": 1, "maxLength": 200}
_PATH = {"type": "string", "minLength": 1, "maxLength": 1000}
_HEX = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_SIZE = {"type": "integer", "minimum": 0, "maximum": 2**50}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": [*required],
        "additionalProperties": False,
    }


def _one(key: str, value: Any) -> dict[str, Any]:
    return _object({key: value})


_VALUE = {"$ref": "#/$defs/value"}
_VALUES = {"type": "array", "items": _VALUE}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A recipe of backbone_surgery",
    "$defs": {
        "rewrite": _object(
            {"type": _NAME, "fields": {"type": "object", "additionalProperties": _VALUE}}
        ),
        # No `anyOf`: of a long list that is wrong, it would keep every error of every alternative.
        "value": {
            "type": ["null", "boolean", "number", "string", "object"],
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
            "properties": {
                "list": _VALUES,
                "tuple": _VALUES,
                "dict": {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [{"type": ["string", "integer"]}, _VALUE],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                },
                "array": _PATH,
                "scalar": _PATH,
                "layer": {"type": "integer", "minimum": 0, "maximum": 10**6},
                "registered": _NAME,
                "rewrite": {"$ref": "#/$defs/rewrite"},
            },
        },
    },
    **_object(
        {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "readable_by": _NAME,
            "versions": {"type": "object", "additionalProperties": _NAME},
            "base": _object(
                {
                    "family": _NAME,
                    "class": _NAME,
                    "config": {"type": ["object", "null"]},
                    "preset": {"anyOf": [_NAME, {"type": "null"}]},
                    "digest": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
                    "dtype": _NAME,
                    "quantization": {"enum": [None, "int8"]},
                    "lora": {
                        "anyOf": [
                            {"type": "null"},
                            _object(
                                {
                                    "rank": {"type": "integer", "minimum": 1, "maximum": 10**6},
                                    "layers": {"type": "array", "items": _NAME, "minItems": 1},
                                }
                            ),
                        ]
                    },
                }
            ),
            "dtype_policy": {"enum": [*POLICIES]},
            "layers": {"type": "array", "items": {"type": "object"}},
            "rewrites": {"type": "array", "items": {"$ref": "#/$defs/rewrite"}},
            "files": _one(
                DELTAS,
                _object(
                    {
                        "sha256": _HEX,
                        "size": _SIZE,
                        "arrays": {
                            "type": "object",
                            "maxProperties": 10_000,
                            "additionalProperties": _object(
                                {
                                    "dtype": {"type": "string"},
                                    "shape": {"type": "array", "items": _SIZE, "maxItems": 32},
                                }
                            ),
                        },
                    }
                ),
            ),
            "sha256": _HEX,
        }
    ),
}

_CHECKER = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
    "integer", lambda _, value: type(value) is int
)
"""Unlike the standard, which takes 2.0 for an integer; Python does not."""

_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=_CHECKER)(
    SCHEMA
)


def validate(document: Any, where: str) -> None:
    """Check a parsed `recipe.json`: first its version, then its form.

    Raises:
        RecipeError: it is of another version, with the release that can read it, or malformed.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RecipeError(
            f"load_recipe at '{where}': expected a recipe of format '{FORMAT}'. Received another "
            "kind of file. Pass a folder that `save_recipe` wrote."
        )
    version = document.get("version")
    if version != VERSION or type(version) is not int:
        release = document.get("readable_by")
        known = isinstance(release, str) and re.fullmatch(r"\d+(\.\d+){0,3}\w{0,8}", release)
        reader = f"backbone-surgery {release} or newer" if known else "a newer backbone-surgery"
        raise RecipeError(
            f"load_recipe at '{where}': expected version {VERSION} of the format. Received version "
            f"{str(version)[:20]!r}. It can be read by {reader}."
        )
    error = next(_VALIDATOR.iter_errors(document), None)
    if error is not None:
        raise RecipeError(
            f"load_recipe at '{where}': expected what the schema of recipes says at "
            f"'{error.json_path[:80]}'. Received a document where {error.message[:200]}. The file "
            "is damaged; get it again."
        )
