"""What is made of a model once, and kept with it; and what makes it out of date."""

from collections.abc import Callable
from typing import Any

import keras

from backbone_surgery import graph


def made_once(model: keras.Model, key: Any, make: Callable[[], Any]) -> Any:
    """Return what is made of a model under a key: the same each time, with its compiled programs.

    Args:
        model: keeps it, and Keras does not track it.
        key: tells it from whatever else is made of the model.
        make: makes it, the first time.
    """
    kept = vars(model).setdefault("_made_once", {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


def lora_settings(model: keras.Model) -> tuple[Any, ...]:
    """Return what LoRA is set to in the layers of a model: a compiled program holds it fixed.

    The factors are variables, and reach a program as they are. `lora_alpha` and `lora_enabled` are
    no variables, so a program made under others is another one.
    """
    layers = made_once(
        model, "lora", lambda: [x for x in graph.layers_within(model) if hasattr(x, "lora_enabled")]
    )
    return tuple(float(x.lora_alpha) if x.lora_enabled else None for x in layers)
