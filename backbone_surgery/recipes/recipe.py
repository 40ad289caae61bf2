"""Recipes: an edit on disk. What is kept is the edit, never the graph or the backbone's weights."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

from backbone_surgery import hosts
from backbone_surgery.bundled import bundled_models
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.files import as_path, reading
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.presets import load_backbone, preset_of
from backbone_surgery.recipes.base import assign, base_facts, fitted_base, owner_deltas
from backbone_surgery.recipes.describe import Describer, Rebuilder
from backbone_surgery.recipes.store import read_recipe, write_recipe
from backbone_surgery.rewriting.operate import operate
from backbone_surgery.version import __version__
from backbone_surgery.weights.arrays import of_variable
from backbone_surgery.weights.paths import extra_paths, resolve, variable_paths
from backbone_surgery.weights.transfer import finalize_layers

_POLICIES = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")


def save_recipe(edited: Any, path: str | Path) -> None:
    """Save the edit of a model to a folder: `recipe.json`, and a file of arrays.

    The rewrites are kept as data, with what they own: vectors, weights of the layers that they put
    in, and the LoRA factors and quantisation scales of the backbone. The weights of the backbone
    itself are not in it, unless GPTQ or AWQ made them; their digest is. The folder is written whole
    or not at all, and replaces a recipe that was there.

    Args:
        edited: what `operate` made of a keras_hub Backbone, or a task or cached graph over it. A
            backbone without an edit may be in it for its LoRA or quantisation.
        path: of the folder, such as `happy.recipe`.

    Raises:
        SurgeryError: the edit cannot be described, as docs/weights.md says, the model is not made
            of a keras_hub Backbone, or the folder holds something else. Nothing is written then.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np, os, tempfile
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)})])
        >>> path = os.path.join(tempfile.mkdtemp(), "happy.recipe")
        >>> bs.save_recipe(edited, path)
        >>> bs.load_recipe(path, backbone).report[0].sites
        ('blocks.1',)
    """
    folder = as_path(path, "save_recipe")
    model = open_backbone(resolve(edited, "save_recipe"))
    hosts.agree(model, "save_recipe", {"path": str(folder)})  # before weights are gathered
    document, arrays = _describe(model)
    parts = {"edit": [json.dumps(document, sort_keys=True), arrays]}
    hosts.by_first(model, "save_recipe", parts, lambda: write_recipe(folder, document, arrays))


def edit_digest(edited: Any) -> str:
    """Return `"sha256:..."` of an edit and of the weights it was made on, as a recipe tells them.

    Args:
        edited: whatever `save_recipe` takes.
    """
    document, arrays = _describe(open_backbone(resolve(edited)))
    # Names that Keras gives count up, and change nothing.
    base = {**document["base"], "config": _nameless(document["base"]["config"])}
    layers = _nameless(document["layers"])
    whole = {**document, "versions": None, "base": base, "layers": layers}
    return f"sha256:{hosts.digest([json.dumps(whole, sort_keys=True), arrays]).hex()}"


def _nameless(value: Any) -> Any:
    """Return JSON without what is under `name`, at any depth; dtypes keep theirs."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key != "name"}
        return {k: x if k == "dtype" else _nameless(x) for k, x in kept.items()}
    return [_nameless(inner) for inner in value] if isinstance(value, list) else value


def _describe(edited: EditedBackbone) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return an edit as a document and arrays."""
    owner = edited.owner
    base = base_facts(owner, preset_of(owner))
    describer = Describer(owner)
    rewrites = [describer.rewrite(r, f"rewrites.{i}") for i, r in enumerate(edited.rewrites)]
    added = extra_paths(edited, variable_paths(owner))
    describer.check_kept(added.values())
    weights = {f"edited.{path}": v for path, v in added.items()}
    weights |= {f"owner.{path}": v for path, v in owner_deltas(owner).items()}
    document = {
        "versions": versions(),
        "base": base,
        "dtype_policy": _one_policy(edited),
        "layers": describer.layers,
        "rewrites": rewrites,
    }
    arrays = {name: of_variable(v).read() for name, v in weights.items()}
    return document, {**describer.arrays, **arrays}


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    modules = {module.__name__: module.__version__ for module in (keras, keras_hub, np)}
    return {"backbone_surgery": __version__, **modules}


def load_recipe(path: str | Path, backbone: keras.Model | None = None) -> EditedBackbone:
    """Return a backbone with a saved edit applied to it: the same graph, bit for bit.

    First the files are checked against their digests, and the backbone against the one that the
    recipe was made on. No code is loaded, and nothing is read from the network.

    Args:
        path: of the folder that `save_recipe` wrote.
        backbone: the backbone that the recipe was made on. It is not changed: where the recipe
            holds LoRA factors or a quantisation, these go to a copy of it. `None` is enough for an
            edit of a bundled model.

    Returns:
        The edited model, as `operate` returned it. Its `owner` is `backbone`, or the copy.

    Raises:
        RecipeError: the recipe is damaged, of another version, or of another backbone.
        SurgeryError: a backbone is needed and not given.
    """
    folder = as_path(path, "load_recipe")
    with reading(folder, "load_recipe", "a recipe that can be applied", RecipeError):
        document, arrays = read_recipe(folder)
        base = document["base"]
        _warn_of_versions(document["versions"])
        with _under(document["dtype_policy"]):
            rebuilder = Rebuilder(arrays, document["layers"])
            rewrites = [rebuilder.rewrite(described) for described in document["rewrites"]]
        model = _bundled(base) if backbone is None else resolve(backbone, "load_recipe")
        if isinstance(model, EditedBackbone):
            raise SurgeryError(
                f"load_recipe at '{model.name}': expected the backbone that the recipe was made "
                "on. Received an edited one. Pass its `owner`."
            )
        owner = fitted_base(model, base, arrays)
        with _under(document["dtype_policy"]):
            edited = operate(owner, rewrites)
        assign(extra_paths(edited, variable_paths(owner)), arrays, "edited.")
        finalize_layers(edited)
    return edited


def _one_policy(edited: EditedBackbone) -> str:
    names = edited.made_under or ("float32",)  # without rewrites, none made any layer
    if len(names) > 1 or names[0] not in _POLICIES:
        raise SurgeryError(
            f"save_recipe at '{edited.name}': expected rewrites that were all applied under one "
            f"global dtype policy of {', '.join(_POLICIES)}. Received {', '.join(names)}. Set "
            "one by `keras.config.set_dtype_policy` before the first `operate`, and keep it."
        )
    return names[0]


@contextlib.contextmanager
def _under(policy: str) -> Iterator[None]:
    """Make this the dtype policy of layers that are told none."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _warn_of_versions(written: dict[str, Any]) -> None:
    """Warn of other minor releases of what computes: they may not give the same bits."""
    for module in (keras, keras_hub):
        name, here, there = module.__name__, module.__version__, str(written.get(module.__name__))
        if there.split(".")[:2] != here.split(".")[:2]:
            warnings.warn(
                f"load_recipe: the recipe was made with {name} {there}, and this is {here}. The "
                "graph is the same; outputs may differ in their last bits.",
                stacklevel=3,
            )


def _bundled(base: dict[str, Any]) -> keras.Model:
    """Load the bundled model that a recipe was made on."""
    preset = base["preset"]
    if preset in bundled_models():
        return load_backbone(preset, dtype=base["dtype"])
    known = f", '{preset[:80]}', which is not bundled" if preset else ""
    raise SurgeryError(
        f"load_recipe: expected `backbone`, since the recipe was made on a {base['class'][:80]}"
        f"{known}. Received none. Load that backbone and pass it."
    )
