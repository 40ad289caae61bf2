"""Presets of edited models: a KerasHub preset of the base, with the recipe of the edit inside."""

import json
import re
from pathlib import Path
from typing import Any

import keras_hub

from backbone_surgery.backbone import EditedBackbone
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.weights.base import copy_backbone, lora, quantization
from backbone_surgery.weights.folder import new_folder, recover
from backbone_surgery.weights.recipe import save_recipe

FOLDER = "recipe"
_OURS = re.compile(
    r"(config|metadata|task|preprocessor|tokenizer)\.json|(model|task)(_\d+)?\.weights\.(h5|json)"
    r"|assets/tokenizer/(vocabulary\.(json|spm)|merges\.txt)"
    rf"|{FOLDER}/(recipe\.json|deltas\.safetensors)"
)


def save_preset(
    edited: EditedBackbone, preprocessor: Any, path: Path, max_shard_size: float | None
) -> None:
    """Write base, preprocessor and recipe to a folder, whole or not at all.

    The base is written without LoRA, as it is before the recipe is applied. KerasHub can load it,
    and does not look at the recipe.

    Args:
        edited: an opened backbone, edited or not.
        preprocessor: of the task, or `None`.
        path: of the folder. One that holds a KerasHub preset, and nothing else, is replaced.
        max_shard_size: see KerasHub.

    Raises:
        SurgeryError: the base is no keras_hub Backbone or is quantised, the edit has no
            description, or the folder holds something else.
    """
    owner = edited.owner
    if not isinstance(owner, keras_hub.models.Backbone):
        raise SurgeryError(
            f"save_to_preset at '{path}': expected a model over a keras_hub Backbone. Received one "
            f"over a {type(owner).__name__}, which no preset can hold. Edit the backbone itself by "
            "`operate`."
        )
    if quantization(owner):
        raise SurgeryError(
            f"save_to_preset at '{path}': expected a backbone that is not quantised, since "
            "KerasHub loads no preset of one that is. Received one quantised to int8. Use "
            "`save_recipe`, which holds the quantisation as a part of the edit."
        )
    recover(path)
    replaceable = _is_preset(path)
    with new_folder(path, lambda name: replaceable and bool(_OURS.fullmatch(name))) as folder:
        tuned = lora(owner)
        if edited.rewrites or tuned:
            save_recipe(edited, folder / FOLDER)
        base = copy_backbone(owner) if tuned else owner
        base.save_to_preset(str(folder), max_shard_size=max_shard_size)
        if preprocessor is not None:
            preprocessor.save_to_preset(str(folder))


def _is_preset(path: Path) -> bool:
    """Tell whether a folder bears the marks of a KerasHub preset."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    named = isinstance(config, dict) and "registered_name" in config
    return named and (path / "metadata.json").is_file()


def recipe_in(folder: Path) -> Path | None:
    """Return the recipe in the folder of a preset, if there is one.

    Raises:
        RecipeError: there is a link in its place.
    """
    recipe = folder / FOLDER
    if recipe.is_symlink():
        raise RecipeError(
            f"from_preset at '{recipe}': expected the folder of a recipe. Received a link, which "
            "is not followed. Copy the folder itself."
        )
    return recipe if recipe.is_dir() else None
