#!/usr/bin/env python3
"""Draw the README's picture: a two-block GPT-2 with its caches, steered in the second block."""

from pathlib import Path

import keras_hub
import numpy as np

import backbone_surgery as bs

if __name__ == "__main__":
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=50, num_layers=2, num_heads=2, hidden_dim=8, intermediate_dim=16
    )
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)})])
    picture = Path(__file__).parents[1] / "docs" / "images" / "rewired.png"
    bs.plot_model(bs.rewire(edited), str(picture), expand_nested=True)
