"""Load the model of a command, steered by control vectors and adapted by PEFT."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbone_surgery.cli.options import SamplerName, parse_mesh
from backbone_surgery.errors import SurgeryError, closest


def load(
    model: str,
    vectors: Mapping[str, str] | None = None,
    sampler: SamplerName = SamplerName.greedy,
    recipe: Path | None = None,
    capture: Sequence[str] = (),
    mesh: str | None = None,
    controls: Iterable[str] = (),
    adapters: Mapping[str, str] | None = None,
) -> Any:
    """Load a model, with its own edit if it has one, as a compiled `CachedCausalLM`.

    Args:
        model: name, URL or folder.
        vectors: for each control, the control vector that it steers by; strength 0 at first.
        sampler: how tokens are chosen.
        recipe: the folder of an edit, which comes first.
        capture: selectors of sites to capture.
        mesh: devices to run on, such as `batch=2,model=4`.
        controls: names; of each that the edit does not have, the control vector is loaded that
            comes with the model.
        adapters: for each control, the folder of an adapter of PEFT; strength 0 at first.
    """
    import backbone_surgery as bs
    from backbone_surgery.generation.presets import load_edited
    from backbone_surgery.opening.model import EditedBackbone

    if mesh is not None:
        _share(model, parse_mesh(mesh))
    backbone, preprocessor = load_edited(model)
    if recipe is not None:
        if isinstance(backbone, EditedBackbone):
            raise SurgeryError(
                f"--recipe at '{recipe}': expected a model without an edit of its own. Received "
                f"'{model}', which holds one. Leave out --recipe, or name the model it was made on."
            )
        backbone = bs.load_recipe(recipe, backbone)
    edit = getattr(backbone, "rewrites", ())
    own: set[str] = {name for x in edit if (name := getattr(x, "control", None)) is not None}
    _check_vectors(f"--recipe '{recipe}'" if recipe else f"--model '{model}'", own, vectors or {})
    added = dict(adapters or {})
    _check_controls(model, own, {*controls} - {*(vectors or ()), *added})
    known = own | set(added)
    files = {name: name for name in controls if name not in known} | {**(vectors or {})}
    rewrites: list[Any] = [bs.Lora(name, path, strength=0.0) for name, path in added.items()]
    rewrites += [
        bs.Steer(name, loaded, strength=0.0) for name, loaded in load_vectors(model, files).items()
    ]
    if capture:
        rewrites.append(bs.Capture(*capture))
    if rewrites:
        backbone = bs.operate(backbone, rewrites)
    lm = bs.CachedCausalLM(backbone, preprocessor)
    lm.compile(sampler=sampler.value)
    return lm


def _check_vectors(option: str, own: set[str], vectors: Mapping[str, str]) -> None:
    """Refuse a vector that has the name of a control of the edit, which comes by an option."""
    for name, file in vectors.items():
        if name in own:
            raise SurgeryError(
                f"--vector at '{name}': expected a name that no control has yet. Received that of "
                f"one in the edit of {option}. Choose another, as in --vector other={file}, or "
                "leave the vector out."
            )


def _check_controls(model: str, own: set[str], names: set[str]) -> None:
    """Refuse names that are no control of the edit, if there is one, and no vector of the model."""
    from backbone_surgery.presets import find_vector

    for name in sorted(names - own) if own else ():
        try:
            find_vector(model, name)
        except SurgeryError as error:
            raise SurgeryError(
                f"control '{name}' of '{model}': expected a control of its edit, or a vector that "
                f"comes with it. {closest(name, sorted(own))} Name one of these, or load a file "
                "with --vector."
            ) from error


def _share(model: str, sizes: Mapping[str, int]) -> None:
    """Have the weights that are loaded from now on lie on a mesh of devices."""
    import keras

    import backbone_surgery as bs

    devices, count = keras.distribution.list_devices(), math.prod(sizes.values())
    if count > len(devices):
        raise SurgeryError(
            f"--mesh: expected at most {len(devices)} devices, which is what there are. Received "
            f"{count}. Ask for fewer."
        )
    mesh = keras.distribution.DeviceMesh(
        tuple(sizes.values()), list(sizes), devices=devices[:count]
    )
    layout = bs.layout_map(model, mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )


def load_vectors(model: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Load control vectors, from files or of those that come with a model."""
    return {name: _load_vector(model, file) for name, file in files.items()}


def is_vector_file(text: str) -> bool:
    """Tell the path of a file of a vector from the name of one that comes with a model."""
    return Path(text).suffix in (".gguf", ".safetensors")


def _load_vector(model: str, file: str) -> Any:
    import backbone_surgery as bs

    if is_vector_file(file):
        return bs.ControlVector.load(file)
    return bs.ControlVector.from_preset(model, file)
