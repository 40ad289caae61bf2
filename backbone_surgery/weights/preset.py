"""Presets of edited models: a KerasHub preset of the base, with the recipe of the edit inside."""

import re
from pathlib import Path
from typing import Any

import keras_hub

from backbone_surgery.backbone import EditedBackbone
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.weights.base import copy_backbone, lora
from backbone_surgery.weights.folder import new_folder
from backbone_surgery.weights.recipe import save_recipe

FOLDER = "recipe"
_OURS = re.compile(rf"[a-z_]+\.json|model(_\d+)?\.weights\.(h5|json)|assets|{FOLDER}")


def save_preset(
    edited: EditedBackbone, preprocessor: Any, path: Path, max_shard_size: float | None
) -> None:
    """Write base, preprocessor and recipe to a folder, whole or not at all.

    The base is written without LoRA, as it is before the recipe is applied. KerasHub can load it,
    and does not look at the recipe.

    Args:
        edited: an opened backbone, edited or not.
        preprocessor: of the task, or `None`.
        path: of the folder. One that holds a preset is replaced.
        max_shard_size: see KerasHub.

    Raises:
        SurgeryError: the base is no keras_hub Backbone, the edit has no description, or the folder
            holds something else.
    """
    owner = edited.owner
    if not isinstance(owner, keras_hub.models.Backbone):
        raise SurgeryError(
            f"save_to_preset at '{path}': expected a model over a keras_hub Backbone. Received one "
            f"over a {type(owner).__name__}, which no preset can hold. Edit the backbone itself by "
            "`operate`."
        )
    with new_folder(path, lambda name: _OURS.fullmatch(name) is not None) as folder:
        tuned = lora(owner)
        if edited.rewrites or tuned:
            save_recipe(edited, folder / FOLDER)
        base = copy_backbone(owner) if tuned else owner
        base.save_to_preset(str(folder), max_shard_size=max_shard_size)
        if preprocessor is not None:
            preprocessor.save_to_preset(str(folder))


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
