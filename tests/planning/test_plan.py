"""`plan`: what is on paper is what there is; `on_devices.py` compares it on a mesh."""

import json
import math
import sys

import jax
import keras
import keras_hub
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from tests.families import ROWS


@pytest.mark.parametrize("name", list(ROWS))
def test_on_one_device_it_is_all_weights_and_the_cache(name):
    backbone = ROWS[name].make()
    paper = bs.plan(backbone, batch=3, length=20)
    assert paper.parameters == sum(math.prod(v.shape) for v in backbone.variables)
    assert paper.weight_bytes == sum(v.value.nbytes for v in backbone.variables)
    cache = bs.new_cache(bs.rewire(backbone), 3, 20)
    assert paper.cache_bytes == sum(x.nbytes for entry in cache for x in entry.values())
    assert paper.collectives == {}
    assert paper.fits


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_is_planned_from_its_config(tmp_path):
    """Of the shape of Llama 3 70B; nothing but `config.json` is there."""
    sizes = {
        "vocabulary_size": 128256,
        "num_layers": 80,
        "num_query_heads": 64,
        "num_key_value_heads": 8,
        "hidden_dim": 8192,
        "intermediate_dim": 28672,
    }
    tiny = keras_hub.models.Llama3Backbone(
        **{**sizes, "vocabulary_size": 8, "num_layers": 1, "hidden_dim": 64, "intermediate_dim": 64}
    )
    config = {
        "module": "keras_hub.src.models.llama3.llama3_backbone",
        "class_name": "Llama3Backbone",
        "registered_name": "keras_hub>Llama3Backbone",
        "config": {**tiny.get_config(), **sizes},
    }
    config["config"].pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metadata.json").write_text(json.dumps({"keras_version": "3"}))
    paper = bs.plan(str(tmp_path), {"batch": 1, "model": 8}, batch=8, length=8192)
    assert 70e9 < paper.parameters < 71e9
    assert paper.fits
    assert not bs.plan(str(tmp_path), {"model": 2}, batch=8, length=8192).fits
    assert paper.weight_bytes == pytest.approx(2 * paper.parameters / 8, rel=1e-3)
    assert paper.cache_bytes == 2 * 80 * 8 * 8192 * 8 * 128 * 2 // 8
    assert paper.collectives == {"all-reduce": 2 * 80 + 3}
    assert "161" not in str(paper)
    assert "163 all-reduce" in str(paper)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "H10"}, "Did you mean 'H100'"),
        ({"mesh": {"rows": 2}}, "axes `batch` and `model`"),
        ({"mesh": {"model": 0}}, "axes `batch` and `model`"),
        ({"batch": 0}, "at 'batch': expected a positive int"),
        ({"prompt": 0}, "at 'prompt': expected a positive int"),
        ({"length": 1.5}, "at 'length': expected a positive int"),
    ],
)
def test_bad_arguments_are_refused(settings, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.plan("tiny_gpt2", **settings)


def test_weights_that_are_unpacked_at_each_token_are_named(no_collecting):
    backbone = ROWS["gpt2"].make()
    assert "beware" not in str(bs.plan(backbone))
    backbone.quantize("int4")
    plan = bs.plan(backbone)
    assert plan.unpacked == "int4"
    assert "each token unpacks the int4 weights first" in str(plan)


def test_weights_get_no_values_while_programs_are_traced(monkeypatch):
    planning = sys.modules["backbone_surgery.planning.plan"]
    traced = {}
    monkeypatch.setattr(planning, "check_compiler", lambda device: None)
    monkeypatch.setattr(
        planning, "compile_programs", lambda programs, *_: traced.update(programs) or {}
    )
    with graph.without_values():
        backbone = ROWS["llama"].make()

    def watched(make):
        def initialize(self, *args, **kwargs):
            value = make(self, *args, **kwargs)
            assert isinstance(value, jax.core.Tracer), "a weight got a value"
            return value

        return initialize

    for name in ("RandomNormal", "VarianceScaling", "Ones", "Zeros"):
        kind = getattr(keras.initializers, name)
        monkeypatch.setattr(kind, "__call__", watched(kind.__call__))
    bs.plan(backbone, length=32, compile=True)
    assert set(traced) == {"prefill", "decode"}


@pytest.mark.parametrize(("name", "of"), [("gpt2", "position"), ("llama", "token"), ("gemma2", "")])
def test_a_table_is_not_read_whole(name, of):
    """GPT-2 has one of positions, Llama one of tokens, and Gemma takes its logits from it."""
    backbone = ROWS[name].make()
    tables = [v for v in backbone.variables if of and of in v.path and "reverse" not in v.path]
    paper = bs.plan(backbone, batch=3, length=20)
    assert paper.looked_up_bytes == sum(v.value.nbytes for v in tables)
    assert paper.least_bytes == paper.weight_bytes + paper.cache_bytes - paper.looked_up_bytes
    assert paper.device_bytes == paper.weight_bytes + paper.cache_bytes
