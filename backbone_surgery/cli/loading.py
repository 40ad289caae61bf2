"""Load the model of a command, steered by control vectors. Keras is imported here, not before."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbone_surgery.cli.console import attempt
from backbone_surgery.cli.options import SamplerName


def load(
    model: str,
    vectors: Mapping[str, str] | None = None,
    sampler: SamplerName = SamplerName.greedy,
) -> Any:
    """Load a model as a compiled `CachedCausalLM`.

    Args:
        model: name, URL or folder.
        vectors: for each control, the control vector that it steers by; strength 0 at first.
        sampler: how tokens are chosen.
    """
    import backbone_surgery as bs
    from backbone_surgery.presets import load_preset

    backbone, preprocessor = attempt(load_preset, model)
    steers = [
        attempt(bs.Steer, name, _load_vector(model, file), strength=0.0)
        for name, file in (vectors or {}).items()
    ]
    if steers:
        backbone = attempt(bs.operate, backbone, steers)
    lm = attempt(bs.CachedCausalLM, backbone, preprocessor)
    attempt(lm.compile, sampler=sampler.value)
    return lm


def _load_vector(model: str, file: str) -> Any:
    import backbone_surgery as bs

    if Path(file).suffix in (".gguf", ".safetensors"):
        return attempt(bs.ControlVector.load, file)
    return attempt(bs.ControlVector.from_preset, model, file)
