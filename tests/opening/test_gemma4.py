"""What Gemma 4 has and the other families have not; see also rewriting/test_shared_keys.py."""

import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import relative
from tests.reference import tokens
from tests.test_family_table import complete

LARGE = ROWS["gemma4"].shapes[1]
pytestmark = pytest.mark.slow


def test_one_projection_of_keys_and_values_is_two_sites(rng):
    """Block 1 is global; what is done to its values is not done to its keys."""
    backbone = ROWS["gemma4"].make(**LARGE)
    inputs = tokens(rng)
    capture = bs.Capture("blocks.1.key", "blocks.1.value", "blocks.1.head_outputs")
    plain = bs.operate(backbone, [capture]).predict_on_batch(inputs)["captures"]
    edits = [bs.Ablate("blocks.1.value"), capture]
    ablated = bs.operate(backbone, edits).predict_on_batch(inputs)["captures"]
    assert np.array_equal(plain["blocks.1.key"], plain["blocks.1.value"])
    assert relative(ablated["blocks.1.key"], plain["blocks.1.key"]) <= 5e-6
    assert not np.any(ablated["blocks.1.value"])
    assert not np.any(ablated["blocks.1.head_outputs"])


def test_the_cap_of_the_task_is_that_of_the_backbone(rng, tmp_path):
    backbone = ROWS["gemma4"].make()
    task = keras_hub.models.Gemma4CausalLM(None, backbone, final_logit_cap=2.0)
    inputs = tokens(rng)
    wanted = task.predict_on_batch(complete("gemma4", inputs))
    lm = bs.CachedCausalLM(backbone)
    assert relative(lm.score(inputs["token_ids"]), wanted) > 1e-2
    task.save_to_preset(tmp_path / "task")
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "task"))
    assert relative(loaded.score(inputs["token_ids"]), wanted) <= 5e-6
    task.backbone.final_logit_soft_cap = 3.0
    task.save_to_preset(tmp_path / "both")
    with pytest.raises(bs.SurgeryError, match=r"expected one cap.* 3.0 of the backbone .* 2.0 of"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "both"))
    loaded.save_to_preset(tmp_path / "ours")
    again = bs.CachedCausalLM.from_preset(str(tmp_path / "ours"))
    assert relative(again.score(inputs["token_ids"]), wanted) <= 5e-6
