"""Recipes: an edit on disk. What is kept is the edit, never the graph or the backbone's weights."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

from backbone_surgery import graph
from backbone_surgery.backbone import EditedBackbone
from backbone_surgery.errors import RecipeError, SurgeryError
from backbone_surgery.generation.presets import bundled_models, load_backbone, preset_of
from backbone_surgery.opening import open_backbone
from backbone_surgery.operate import operate
from backbone_surgery.version import __version__
from backbone_surgery.weights.arrays import Array
from backbone_surgery.weights.base import assign, base_facts, fitted_base, owner_deltas
from backbone_surgery.weights.configs import check_config
from backbone_surgery.weights.describe import Describer, Rebuilder
from backbone_surgery.weights.paths import extra_paths, resolve, variable_paths
from backbone_surgery.weights.schema import POLICIES
from backbone_surgery.weights.sizes import Bounded, check_arrays
from backbone_surgery.weights.store import read_recipe, write_recipe
from backbone_surgery.weights.transfer import finalize_layers
from backbone_surgery.weights.tree import of_variable


def save_recipe(edited: Any, path: str | Path) -> None:
    """Save the edit of a model: a folder of `recipe.json` and `deltas.safetensors`.

    The rewrites are kept as data, with what they own: vectors, weights of the layers that they put
    in, and the LoRA factors and quantisation scales of the backbone. The weights of the backbone
    itself are not in it; their digest is. The folder is written whole or not at all, and replaces
    a recipe that was there.

    Args:
        edited: what `operate` made, or a task or cached graph over it.
        path: of the folder, by custom `<name>.recipe`.

    Raises:
        SurgeryError: a rewrite has no description (a plain function, an unregistered class), an
            layer in its fields has weights but no place in the graph, an array is not finite,
            rewrites were applied under several dtype policies of the process, or the folder holds
            something else. Nothing is written then.

    Example:
        >>> import backbone_surgery as bs, keras_hub, numpy as np, os, tempfile
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)})])
        >>> path = os.path.join(tempfile.mkdtemp(), "happy.recipe")
        >>> bs.save_recipe(edited, path)
        >>> bs.load_recipe(path, backbone).report[0].sites
        ('blocks.1',)
    """
    edited = open_backbone(resolve(edited))
    owned = variable_paths(edited.owner)
    describer = Describer({id(v) for v in owned.values()})
    rewrites = [describer.rewrite(r, f"rewrites.{i}") for i, r in enumerate(edited.rewrites)]
    added = extra_paths(edited, owned)
    describer.check_kept(added.values())
    arrays = dict(describer.arrays)
    _add(arrays, "edited.", added)
    _add(arrays, "owner.", owner_deltas(edited.owner))
    document = {
        "versions": _versions(),
        "base": base_facts(edited.owner, preset_of(edited.owner)),
        "dtype_policy": _one_policy(edited),
        "layers": describer.layers,
        "rewrites": rewrites,
    }
    write_recipe(Path(path), document, arrays)


def load_recipe(path: str | Path, backbone: keras.Model | None = None) -> EditedBackbone:
    """Load an edit, and apply it to a backbone: the same graph, bit for bit.

    Everything is checked first: the files against their digests, the rewrites against the classes
    that this process knows, and the backbone against family, config, dtype and digest of the one
    that the recipe was made on. No code is loaded, and nothing is read from the network.

    Args:
        path: of the folder that `save_recipe` wrote.
        backbone: the backbone that the recipe was made on. It is not changed: where the recipe
            holds LoRA factors or a quantisation, these go to a copy of it. `None` is enough for an
            edit of a bundled model.

    Returns:
        The edited backbone.

    Raises:
        RecipeError: the recipe is damaged, of another version, or of another backbone.
        SurgeryError: a backbone is needed and not given.
    """
    document, arrays = read_recipe(Path(path))
    rebuilder = Rebuilder(arrays, document["layers"])
    for i, config in enumerate(document["layers"]):
        check_config(config, f"layers.{i}")
    for i, description in enumerate(document["rewrites"]):
        rebuilder.check(description, f"rewrites.{i}")
    _check_used(arrays, rebuilder.used)
    _warn_of_versions(document["versions"])
    given = resolve(backbone) if backbone is not None else _known_backbone(document["base"])
    if isinstance(given, EditedBackbone):
        raise SurgeryError(
            f"load_recipe at '{given.name}': expected the backbone that the recipe was made on. "
            "Received an edited one. Pass its `owner`."
        )
    owner = fitted_base(given, document["base"], arrays)
    made = Bounded(arrays, "edited.")
    with _under(document["dtype_policy"]), graph.deferred(made):
        rewrites = [
            rebuilder.rewrite(description, f"rewrites.{i}")
            for i, description in enumerate(document["rewrites"])
        ]
        edited = _operate(owner, rewrites)
        added = extra_paths(edited, variable_paths(owner))
        check_arrays(added, arrays, "edited.")
        made.check_spare(added.values())
    assign(added, arrays, "edited.")
    finalize_layers(edited)
    return edited


def _one_policy(edited: EditedBackbone) -> str:
    names = edited.made_under or ("float32",)  # without rewrites, none made any layer
    if len(names) > 1 or names[0] not in POLICIES:
        raise SurgeryError(
            f"save_recipe at '{edited.name}': expected rewrites that were all applied under one "
            f"global dtype policy of {', '.join(POLICIES)}. Received {', '.join(names)}. Set "
            "one by `keras.config.set_dtype_policy` before the first `operate`, and keep it."
        )
    return names[0]


@contextlib.contextmanager
def _under(policy: str) -> Iterator[None]:
    """Let layers that are made inside, and are told no dtype, take this policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _operate(owner: keras.Model, rewrites: list[Any]) -> EditedBackbone:
    try:
        return operate(owner, rewrites)
    except SurgeryError:
        raise
    except Exception as error:
        raise RecipeError(
            "load_recipe at 'rewrites': expected rewrites whose fields can be applied. Received "
            f"some where {type(error).__name__}: {str(error)[:200]}. The recipe is damaged, or was "
            "made by another release of their classes."
        ) from error


def _add(arrays: dict[str, Array], at: str, variables: dict[str, keras.Variable]) -> None:
    arrays.update({f"{at}{path}": of_variable(v) for path, v in variables.items()})


def _versions() -> dict[str, str]:
    return {
        "backbone_surgery": __version__,
        "keras": keras.__version__,
        "keras_hub": keras_hub.__version__,
        "numpy": np.__version__,
    }


def _warn_of_versions(written: dict[str, str]) -> None:
    """Warn of other minor releases of what computes: they may not give the same bits."""
    here = _versions()
    for name in ("keras", "keras_hub"):
        if written.get(name, "").split(".")[:2] != here[name].split(".")[:2]:
            warnings.warn(
                f"load_recipe: the recipe was made with {name} {written.get(name)}, and this is "
                f"{here[name]}. The graph is the same; outputs may differ in their last bits.",
                stacklevel=3,
            )


def _check_used(arrays: dict[str, Array], used: set[str]) -> None:
    spare = [n for n in arrays if n not in used and not n.startswith(("edited.", "owner."))]
    if spare:
        raise RecipeError(
            f"load_recipe at '{spare[0][:80]}': expected arrays that a rewrite asks for. Received "
            f"{len(spare)} that none does. The recipe is damaged; get it again."
        )


def _known_backbone(base: dict[str, Any]) -> keras.Model:
    """Load the bundled model that a recipe was made on."""
    preset = base["preset"]
    if preset in bundled_models():
        return load_backbone(preset, dtype=base["dtype"])
    known = f", '{preset[:80]}', which is not bundled" if preset else ""
    raise SurgeryError(
        f"load_recipe: expected `backbone`, since the recipe was made on a {base['class'][:80]}"
        f"{known}. Received none. Load that backbone and pass it."
    )
