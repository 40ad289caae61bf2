"""The `.safetensors` files of a model of Hugging Face."""

from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors

from backbone_surgery import graph

_FILE = "model.safetensors"


class TensorFiles(graph.SafetensorLoader):
    """The tensors of a model, which remember what was read of them."""

    def __init__(self, preset: str) -> None:
        super().__init__(preset)
        self.read: set[str] = set()

    def get_prefixed_key(self, hf_weight_key: str, dict_like: Any) -> str:
        """Return the name of a tensor in the files, as upstream."""
        if ".vision_model." in hf_weight_key:  # `transformers` 5 saves names without it
            if not any(name.endswith(hf_weight_key) for name in dict_like.keys()):
                hf_weight_key = hf_weight_key.replace(".vision_model.", ".")
        name = super().get_prefixed_key(hf_weight_key, dict_like)
        self.read.add(name)
        return name

    def port_weight(
        self, keras_variable: Any, hf_weight_key: str, hook_fn: Callable | None = None
    ) -> None:
        """As upstream, but no hook rounds to float16, as those of Mistral do."""

        def hook(tensor: np.ndarray, shape: list[int]) -> np.ndarray:
            return np.asarray(hook_fn(tensor.view(_Unrounded), shape))  # type: ignore[misc]

        super().port_weight(keras_variable, hf_weight_key, hook_fn and hook)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        if self.safetensor_config is not None:
            return set(self.safetensor_config["weight_map"])
        with safetensors.safe_open(graph.get_file(self.preset, _FILE), framework="np") as file:
            return set(file.keys())

    def unread(self) -> list[str]:
        """Return the names of the tensors that nothing has read."""
        return sorted(self.names() - self.read)

    def finish(self) -> None:
        """Load what a converter does not."""


class FilesOfFloatExperts(TensorFiles):
    """The tensors of a GPT-OSS that was saved in floats: the converter reads MXFP4 experts alone.

    It is given zeros for these, and the kernels are loaded afterwards.
    """

    def __init__(self, preset: str, backbone: Any) -> None:
        super().__init__(preset)
        self.banks = [block.sparse_moe_block.experts for block in backbone.transformer_layers]

    def get_tensor(self, hf_weight_key: str) -> np.ndarray:
        """Return a tensor of the files, or zeros in MXFP4 for the kernels of experts."""
        name, _, part = hf_weight_key.rpartition("_")
        if part not in ("blocks", "scales"):
            return super().get_tensor(hf_weight_key)
        experts, inputs, outputs = getattr(self.banks[0], name.rpartition(".")[2]).shape
        size = (experts, outputs, 1)
        return np.zeros((*size, inputs // 2) if part == "blocks" else size, np.uint8)

    def finish(self) -> None:
        """Load the kernels of the experts, [experts, inputs, outputs] in both."""
        for i, bank in enumerate(self.banks):
            for name in ("gate_up_proj", "down_proj"):
                kernels = self.get_tensor(f"model.layers.{i}.mlp.experts.{name}")
                getattr(bank, name).assign(kernels)


class _Unrounded(np.ndarray):
    """An array that stays what it is where it is to become float16."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return self if dtype == np.float16 else super().astype(dtype, *args, **kwargs)
