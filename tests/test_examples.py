"""The examples of the guides run as they stand there."""

import ast
import json
import re
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.opening import family
from tests.families import ROWS
from tests.helpers import relative
from tests.transcoders import arrays, save_gemma_scope, save_gemma_scope_2

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WORDS = {'" right"': '" happy"', '" wrong"': '" sad"'}
PROMPTS = ["Once upon a time there was a", "Lily had a little red box and", "The moon came up over"]


def blocks_of(name):
    """Return the examples of a guide."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)
    assert blocks
    return blocks


def block_with(name, words):
    """Return the example of a guide that has these words."""
    (block,) = (x for x in blocks_of(name) if words in x)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("name", ["architecture.md", "state.md"])
def test_examples_run(name, monkeypatch, capsys):
    monkeypatch.setattr(family, "_families", dict(family._families))
    exec("\n".join(blocks_of(name)), {"__name__": name})
    assert "cached = uncached" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_chat_runs(capsys):
    chat = block_with("families.md", "chat_prompt")
    folder = ROOT / "tests/fixtures/hf_chat"
    code = chat.replace('"./Qwen3-0.6B"', f'"{folder}", load_weights=False')
    assert code != chat
    exec(code, {"__name__": "families", "bs": bs})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_long_texts_runs():
    code = block_with("families.md", "long_factor").replace(
        "Phi-4-mini-instruct", str(ROOT / "tests/fixtures/hf_families/phi3")
    )
    names = {"__name__": "families", "bs": bs}
    exec(code, names)
    assert names["lm"].backbone.rope_scaling_short_factor == names["scaling"]["long_factor"]


@pytest.mark.slow
def test_the_example_of_serving_runs(capsys):
    exec(block_with("serving.md", "bs.Engine"), {"__name__": "serving"})
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.slow
def test_the_example_of_response_formats_runs(capsys):
    names = {"__name__": "serving"}
    exec(block_with("serving.md", "bs.ResponseFormat"), names)
    pet, texts = capsys.readouterr().out.splitlines()
    found = json.loads(pet.removeprefix("Tom had a pet: "))
    assert found["pet"] in ("dog", "cat")
    assert isinstance(found["age"], int)
    mood, number, free = ast.literal_eval(texts)
    assert re.fullmatch("Lily was very (happy|sad)", mood)
    assert re.fullmatch(r"Tom was as tall as [0-9]{1,3}(\.[0-9])?", number)
    assert free.startswith("One day")


@pytest.mark.slow
def test_the_worked_example_of_a_family(monkeypatch):
    """The file that the guide shows opens Qwen 3 as the package does."""
    code = block_with("families.md", "def open_block")
    names = {"__name__": "families"}
    exec(code, names)
    backbone = ROWS["qwen3"].make()
    inputs = {"token_ids": np.array([[3, 1, 4, 1, 5]]), "padding_mask": np.ones((1, 5), "int32")}
    known = {name: f for name, f in family._families.items() if name != "qwen3"}
    monkeypatch.setattr(family, "_families", known)
    bs.register_family(names["FAMILY"])
    opened = bs.open_backbone(backbone)
    assert opened.family.name == "my_qwen3"
    assert relative(opened.predict_on_batch(inputs), backbone.predict_on_batch(inputs)) <= 5e-6
    assert max(bs.check(opened).errors.values()) <= 1e-5


@pytest.mark.slow
def test_the_example_of_qwen3_runs(capsys):
    """On a random model, as `transformers` saves it with its tokenizer."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"<!-- example: qwen3 -->\n```python\n(.*?)^```", text, re.M | re.S)
    folder = ROOT / "tests/fixtures/hf_qwen3"
    code = block.replace("./Qwen3-0.6B", str(folder), 1)
    assert code != block
    exec(code, {"__name__": "readme"})
    assert len(set(capsys.readouterr().out.splitlines())) >= 3


@pytest.fixture(scope="module")
def gpt2():
    """A GPT-2 of ten blocks, which the examples speak of."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(807, 10, 4, 32, 64, max_sequence_length=256)
    return bs.CachedCausalLM(backbone, bs.CachedCausalLM.from_preset("tiny_gpt2").preprocessor)


@pytest.fixture
def names(gpt2, tmp_path, monkeypatch):
    """What the guide to rewrites takes as given, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    directions = {i: rng.normal(size=32).astype("float32") for i in range(10)}
    return {
        "bs": bs,
        "np": np,
        "keras": keras,
        "lm": gpt2,
        "backbone": gpt2.backbone,
        "preprocessor": gpt2.preprocessor,
        "prompts": PROMPTS,
        "texts": [f"{prompt} dog." for prompt in PROMPTS],
        "text": PROMPTS[0],
        "clean_text": "Once upon a time there was a girl",
        "corrupted_text": "Once upon a time there was a boy",
        "clean": "Tom was very happy. Tom",
        "corrupted": "Tom was very sad. Tom",
        "metric": (" happy", " sad"),
        "vector": bs.ControlVector(directions),
        "direction": directions[3],
    }


def run(names, words, replaced=()):
    """Run the example of the guide to rewrites that has these words, with others in their place."""
    code = block_with("rewrites.md", words)
    for old, new in dict(replaced).items():
        assert old in code
        code = code.replace(old, new)
    exec(code, names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("words", ["bs.Ablate(", "bs.ProjectOut("])
def test_examples_leave_the_second_row_as_it_was(gpt2, names, words):
    code = block_with("rewrites.md", words)
    calls = re.findall(r"^lm\.generate\(prompts.*?\)(?=  #|$)", code, re.M)
    run(names, words)
    assert "[1, 0, 1]" in calls[0]
    for lm in (gpt2, names["lm"]):
        lm.compile(sampler="greedy")
    texts, plain = eval(calls[0], names), gpt2.generate(PROMPTS)
    assert texts[1] == plain[1]
    assert texts[0] != plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["bs.Patch(site", "bs.Knockout(", 'name="before"'])
def test_an_example_of_rewrites_runs(names, words):
    run(names, words)


@pytest.mark.slow
def test_the_example_of_adapters_runs(names):
    for name in ("french", "legal"):
        made = bs.operate(names["backbone"], [bs.Lora("made", rank=2)])
        for weight in made.trainable_variables:
            weight.assign(keras.random.normal(weight.shape, seed=len(name)))
        bs.save_peft(bs.CachedCausalLM(made, names["preprocessor"]), "made", f"./{name}-lora")
    run(names, 'bs.Lora("french"')


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # by KerasHub's own `fit`
def test_the_example_of_a_new_adapter_runs(names, tmp_path):
    qwen = bs.CachedCausalLM.from_preset(str(ROOT / "tests/fixtures/hf_qwen3"))
    run({**names, "backbone": qwen.backbone, "preprocessor": qwen.preprocessor}, "bs.save_peft(")
    config = json.loads((tmp_path / "tone-lora" / "adapter_config.json").read_text())
    layers = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert layers == {"q_proj", "v_proj", "down_proj"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_the_example_of_learned_steering_runs(names):
    learned = run(names, "trainable=True")["lm"]
    (direction,) = learned.trainable_variables
    assert np.abs(direction.numpy()).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "save", "block"),
    [("bs.SparseAutoencoder(", save_gemma_scope, 20), ("gemma3_1b,", save_gemma_scope_2, 13)],
)
def test_the_examples_of_features_run(names, rng, tmp_path, words, save, block):
    """Gemma Scope's files, here of a few features of the bundled Gemma."""
    gemma = bs.CachedCausalLM.from_preset("tiny_gemma")
    size = gemma.backbone.hidden_dim
    weights = arrays(rng, size, 24, size)
    (folder,) = re.findall(r'folder = "(.*?)"', block_with("rewrites.md", words))
    (tmp_path / folder).parent.mkdir(parents=True)
    save(tmp_path / folder, weights, 1)
    given = {
        "gemma2_2b": gemma.backbone,
        "gemma3_1b": gemma.backbone,
        "feature": 3,
        "prompts": PROMPTS[:2],
    }
    run(
        {**names, **given, "preprocessor": gemma.preprocessor},
        words,
        {f"blocks.{block}": "blocks.1"},
    )


@pytest.mark.slow
def test_the_example_of_circuit_tracing_runs(names, rng, tmp_path):
    folders = []
    for i in range(10):
        weights = arrays(rng, 32, 24, 32)
        folders.append(save_gemma_scope_2(tmp_path / str(i), weights, i))
    made = run({**names, "folders": folders}, "bs.attribution_graph(", WORDS)
    assert 0 < made["graph"].explained < 1
    assert (tmp_path / "graph.png").exists()


@pytest.mark.slow
def test_the_examples_of_captures_and_analyses_run(names, tmp_path):
    edited = bs.operate(names["backbone"], [bs.Capture("blocks.0.attention_pattern")])
    lm = names["lm"]
    names["lm"] = bs.CachedCausalLM(edited, names["preprocessor"])
    run(names, "return_captures=True)\ncaptures[")
    run({**names, "lm": lm}, "bs.patch_grid(", WORDS)
    assert (tmp_path / "circuit.png").exists()
    pairs = [(names["clean"], names["corrupted"]), (names["corrupted"], names["clean"])]
    run({**names, "lm": lm, "pairs": pairs}, "bs.Edges.mean(")
    ids = np.arange(40).reshape(2, 20)
    run({**names, "lm": lm, "token_ids": ids, "text": PROMPTS[0] * 3}, "prompt_lengths=12")


@pytest.mark.slow
def test_the_example_of_alignment_search_runs(names):
    code = {
        "...,": "*[(f'{a} was', f'{b} was', c) for a, b, c in given],",
        '("The cat", "The dogs", " run"),': "",
        '("The dogs", "A cat", " runs"),': "",
        '("A dog", "The cat", " runs"),': "",
    }
    given = [("Lily", "Ben", " happy"), ("Ben", "Lily", " sad"), ("Tom", "Ben", " happy")] * 4
    found = run({**names, "given": given}, "bs.find_subspace(", code)["found"]
    assert 0 <= found.accuracy <= 1


@pytest.mark.slow
def test_the_examples_of_data_sets_run(names, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    glad = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2")
    edited = bs.operate(plain.backbone, [bs.Steer("mood", glad, strength=0.0)])
    rows = {"prompt": PROMPTS, "strength": [1.0, 0.0, -1.0], "which": ["glad", "calm", "glad"]}
    pq.write_table(pa.table(rows), tmp_path / "prompts.parquet")
    given = {"edited": edited, "preprocessor": plain.preprocessor, "glad": glad, "calm": -glad}
    exec(block_with("datasets.md", "bs.generate_dataset("), {**names, **given})
    assert pq.read_table(tmp_path / "out").num_rows == 3
    lines = [json.dumps({"text": prompt}) for prompt in PROMPTS]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    bs.harvest(plain, "corpus.jsonl", "activations", ["blocks.3"])
    made = {}
    exec(block_with("datasets.md", "read_row_group(0)"), made)
    assert made["array"].shape == (len(made["values"]), 128)


@pytest.mark.slow
def test_the_example_of_recipes_runs(names):
    names["edited"] = bs.operate(names["backbone"], [bs.Steer("mood", {3: names["direction"]})])
    exec(block_with("weights.md", "bs.save_recipe("), names)
    assert [x.name for x in names["edited"].rewrites] == ["mood"]
