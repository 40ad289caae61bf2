"""Presets of edited models: a KerasHub preset of the base, with the recipe of the edit inside."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from backbone_surgery import hosts
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.files import as_path, read_json, writing
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.recipes.folder import new_folder
from backbone_surgery.recipes.quantization import quantization
from backbone_surgery.recipes.recipe import save_recipe
from backbone_surgery.weights.owner import check_backbone, copy_backbone, left_out, lora

FOLDER = "recipe"
_OURS = re.compile(
    r"(config|metadata|task|preprocessor|tokenizer)\.json|(model|task)(_\d+)?\.weights\.(h5|json)"
    r"|assets/tokenizer/(vocabulary\.(json|spm)|merges\.txt)"
    r"|(tokenizer|generation)_config\.json|chat_template\.jinja|tokenizer_pipeline\.json"
    rf"|{FOLDER}/(recipe\.json|deltas-[0-9a-f]{{16}}\.safetensors)"
)


def save_preset(
    edited: EditedBackbone, add: Callable[[Path], object], preset_dir: Any, most: float | None
) -> None:
    """Write base, recipe, and what `add` adds, to a folder, whole or not at all.

    The base is written without LoRA, as it is before the recipe is applied. KerasHub can load it,
    and does not look at the recipe.

    Raises:
        SurgeryError: the base is no keras_hub Backbone or is quantised, the edit has no
            description, or the folder holds anything but a KerasHub preset.
    """
    hosts.refuse(edited, "save_to_preset", "Use `save_recipe`, or one process.")
    path, owner = as_path(preset_dir, "save_to_preset"), edited.owner
    check_backbone(owner, "save_to_preset")
    quantized = quantization(owner)
    if quantized:
        raise SurgeryError(
            f"save_to_preset at '{path}': expected a backbone that is not quantised, since "
            "KerasHub loads some of those alone. Received one quantised to "
            f"{quantized['mode']}. Use `save_recipe`, which holds the quantisation as a part of "
            "the edit."
        )
    replaceable = _is_preset(path)
    own = new_folder(path, lambda name: replaceable and _OURS.fullmatch(name))
    with writing(path, "save_to_preset"), own as folder:
        tuned = lora(owner)
        if edited.rewrites or tuned:
            save_recipe(edited, folder / FOLDER)
        base = copy_backbone(owner) if tuned else owner
        base.save_to_preset(str(folder), max_shard_size=most)
        _complete(folder / "config.json", base)
        add(folder)


def _complete(file: Path, base: keras.Model) -> None:
    """Add plain values that the config of a backbone leaves out, as that Llama's head is tied."""
    document = json.loads(file.read_text("utf-8"))
    plain = {k: v for k, v in left_out(base).items() if isinstance(v, bool | int | float | str)}
    document["config"] = {**plain, **document["config"]}
    file.write_text(json.dumps(document, indent=4), "utf-8")


def _is_preset(path: Path) -> bool:
    """Tell whether a folder bears the marks of a KerasHub preset."""
    with contextlib.suppress(OSError, ValueError):
        config = read_json(path / "config.json", 2**20)
        named = isinstance(config, dict) and "registered_name" in config
        return named and (path / "metadata.json").is_file()
    return False


def recipe_in(folder: Path) -> Path | None:
    """Return the recipe in the folder of a preset, if there is one; a link is refused."""
    recipe = folder / FOLDER
    if recipe.is_symlink():
        raise RecipeError(
            f"from_preset at '{recipe}': expected the folder of a recipe. Received a link, which "
            "is not followed. Copy the folder itself."
        )
    return recipe if recipe.is_dir() else None
