"""Adapters as PEFT saves them, made by hand."""

import json

import numpy as np
from safetensors.numpy import save_file


def write_adapter(folder, modules, rank=2, **settings):
    """Write an adapter of random factors.

    Args:
        folder: to be made.
        modules: `{name: (inputs, outputs)}`, such as `transformer.h.0.attn.c_attn`.
        rank: of all of them.
        **settings: of `adapter_config.json`, beside the least there is.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for name, (inputs, outputs) in modules.items():
        shapes = {"A": (rank, inputs), "B": (outputs, rank)}
        for factor, shape in shapes.items():
            key = f"base_model.model.{name}.lora_{factor}.weight"
            arrays[key] = rng.normal(0, 1, shape).astype("float32")
    folder.mkdir()
    save_file(arrays, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": rank, "init_lora_weights": True, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
