"""The search: what it reports is what its edits do, and a search that was killed goes on."""

import json
from dataclasses import replace
from random import Random

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.tuning.candidates import Candidate
from backbone_surgery.tuning.checks import check_prompts
from backbone_surgery.tuning.judging import ask
from backbone_surgery.tuning.record import Record
from tests.edits import save_autoencoder

PAIRS = [
    ("Lily was happy. Lily smiled. So Lily", "Lily was sad. Lily cried. So Lily"),
    ("Tom was glad. Tom laughed. Then Tom", "Tom was unhappy. Tom wept. Then Tom"),
    ("Ben felt cheerful. Ben sang. Ben", "Ben felt gloomy. Ben sighed. Ben"),
    ("Mia was merry and she", "Mia was upset and she"),
]
PROMPTS = ["Once there was a girl named Mia.", "Tom had a red ball.", "Zoe came home.", "Ben sat."]
OPTIONS = {
    "budget": 120,
    "steps": 6,
    "max_new_tokens": 8,
    "verbose": 0,
    "rank": 2,
    "batch_size": 32,
}

MINE = bs.ControlVector({block: np.ones(128) for block in range(6)})


def letters(texts):
    """Judge by something that any text has."""
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in texts]


@pytest.fixture(scope="module")
def lm():
    model = bs.CachedCausalLM.from_preset("tiny_gpt2")
    model.compile(sampler=keras_hub.samplers.RandomSampler(temperature=0.8))
    return model


FOUND = ("mean_diff", "learned", "bipo", "reft_r1", "sae", "reft", "lora")


@pytest.fixture(scope="module")
def found(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoders") / "blocks.4"
    save_autoencoder(folder, np.random.default_rng(0), 128)
    options = {**OPTIONS, "autoencoders": {4: folder}}
    return bs.tune(lm, PAIRS, letters, PROMPTS, FOUND, seed=3, **options)


def report_prompts(seed):
    """Return the half that is reported on, and its seeds."""
    texts = list(PROMPTS)
    Random(seed).shuffle(texts)
    return texts[2:], [seed, seed + 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", FOUND)
def test_an_edit_does_what_is_reported(method, lm, found):
    edit = found.edits[method]
    edited = bs.CachedCausalLM(bs.operate(lm.backbone, [edit]), lm.preprocessor)
    edited.compile(sampler=lm.sampler)
    prompts, seeds = report_prompts(3)
    (trial,) = [t for t in found.trials if t.candidate.method == method]
    options = {"seed": seeds, "strip_prompt": True, "max_new_tokens": 8}
    up = edited.generate(prompts, controls={"tuned": edit.strength}, **options)
    down = edited.generate(prompts, controls={"tuned": -edit.strength}, **options)
    assert up == edited.generate(prompts, **options)  # by default it acts as it was chosen
    assert trial.up == pytest.approx(np.mean(letters(up)))
    assert trial.down == pytest.approx(np.mean(letters(down)))
    alone = lm.generate(prompts, **options)
    assert found.unedited.up == pytest.approx(np.mean(letters(alone)))
    assert method in ("reft", "lora") or (up, down) != (alone, alone)  # few steps teach little
    assert method != "sae" or trial.candidate.blocks == (4,)


@pytest.mark.slow
def test_the_best_is_chosen_where_it_is_not_reported(found):
    best = max(found.finals, key=lambda t: t.score)
    assert {t.candidate for t in found.finals} == {t.candidate for t in found.trials}
    assert found.chosen == best.candidate.method
    assert found.best is found.edits[best.candidate.method]
    assert [t.score for t in found.trials] == sorted((t.score for t in found.trials), reverse=True)
    assert "2 prompts not searched on" in str(found)
    assert f"{found.chosen} (chosen)" in str(found)


def only(found, method):
    own = [[t for t in of if t.candidate.method == method] for of in (found.trials, found.finals)]
    return replace(found, trials=tuple(own[0]), finals=tuple(own[1]))


@pytest.mark.slow
def test_it_is_drawn_and_saved(found, lm, tmp_path):
    pytest.importorskip("matplotlib")
    axes = found.plot(tmp_path / "tuned.png")
    assert [t.get_text() for t in axes.get_yticklabels()][::-1] == [
        t.candidate.method for t in found.trials
    ]
    assert (tmp_path / "tuned.png").stat().st_size > 5000
    steering = only(found, "mean_diff")
    steering.save(tmp_path / "mood.safetensors")
    vector = bs.ControlVector.load(tmp_path / "mood.safetensors", lm=lm)
    assert vector == found.edits["mean_diff"].vector
    with pytest.raises(bs.SurgeryError, match="expected an edit that adds a direction"):
        only(found, "reft").save(tmp_path / "mood.gguf")


@pytest.mark.slow
def test_the_file_of_a_model_that_looks_alike_is_refused(lm, tmp_path):
    """Of the same weights and shapes, with blocks in another order or another number in a layer."""

    def reordered(*order):
        return bs.operate(lm.backbone, [bs.Reorder(order)])

    def scaled(scale):
        layer = keras.layers.Rescaling(scale)
        return bs.operate(lm.backbone, [bs.Insert("blocks.1.mlp_output", layer)])

    def search(graph, judge=letters):
        task = bs.CachedCausalLM(graph, lm.preprocessor)
        task.compile(sampler=lm.sampler)
        options = {**OPTIONS, "methods": (), "vectors": {"mine": MINE}, "file": file}
        bs.tune(task, PAIRS, judge, PROMPTS, fluency=letters, **options)

    def dies(texts):
        if file.exists():
            raise KeyboardInterrupt
        return letters(texts)

    for make, first, second in (
        (reordered, (0, 2, 1, 3, 4, 5), (0, 1, 3, 2, 4, 5)),
        (scaled, (1.0,), (0.2,)),
    ):
        file = tmp_path / make.__name__
        with pytest.raises(KeyboardInterrupt):
            search(make(*first), dies)
        with pytest.raises(bs.SurgeryError, match="Received one of another model, other texts or"):
            search(make(*second))
        with pytest.raises(KeyboardInterrupt):
            search(make(*first), dies)


@pytest.mark.slow
def test_a_search_goes_on_from_its_file(lm, tmp_path):
    calls = []

    def dies(texts):
        calls.append(len(texts))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return letters(texts)

    options = {
        **OPTIONS,
        "methods": ("mean_diff", "learned", "reft"),
        "seed": 1,
        "fluency": letters,
    }
    whole = bs.tune(lm, PAIRS, letters, PROMPTS, **options)
    file = tmp_path / "search.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bs.tune(lm, PAIRS, dies, PROMPTS, file=file, **options)
    known = len(file.read_text().splitlines())
    seen = []
    again = bs.tune(
        lm, PAIRS, lambda t: seen.append(len(t)) or letters(t), PROMPTS, file=file, **options
    )
    assert known > 10
    assert again.trials == whole.trials
    assert again.tried == whole.tried
    assert again.finals == whole.finals
    everything = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    texts = 2 * sum(line["stop"] - line["start"] for line in everything)
    assert sum(seen) < texts  # what the first one measured was not written again
    with pytest.raises(bs.SurgeryError, match="expected the file of this search"):
        bs.tune(lm, PAIRS, letters, PROMPTS, file=file, **{**options, "seed": 2})
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:8]) + lines[8][:20])  # killed while it wrote
    assert bs.tune(lm, PAIRS, letters, PROMPTS, file=file, **options).trials == whole.trials
    np.testing.assert_array_equal(*(layer_of(result) for result in (again, whole)))
    file.write_text("rubbish\n")
    with pytest.raises(bs.SurgeryError, match="a file of `tune`"):
        bs.tune(lm, PAIRS, letters, PROMPTS, file=file, **options)


def test_prompts_may_be_an_array(lm):
    assert check_prompts(lm, np.array(PROMPTS)) == PROMPTS
    with pytest.raises(bs.SurgeryError, match="a list of two strings or more"):
        check_prompts(lm, np.array([PROMPTS]))


def test_a_judge_may_answer_yes_or_no():
    for said in ([True, False], (np.True_, np.False_), np.array([True, False]), [True, 0.0]):
        np.testing.assert_array_equal(ask(lambda _, said=said: said, ["a", "b"], "judge"), [1, 0])
    with pytest.raises(bs.SurgeryError, match=r"from 0 to 1 for each\. Received True"):
        ask(lambda _: True, ["a"], "judge")


@pytest.mark.slow
def test_integers_of_numpy_make_the_same_search(lm, tmp_path):
    numbers = {"budget": 12, "rank": 2, "steps": 1, "max_new_tokens": 3, "seed": 5}
    file = tmp_path / "search.jsonl"
    given = {"methods": ("mean_diff",), "fluency": letters, "verbose": 0, "file": file}
    whole = bs.tune(lm, PAIRS, letters, PROMPTS, **given, **numbers)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))  # so that a line is left to write
    others = {name: np.int64(number) for name, number in numbers.items()}
    assert bs.tune(lm, PAIRS, letters, PROMPTS, **given, **others).trials == whole.trials
    assert file.read_text() == "".join(lines)


@pytest.mark.parametrize(
    "content",
    [
        b"my notes, line 1\nline 2: important, without a newline at its end",
        b'{"one": "line of JSON without a newline"}',
        b'{"search": "another"}\n{"method": "no',
        b"\xff\xfe\x00 no text",
        b"\n",
    ],
)
def test_the_file_of_something_else_stays_as_it_is(tmp_path, content):
    file = tmp_path / "mine"
    file.write_bytes(content)
    with pytest.raises(bs.SurgeryError, match="Name another file"):
        Record(file, "this search")
    assert file.read_bytes() == content


@pytest.mark.parametrize("length", [0, 5, 26, 27])
def test_a_record_goes_on_after_a_part_of_its_first_line(tmp_path, length):
    file = tmp_path / "search.jsonl"
    record = Record(file, "this search")
    file.write_text(record.header[:length])
    candidate, measured = Candidate("mean_diff", (1,), 0.5), np.ones((2, 2, 2))
    Record(file, "this search").add([candidate], 0, 2, [measured])
    np.testing.assert_array_equal(Record(file, "this search").get(candidate, 0, 2), measured)
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.slow
def test_directions_of_ones_own_are_searched_as_a_method_is(found, lm):
    vector = bs.ControlVector.train(lm, PAIRS, method="mean_diff", verbose=0)
    longer = bs.ControlVector({b: 3 * d for b, d in vector.directions.items()})
    own = bs.tune(lm, PAIRS, letters, PROMPTS, (), seed=3, vectors={"mine": longer}, **OPTIONS)
    (theirs,) = [t for t in found.trials if t.candidate.method == "mean_diff"]
    assert [replace(t, candidate=None) for t in own.trials] == [replace(theirs, candidate=None)]
    assert own.chosen == "mine"
    for block, direction in found.edits["mean_diff"].vector.directions.items():
        np.testing.assert_allclose(own.best.vector.directions[block], direction, rtol=1e-6)


def layer_of(result):
    (layer,) = result.edits["reft"].interventions.values()
    return np.asarray(layer.towards)


@pytest.mark.slow
def test_directions_apart_from_others(lm):
    other = bs.ControlVector.from_preset("tiny_gpt2", "place")
    full = bs.ControlVector.train(lm, PAIRS, method="mean_diff", verbose=0)
    others = bs.ControlVector(
        {b: other.directions.get(b, d * 0 + 1) for b, d in full.directions.items()}
    )
    result = bs.tune(lm, PAIRS, letters, PROMPTS, ("mean_diff",), orthogonal_to=[others], **OPTIONS)
    for block, direction in result.best.vector.directions.items():
        cosine = direction @ others.directions[block] / np.linalg.norm(direction)
        assert abs(cosine) <= 1e-5 * np.linalg.norm(others.directions[block])


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": [("a", "b")], "methods": ("pca_diff",)}, "more than one pair for 'pca_diff'"),
        ({"methods": ("mean",)}, "expected names of methods.*Did you mean|expected names"),
        ({"methods": ()}, "a list with each method once"),
        ({"methods": "reft"}, "a list with each method once"),
        ({"methods": ("reft", "reft")}, "a list with each method once"),
        ({"seed": -1}, "'seed': expected an integer from 0"),
        ({"rank": 128}, "'rank': expected fewer than 128"),
        ({"max_new_tokens": 0}, "'max_new_tokens': expected a positive int"),
        ({"judge": None}, "'judge': expected a function of a list of texts"),
        ({"file": "/nowhere/at/all.jsonl"}, "expected a file in a folder that exists"),
        ({"orthogonal_to": (v for v in [1])}, "expected a list of ControlVectors"),
        ({"prompts": ["one"]}, "a list of two strings or more"),
        ({"prompts": "one"}, "a list of two strings or more"),
        ({"judge": lambda texts: [2.0] * len(texts)}, "a number from 0 to 1 for each"),
        pytest.param(
            {"judge": lambda texts: [0.5]}, "a number from 0 to 1 for each", marks=pytest.mark.slow
        ),
        ({"fluency": lambda texts: None}, "'fluency': expected a function"),
        ({"budget": 0}, "'budget': expected a positive int"),
        ({"steps": 1.5}, "'steps': expected a positive int"),
        ({"orthogonal_to": [1]}, "expected a list of ControlVectors"),
        (
            {"methods": ("reft",), "orthogonal_to": [bs.ControlVector({0: np.ones(128)})]},
            "expected methods that find a direction",
        ),
        (
            {"methods": ("lora",), "orthogonal_to": [bs.ControlVector({0: np.ones(128)})]},
            "expected methods that find a direction",
        ),
        ({"methods": ("sae",)}, "'autoencoders': expected folders by block, of blocks 0 to 5"),
        ({"autoencoders": {4: "folder"}}, "expected them for method 'sae' alone"),
        ({"pairs": []}, "pairs"),
        ({"vectors": {}}, "'vectors': expected ControlVectors by name"),
        ({"vectors": [1]}, "'vectors': expected ControlVectors by name"),
        ({"vectors": {"reft": MINE}}, "expected another name than those of methods.*'reft'"),
        ({"vectors": {"mine": bs.ControlVector({1: np.ones(128)})}}, "Received none for block 0"),
        ({"vectors": {"mine": bs.ControlVector({0: np.ones(9)})}}, "Received none for block 1"),
        ({"vectors": {"mine": MINE}, "methods": "reft"}, "a list with each method once"),
    ],
)
def test_what_cannot_be_tuned_is_refused(change, message, lm):
    given = {"pairs": PAIRS, "judge": letters, "prompts": PROMPTS, "methods": ("mean_diff",)}
    with pytest.raises(bs.SurgeryError, match=message):
        bs.tune(lm, **{**given, **OPTIONS, **change})
