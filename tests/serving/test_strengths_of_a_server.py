"""Strengths that a server gives the controls of requests that say none."""

import numpy as np
import pytest
from typer.testing import CliRunner

import backbone_surgery as bs
from backbone_surgery.cli import app
from backbone_surgery.serving.web.steering import Vectors, describe_controls, read_steering
from tests.serving.tiny import TEXT, make_steered, serve


@pytest.fixture(scope="module")
def model():
    return make_steered()


@pytest.mark.slow
@pytest.mark.parametrize("steering", [{}, {"mood": {"tokens": "generated"}}, {"mood": -1.0}])
def test_a_server_may_steer_who_does_not_ask(model, steering):
    with serve(model, controls={"mood": 1.5}) as client:
        (control,) = client.get("/v1/steering").json()["controls"]
        body = {"prompt": TEXT, "max_tokens": 30, "temperature": 0, "steering": steering}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert control["default"] == 1.5
    tokens = "generated" if steering and steering["mood"] != -1.0 else "all"
    strength = steering["mood"] if steering.get("mood") == -1.0 else 1.5
    controls = {"mood": bs.Control(strength, tokens=tokens)}
    wanted = model.generate(TEXT, max_new_tokens=30, controls=controls)
    assert TEXT + text == wanted
    assert wanted != model.generate(TEXT, max_new_tokens=30)


def test_they_reach_the_engine(model, monkeypatch):
    asked = []

    def submit(prompt, **settings):
        asked.append(settings["controls"])
        raise bs.SurgeryError("no more is to be seen")

    client = serve(model, controls={"mood": 1.5})
    monkeypatch.setattr(client.app.state.engine, "submit", submit)
    for steering in ({}, {"mood": 0.5}):
        client.post("/v1/completions", json={"prompt": TEXT, "steering": steering})
    assert asked == [{"mood": 1.5}, {"mood": 0.5}]


def test_the_command_hands_them_on(monkeypatch):
    served = []
    monkeypatch.setattr(bs, "serve", lambda lm, *args, **settings: served.append((lm, settings)))
    result = CliRunner().invoke(app, ["serve", "--control", "mood=1", "--port", "0"])
    assert result.exit_code == 0, result.output
    ((lm, settings),) = served
    assert settings["controls"] == {"mood": 1.0}
    assert [rewrite.control for rewrite in lm.opened.rewrites] == ["mood"]


def test_strengths_of_a_server_that_mean_nothing_are_refused(model):
    with pytest.raises(bs.SurgeryError, match=r"serve at control 'moood'.*Did you mean 'mood'"):
        serve(model, controls={"moood": 1.5})
    with pytest.raises(
        bs.SurgeryError, match="serve at 'controls': expected a dict of controls by name"
    ):
        serve(model, controls=[("mood", 1.5)])
    with pytest.raises(bs.SurgeryError, match="control 'mood': expected its strength, a number"):
        serve(model, controls={"mood": "much"})
    ablate = bs.Ablate("blocks.*.head_outputs", name="heads")
    lm = bs.CachedCausalLM(bs.operate(model.backbone, [ablate]), model.preprocessor)
    with pytest.raises(bs.SurgeryError, match=r"'heads': expected 1 to ablate a head.*Received 5"):
        serve(lm, controls={"heads": 5})
    result = CliRunner().invoke(app, ["serve", "--control", "mood=much"])
    assert result.exit_code == 2
    assert "NAME=STRENGTH" in result.output + result.stderr


@pytest.fixture(scope="module")
def many():
    """A model with controls of several kinds."""
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    direction = bs.ControlVector.from_preset("tiny_gpt2", "mood").directions[4]
    rewrites = [
        bs.Condition("sad", direction, 0.2, at="blocks.1"),
        bs.Clamp("blocks.1", features=(3, 7), values=2.0, name="clamp"),
        bs.Steer("mood", {4: direction}, strength=0.0),
        bs.Steer("other", {4: direction}, when="sad", strength=0.0),
    ]
    lm = bs.CachedCausalLM(bs.operate(plain.backbone, rewrites), plain.preprocessor)
    return lm, Vectors(lm, {"calm": bs.ControlVector({4: -direction})})


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, 1.5),
        ({"mood": 0.25}, 0.25),
        ({"mood": {"tokens": "generated"}}, bs.Control(1.5, tokens="generated")),
        ({"mood": {"strength": None, "tokens": "all"}}, bs.Control(1.5, tokens="all")),
        ({"mood": {"strength": 0.5, "schedule": None}}, bs.Control(0.5)),
        ({"mood": {"schedule": [1, 0.5]}}, bs.Control(bs.Schedule([1.0, 0.5]))),
        ({"other": 2.0}, 1.5),
    ],
    ids=str,
)
def test_what_a_request_says_goes_before(many, said, wanted):
    controls = read_steering(*many, said, 64, {"mood": 1.5})
    assert repr(controls["mood"]) == repr(wanted)
    assert set(controls) == {"mood", *said}


def test_objects_of_other_kinds_are_as_without_a_server(many):
    strengths = {"sad": 0.4, "clamp": 0.5}
    assert read_steering(*many, {}, 64, strengths) == strengths
    values = {"clamp": {"values": 3.0}}
    assert read_steering(*many, values, 64, strengths)["clamp"] == {"values": 3.0}
    for said, threshold in (({"tokens": "last"}, 0.4), ({"threshold": 0.3}, 0.3)):
        control = read_steering(*many, {"sad": said}, 64, strengths)["sad"]
        assert control.threshold == threshold
    defaults = {c["name"]: c["default"] for c in describe_controls(many[0], strengths)}
    clamp = {"features": [3, 7], "values": 0.5}
    assert defaults == {"sad": 0.4, "clamp": clamp, "mood": 0.0, "other": 0.0}


def test_a_vector_of_easysteer_takes_what_the_server_does_not(many):
    said = {"vectors": [{"name": "calm", "scale": 0.5}]}
    controls = read_steering(*many, said, 64, {"mood": 1.5})
    assert controls["mood"] == 1.5
    assert controls["other"].strength == 0.5
    assert np.array_equal(controls["other"].directions.directions[4], many[1]["calm"].directions[4])
