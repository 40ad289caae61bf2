"""Adapters written for PEFT: what `Lora` reads, and `transformers`, vLLM and llama.cpp as well.

Source: the code of PEFT 0.21 (https://github.com/huggingface/peft).
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.files import as_path, writing
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.presets import preset_of
from backbone_surgery.recipes.folder import new_folder
from backbone_surgery.rewriting import Lora
from backbone_surgery.rewriting.peft_files import CONFIG, WEIGHTS, Factors
from backbone_surgery.rewriting.peft_layers import joined, linear_nodes, module_names
from backbone_surgery.weights.paths import resolve

_DOTTED = re.compile(r"\w+(\.\w+)*")
_OURS = re.compile(rf"{re.escape(CONFIG)}|{re.escape(WEIGHTS)}")


def save_peft(edited: Any, name: str, path: str | Path, blocks: str | None = None) -> None:
    """Save an adapter of a `Lora` to a folder, as `save_pretrained` of PEFT does.

    The folder holds the adapter alone: no other edit of the model, and no LoRA of Keras. It is at
    strength 1, in float32, with one rank and one alpha for all modules, since some readers know no
    others: smaller ranks are filled up with zeros. Where `transformers` has one module for several
    layers, as GPT-2 for queries, keys and values, their ranks add up once `fit` has trained them.

    The folder is written whole or not at all, and replaces one that `save_peft` wrote.

    Args:
        edited: what `operate` made of a keras_hub Backbone, or a task or cached graph over it.
        name: of the `Lora`.
        path: of the folder.
        blocks: what the list of blocks is called in the model of `transformers` that the adapter is
            for, such as `"model.language_model.layers"`; by default as in the one that its
            `AutoModelForCausalLM` makes.

    Raises:
        SurgeryError: there is no such `Lora`, `transformers` has no name for one of its layers, an
            array is not finite, or the folder holds something else. Nothing is written then.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, os, tempfile
        >>> backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16)
        >>> edited = bs.operate(backbone, [bs.Lora("french", rank=2)])
        >>> path = os.path.join(tempfile.mkdtemp(), "french-lora")
        >>> bs.save_peft(edited, "french", path)
        >>> sorted(os.listdir(path))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    folder = as_path(path, "save_peft")
    model = open_backbone(resolve(edited, "save_peft"))
    if blocks is not None and not (isinstance(blocks, str) and _DOTTED.fullmatch(blocks)):
        raise SurgeryError(
            f"save_peft at '{path}': expected `blocks` to be names with dots between, such as "
            f"'model.layers'. Received {shown(blocks)}. Leave it out for the usual ones."
        )
    hosts.agree(model, "save_peft", {"path": str(folder), "name": name, "blocks": blocks})
    config, arrays = _described(model, _lora(model, name), blocks)

    def write() -> None:
        with writing(path, "save_peft"), new_folder(folder, _OURS.fullmatch) as new:
            (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (new / WEIGHTS).write_bytes(save(arrays, metadata={"format": "pt"}))

    hosts.by_first(model, "save_peft", {"adapter": [json.dumps(config), arrays]}, write)


def _lora(model: Any, name: Any) -> Lora:
    """Return the rewrite of a name."""
    found = {r.name: r for r in model.rewrites if isinstance(r, Lora)}
    if not isinstance(name, str) or name not in found:
        raise SurgeryError(
            f"save_peft at {shown(name)}: expected the name of a Lora. {closest(name, found)} Name "
            'it, or put one in by `operate(backbone, [Lora("french", rank=8)])`.'
        )
    return found[name]


def _described(
    model: Any, lora: Lora, blocks: str | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config and arrays of an adapter."""
    if not model.family.model_types:
        raise SurgeryError(
            f"save_peft at '{lora.name}': expected an architecture that `transformers` has too. "
            f"Received one of the family '{model.family.name}' without `model_types`. Register it "
            "with those, if its blocks are as Llama's, or use `save_recipe`."
        )
    nodes = dict(linear_nodes(model.owner))
    factors = {
        path: Factors(hosts.to_numpy(x.down), hosts.to_numpy(x.up), x.scale)
        for path, x in lora.adapters.items()
    }
    names = module_names(model, nodes, blocks)
    if others := factors.keys() - {path for paths in names.values() for path in paths}:
        raise SurgeryError(
            f"save_peft at '{lora.name}': expected adapters of layers that `transformers` has as "
            f"modules of their own. Received some of {shown(sorted(others))}. Use `save_recipe`."
        )
    modules = {
        module: joined(module, paths, factors, nodes)
        for module, paths in names.items()
        if not factors.keys().isdisjoint(paths)
    }
    scales = {f.scale for f in modules.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    rank = max(len(f.up) for f in modules.values())
    arrays = {}
    for module, f in modules.items():
        fill = ((0, rank - len(f.up)), (0, 0))
        up = f.up * (f.scale / scale if scale else 1.0)
        arrays[f"{module}.lora_A"] = np.pad(f.down.T, fill)
        arrays[f"{module}.lora_B"] = np.pad(up, fill).T
    arrays = {f"base_model.model.{k}.weight": _finite(k, x) for k, x in arrays.items()}
    return _config(model, rank, scale, list(modules)), arrays


def _finite(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array as it is written; refuse one that is not finite."""
    if not np.isfinite(array).all():
        raise SurgeryError(
            f"save_peft at '{name}': expected finite numbers. Received NaN or infinity. Train the "
            "adapter again, with smaller steps."
        )
    return np.ascontiguousarray(array, "float32")


def _config(model: Any, rank: int, scale: float, modules: list[str]) -> dict[str, Any]:
    """Return what PEFT says of an adapter."""
    preset, alpha = preset_of(model.owner) or "", scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": preset[5:] if preset.startswith("hf://") else None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": modules,
        # The modules of GPT-2 have [inputs, outputs].
        "fan_in_fan_out": model.family.model_types_of(model.owner)[0] == "gpt2",
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
