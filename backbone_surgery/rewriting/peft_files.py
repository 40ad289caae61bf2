"""Adapters that PEFT saved, read: LoRA, and nothing that LoRA alone does not say.

Source: the code of PEFT 0.21 (https://github.com/huggingface/peft).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.files import FLOATS, as_path, read_arrays, read_json, reading

_MOST = 2**20
"""Bytes of `adapter_config.json`."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter."""

_NAME = re.compile(
    r"((base_model|model|transformer|language_model|decoder|gpt_neox)\.)*(layers|h)\.(?P<block>\d+)"
    r"\.(?P<module>\w+(\.\w+)*)\.lora_(?P<factor>[AB])\.weight"
)

_READ = {"peft_type", "bias", "lora_alpha", "use_rslora", "alpha_pattern", "init_lora_weights"}

_TOLD_BY_ARRAYS = {
    *("r", "rank_pattern", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
}

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("peft_version", "fan_in_fan_out", "lora_dropout", "eva_config", "loftq_config"),
    *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    *("corda_config", "lora_ga_config"),
}
"""Settings of training, of where the base is, or of what another setting turns on."""

_KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base as they are."""


@dataclass(frozen=True)
class Factors:
    """What stands beside one linear layer: y becomes y + scale · (x down) up.

    Attributes:
        down: float32[inputs, rank].
        up: float32[rank, outputs].
        scale: a number.
    """

    down: np.ndarray
    up: np.ndarray
    scale: float


def read_peft(path: Any) -> dict[tuple[int, str], Factors]:
    """Read the adapter in a folder that `save_pretrained` of PEFT wrote.

    Args:
        path: the folder, with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        `{(block, module): factors}`, with modules as `transformers` names them in a block, such
        as `self_attn.q_proj`.

    Raises:
        SurgeryError: a file is missing or damaged, or the adapter is more than LoRA.
    """
    folder = as_path(path, "Lora")
    if (folder / "adapter_model.bin").is_file() and not (folder / WEIGHTS).is_file():
        raise SurgeryError(
            f"Lora at '{path}': expected {WEIGHTS}. Received adapter_model.bin, which may run "
            "code as it is read. Load it with PEFT, and save it with `safe_serialization=True`."
        )
    missing = [n for n in (CONFIG, WEIGHTS) if not (folder / n).is_file()]
    if missing:
        raise SurgeryError(
            f"Lora at '{path}': expected a folder with {CONFIG} and {WEIGHTS}. "
            f"Received one without {' and '.join(missing)}. Pass the folder that `save_pretrained` "
            "of PEFT wrote."
        )
    with reading(folder, "Lora", "an adapter that PEFT saved"):
        config = dict(read_json(folder / CONFIG, _MOST))
        _check_config(folder, config)
        return _factors(folder, config, read_arrays(folder / WEIGHTS))


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what changes the result and is not LoRA."""
    known = _READ | _TOLD_BY_ARRAYS | _WITHOUT_EFFECT
    more = {name: value for name, value in config.items() if name not in known and value}
    if config.get("peft_type") != "LORA":
        more["peft_type"] = config.get("peft_type")
    if not isinstance(config.get("use_rslora", False), bool):
        more["use_rslora"] = config["use_rslora"]
    if config.get("bias", "none") != "none":
        more["bias"] = config["bias"]
    if config.get("init_lora_weights") not in _KEEP_BASE:
        more["init_lora_weights"] = config["init_lora_weights"]
    if more:
        raise SurgeryError(
            f"Lora at '{folder}': expected LoRA beside linear layers, and nothing else. Received "
            f"{', '.join(f'`{n}` {shown(v)}' for n, v in sorted(more.items()))}. {MERGE}"
        )


MERGE = "Merge the adapter with `merge_and_unload` of PEFT, and load the model that it gives."


def _factors(
    folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> dict[tuple[int, str], Factors]:
    """Pair the arrays of each module, and compute its scale."""
    pairs: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    names: dict[tuple[int, str], str] = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise SurgeryError(
                f"Lora at '{folder}': expected factors of linear layers in blocks. Received "
                f"'{name}'. {MERGE}"
            )
        key = int(match["block"]), match["module"]
        pair, factor = pairs.setdefault(key, {}), match["factor"]
        if factor in pair:
            raise SurgeryError(
                f"Lora at '{folder}': expected one lora_{factor} of each module. Received two of "
                f"'{key[1]}' in block {key[0]}. The file is damaged; get it again."
            )
        pair[factor] = _checked(folder, name, array)
        names[key] = name[: match.start("factor") - len(".lora_")]
    for key, pair in pairs.items():
        if sorted(pair) != ["A", "B"] or len(pair["A"]) != pair["B"].shape[1]:
            received = ", ".join(f"lora_{n} {list(a.shape)}" for n, a in sorted(pair.items()))
            raise SurgeryError(
                f"Lora at '{folder}': expected lora_A [rank, inputs] and lora_B [outputs, rank] of "
                f"'{names[key]}'. Received {received}. The file is damaged; get it again."
            )
    if not pairs:
        raise SurgeryError(
            f"Lora at '{folder}': expected the factors of some layers. Received a file without "
            "any. Get it again."
        )
    return {
        key: Factors(pair["A"].T, pair["B"].T, _scale(config, names[key], len(pair["A"])))
        for key, pair in pairs.items()
    }


def _checked(folder: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 2 or array.dtype not in FLOATS or not array.size or not _finite(array):
        raise SurgeryError(
            f"Lora at '{folder}': expected finite matrices. Received '{name}', "
            f"{array.dtype}{list(array.shape)}, which is none. The file is damaged; get it again."
        )
    return np.asarray(array, "float32")


def _finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(np.asarray(array, "float32")).all())


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return alpha / rank, or alpha / √rank where PEFT is told so (`use_rslora`)."""
    name = name.removeprefix("base_model.model.")  # as PEFT matches it
    patterns = config.get("alpha_pattern") or {}
    fits = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name))
    alpha = float(next(fits, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
