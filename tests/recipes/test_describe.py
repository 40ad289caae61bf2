"""What is in the fields of rewrites comes back from a recipe as it was, or is refused in words."""

import random
import sys
from dataclasses import dataclass

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.recipes.describe import Rebuilder
from backbone_surgery.recipes.store import read_recipe
from tests.helpers import make_deep_gpt2
from tests.recipes.edits import CASES, Own, Put, outputs, rewritten, vector


@pytest.fixture(scope="module")
def gpt2():
    return make_deep_gpt2()


def saved(gpt2, rewrites, folder):
    bs.save_recipe(bs.operate(gpt2, rewrites), folder)
    return folder


def test_values_of_every_kind_come_back(gpt2, tmp_path):
    values = {
        "a": [1, 2.5, None, True, "text", -0.0, 1e-300, 2**60],
        3: ((), [], {}, (1, [2, (3,)])),
        -1: np.arange(6, dtype="int8").reshape(2, 3),
        "b": np.zeros((0, 4), "bool"),
        "c": np.float64(0.1),
        "d": bs.Steer("inner", {0: vector()}),
        np.int64(7): "a key that is no int",
    }
    saved(gpt2, [Own("blocks.0", values)], tmp_path / "r")
    again = bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values
    assert list(again) == [*list(values)[:-1], 7]
    assert repr({k: again[k] for k in ("a", 3)}) == repr({k: values[k] for k in ("a", 3)})
    for key in (-1, "b", "c"):
        assert type(again[key]) is type(values[key])
        assert again[key].dtype == values[key].dtype
        np.testing.assert_array_equal(again[key], values[key])
    np.testing.assert_array_equal(again["d"].vector[0], values["d"].vector[0])


def test_arrays_under_keys_that_look_alike(gpt2, tmp_path):
    values = {1: np.zeros(2), "1": np.ones(2), "a.b": np.full(3, 2.0), "a": {"b": np.full(3, 4.0)}}
    saved(gpt2, [Own("blocks.0", values)], tmp_path / "r")
    again = bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values
    assert list(again) == list(values)
    for key in (1, "1", "a.b"):
        np.testing.assert_array_equal(again[key], values[key])
    np.testing.assert_array_equal(again["a"]["b"], values["a"]["b"])


def test_a_control_vector_comes_back_as_one(gpt2, tmp_path):
    wanted = bs.ControlVector({1: vector()}, {"method": "none"})
    saved(gpt2, [Own("blocks.0", wanted)], tmp_path / "r")
    again = bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values
    assert again == wanted
    assert again.info == wanted.info


@keras.saving.register_keras_serializable("tests")
class Span:
    """An object of one's own that is no dataclass: it says itself what it is made of."""

    def __init__(self, start, size):
        self.start, self.stop = start, start + size

    def get_config(self):
        return {"start": self.start, "size": self.stop - self.start}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def test_an_object_of_a_registered_class_comes_back(gpt2, tmp_path):
    saved(gpt2, [Own("blocks.0", [Span(3, 4)])], tmp_path / "r")
    (again,) = bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values
    assert (again.start, again.stop) == (3, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda x: bs.Reorder(x), lambda x: bs.Ablate("blocks.*.head_outputs", heads=x)]
)
def test_lists_are_copied(gpt2, tmp_path, make):
    numbers = [1, 0, 1]
    edited = bs.operate(gpt2, [make(numbers)])
    numbers[:] = [0, 0, 0]
    bs.save_recipe(edited, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", gpt2)), outputs(edited))


def test_an_unbuilt_layer_that_does_not_run_stays_unbuilt(gpt2, tmp_path):
    saved(gpt2, [Own("blocks.0", keras.layers.Dense(4))], tmp_path / "r")
    assert not bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values.built


# What has no description


class Around(keras.layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x):
        return x + self.block(x)


@dataclass(frozen=True)
class Unknown(bs.SiteRewrite):
    at: str = "blocks.0"

    def apply(self, x, place, surgery):
        return x + x


def clone_fn(layer, *args, **kwargs):
    x = layer(*args, **kwargs)
    return keras.layers.Dense(32)(x) if layer.name == "transformer_layer_0" else x


def built():
    layer = keras.layers.Dense(32, name="mine")
    layer.build((None, None, 32))
    return layer


def trained(gpt2):
    return bs.operate(gpt2, [bs.Steer("mood", {1: np.ones(32)}, trainable=True)]).rewrites[0]


def twice(layer):
    one, two = (keras.Sequential([layer]) for _ in range(2))
    return [bs.Insert("blocks.0", one), bs.Insert("blocks.1", two)]


def nested(depth):
    return [nested(depth - 1)] if depth else 1


RUNS_NOT = "expected a layer that runs in the edited graph"


@pytest.mark.by_default(8)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b: [clone_fn], r"Received the function 'clone_fn', .* Use Insert, Replace or Wrap"),
        (lambda b: [Unknown()], "Received Unknown. Decorate the class with `@keras.saving"),
        (lambda b: np.sin, r"'rewrites\.0\.values': .* Received 'sin'"),
        (lambda b: {(1, 2): 3}, "has no description"),
        (lambda b: {True: 3}, "has no description"),
        (lambda b: [object()], r"'rewrites\.0\.values\.0': expected numbers"),
        (lambda b: float("inf"), "expected a finite number. Received inf"),
        (lambda b: np.array([1, np.nan]), "Received NaN or infinity"),
        (lambda b: np.array(["a"]), "has no description"),
        (lambda b: np.array([1j]), "has no description"),
        (lambda b: bs.Control(strength=3.0), "'Control' of type Control"),
        (lambda b: [bs.Wrap("blocks.0", lambda x: Around(x))], r"'<lambda>' of type function"),
        (lambda b: [bs.Wrap("blocks.0", Around)], "registered by `@keras.saving.register_keras_s"),
        (lambda b: [Put("blocks.0", keras.layers.Lambda(lambda x: x * 2))], "Received 'Lambda'"),
        (lambda b: [Put("blocks.0", b.get_layer("layer_norm"))], "a layer of the backbone"),
        (lambda b: built(), rf"rewrites\.0\.values': {RUNS_NOT}"),
        (lambda b: trained(b), rf"rewrites\.0\.values\.learned': {RUNS_NOT}"),
        (
            lambda b: [Put("blocks.1", built()), bs.Remove("blocks.1")],
            rf"rewrites\.0\.layer': {RUNS_NOT}",
        ),
        (
            lambda b: twice(keras.layers.Dense(32)),
            r"'rewrites\.1\.layer': expected layers that share no weights",
        ),
        (lambda b: bs.SparseAutoencoder("blocks.0", "x"), "expected no path in the field 'path'"),
        (lambda b: [*range(200_000)], "expected JSON of at most 2097152 bytes.* Keep numbers in"),
        (lambda b: nested(20), "expected values nested at most 16 deep"),
        (lambda b: nested(400), "expected values nested at most 16 deep"),
    ],
)
def test_what_has_no_description_is_refused_by_name(gpt2, tmp_path, make, words):
    """In a field, or as a list of rewrites; nothing is written."""
    value = make(gpt2)
    of_rewrites = isinstance(value, list) and (
        value[0] is clone_fn or isinstance(value[0], bs.Rewrite)
    )
    edited = bs.operate(gpt2, value if of_rewrites else [Own("blocks.0", value)])
    with pytest.raises(bs.SurgeryError, match=words):
        bs.save_recipe(edited, tmp_path / "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_field_that_a_recipe_lacks_has_its_default(gpt2, tmp_path):
    """A recipe of before `error`, and of layers before they normalised, is the splice it was."""
    edited = bs.operate(gpt2, CASES["autoencoder"]("gpt2", "float32"))
    bs.save_recipe(edited, tmp_path / "r")
    document, _ = read_recipe(tmp_path / "r")
    (described,), layers = document["rewrites"], document["layers"]
    assert described["fields"].pop("error") is False
    assert [layer["config"].pop("normalize") for layer in layers] == ["none", "none"]
    rewritten(tmp_path / "r", rewrites=[described], layers=layers)
    again = bs.load_recipe(tmp_path / "r", gpt2)
    assert again.rewrites[0].error is False
    np.testing.assert_array_equal(outputs(again), outputs(edited))


# What a recipe names that this process does not know, or that is of a wrong kind


def refused(gpt2, folder, described, words):
    rewritten(folder, rewrites=[described])
    with pytest.raises(bs.RecipeError, match=words):
        bs.load_recipe(folder, gpt2)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("backbone_surgery>Ster", {}, "Did you mean 'backbone_surgery>Steer'"),
        ("backbone_surgery>Steer", {"old": 1}, "unexpected keyword argument 'old'"),
        ("backbone_surgery>Steer", {"name": "a"}, "missing 1 required positional argument"),
        ("backbone_surgery>Encoder", {}, "no class of rewrites"),
        ("backbone_surgery>CachedCausalLM", {}, "no class of rewrites"),
        ("keras_hub>GPT2Tokenizer", {"vocabulary": "/etc/passwd"}, "no class of rewrites"),
        ("tests>Span", {"start": 1, "size": 2}, "Span is no rewrite"),
        (
            "backbone_surgery>Wrap",
            {"at": "blocks.0", "make_layer": {"registered": "builtins>eval"}},
            "has registered. Received 'builtins>eval'",
        ),
        (
            "backbone_surgery>SparseAutoencoder",
            {"at": "blocks.0", "path": "/tmp"},
            "expected no path in the field 'path'",
        ),
    ],
)
def test_names_and_fields_of_others(gpt2, tmp_path, name, fields, words):
    saved(gpt2, [Own("blocks.0")], tmp_path / "r")
    refused(gpt2, tmp_path / "r", {"type": name, "fields": fields}, words)


WRONG = [
    *(None, True, 0, -1, 7, 10**400, 1.5, 1e300, "", "x", "blocks.0", "prompt"),
    *({"list": []}, {"list": ["x"]}, {"tuple": [0, 1]}, {"tuple": [{"list": [1]}, None]}),
    *({"dict": []}, {"dict": [[1, "x"]]}, {"dict": [["blocks.0.query", 3]]}, {"dict": [1]}),
    *({}, {"x": 1}, {"list": 1}, {"list": [], "x": 1}, {"layer": 0.0}, {"layer": 7}),
    *({"array": "none"}, {"array": 1}, {"registered": "none"}, {"object": {}}, {"object": 1}),
    *({"registered": "keras_hub>GPT2Backbone"}, {"registered": "tests>Bias"}),
    {"object": {"type": "backbone_surgery>Remove", "fields": {"at": "blocks.0"}}},
]


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    "case",
    ["steering", "condition", "skip", "feature", "wrap", "reorder", "low_rank", "ablate", "insert"],
)
def test_values_in_wrong_fields_give_words_or_a_model(gpt2, tmp_path, case):
    """Nothing raw reaches the user, wherever a value of another kind fails."""
    good = saved(gpt2, CASES[case]("gpt2", "float32"), tmp_path / "good")
    described = read_recipe(good)[0]["rewrites"]
    fields = [(i, n) for i, r in enumerate(described) for n in r["fields"]]
    rng = random.Random(case)
    count = 0
    for _ in range(12):
        (i, name), value = rng.choice(fields), rng.choice(WRONG)
        rewrites = [{**r, "fields": dict(r["fields"])} for r in described]
        rewrites[i]["fields"][name] = value
        rewritten(good, tmp_path / "bad", rewrites=rewrites)
        try:
            bs.load_recipe(tmp_path / "bad", gpt2)
        except bs.SurgeryError:
            count += 1
    assert count > 1


def test_values_nested_deep_with_right_digests(gpt2, tmp_path):
    value = 1
    for _ in range(300):
        value = {"list": [value]}
    saved(gpt2, [Own("blocks.0")], tmp_path / "r")
    limit = sys.getrecursionlimit()
    described = {"type": "tests>Own", "fields": {"at": "blocks.0", "values": value}}
    rewritten(tmp_path / "r", rewrites=[described])
    sys.setrecursionlimit(250 + len(__import__("inspect").stack()))
    try:
        with pytest.raises(bs.RecipeError, match="RecursionError"):
            bs.load_recipe(tmp_path / "r", gpt2)
    finally:
        sys.setrecursionlimit(limit)


def test_fields_that_a_rewrite_does_not_take():
    described = {"type": "backbone_surgery>Repeat", "fields": {"at": "blocks.0", "times": 0}}
    with pytest.raises(bs.RecipeError, match=r"expected fields that it takes\..*`times`"):
        Rebuilder({}, []).rewrite(described)
