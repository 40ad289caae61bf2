"""AxBench's files, of its form and with concepts of ours: the mood and the pet of a story."""

import json
import sys
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import backbone_surgery as bs

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
FACTORS = (-2.0, 0.0, 2.0)
OPENING = "Once upon a time there was a girl named Lily."


@pytest.fixture(scope="module")
def axbench():
    sys.path.insert(0, SCRIPTS)
    try:
        import axbench

        yield axbench
    finally:
        sys.path.remove(SCRIPTS)


def table_of(rows):
    names = ("input", "output", "output_concept", "concept_genre", "category", "concept_id")
    return pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)})


def texts_of(axbench, attribute, seed, count):
    from story_grammar import contrast_pairs

    pairs = contrast_pairs(attribute, Random(seed), 2 * count)
    return [pair for pair in pairs if pair[0] != pair[1]][:count]


@pytest.fixture(scope="module")
def folder(axbench, tmp_path_factory):
    """Files of two concepts, and two negative texts that they share."""
    folder = tmp_path_factory.mktemp("axbench")
    for name, seed, count in (("train", 1, 24), ("latent", 2, 12)):
        rows = []
        for concept, attribute in enumerate(("mood", "pet")):
            texts = texts_of(axbench, attribute, seed + 10 * concept, count)
            for i, (first, second) in enumerate(texts):
                other = -1 if (name, concept) == ("train", 0) and i < 2 else concept
                rows.append(["Tell.", first, attribute, "text", "positive", concept])
                rows.append(["Tell.", second, "EMPTY", "text", "negative", other])
        if name == "latent":
            rows[1][4] = "hard negative"
        pq.write_table(table_of(rows), folder / f"{name}.parquet")
    steering = [
        (c, str(c), i, f, OPENING, OPENING) for c in (0, 1) for i in (0, 1) for f in FACTORS
    ]
    names = ("concept_id", "input_concept", "input_id", "factor", "original_prompt", "input")
    columns = {name: [row[i] for row in steering] for i, name in enumerate(names)}
    pq.write_table(pa.table(columns), folder / "steering.parquet")
    return folder


def words(output):
    """Return an error without its frame."""
    return " ".join(output.replace("│", " ").split())


def run(axbench, *args):
    return CliRunner().invoke(axbench.app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def detected(axbench, folder):
    args = ("detect", folder / "train.parquet", folder / "latent.parquet", folder / "out")
    result = run(axbench, *args, "--model", "tiny_gpt2")
    assert result.exit_code == 0, result.output
    again = run(axbench, *args, "--model", "tiny_gpt2")
    assert again.exit_code == 2
    assert "is there already" in words(again.output)
    return folder / "out"


@pytest.mark.slow
def test_block_0_may_be_chosen(axbench, folder, tmp_path):
    args = ("detect", folder / "train.parquet", folder / "latent.parquet", tmp_path / "out")
    result = run(axbench, *args, "--model", "tiny_gpt2", "--block", "0")
    assert result.exit_code == 0, result.output
    vector = bs.ControlVector.load(tmp_path / "out" / "vectors" / "0.safetensors")
    assert list(vector.directions) == [0]


@pytest.mark.slow
def test_detection_is_that_of_plain_numpy_and_scikit_learn(folder, detected):
    table = pq.read_table(detected / "latent_data.parquet").to_pandas()
    lines = [json.loads(line) for line in (detected / "detection.jsonl").read_text().splitlines()]
    assert [line["concept_id"] for line in lines] == [0, 1]
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    for line in lines:
        rows = table[table["concept_id"] == line["concept_id"]]
        vector = bs.ControlVector.load(detected / "vectors" / f"{line['concept_id']}.safetensors")
        [(block, direction)] = vector.directions.items()
        assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-5)
        capturing = bs.operate(lm.backbone, [bs.Capture(f"blocks.{block}")])
        for row in rows.head(3).itertuples():
            inputs = lm.preprocessor.generate_preprocess([row.output])
            inputs = {
                k: np.asarray(x)[:, : int(np.sum(inputs["padding_mask"]))]
                for k, x in inputs.items()
            }
            hidden = np.asarray(capturing(inputs)["captures"][f"blocks.{block}"])[0]
            wanted = (hidden[1:] @ direction).max()
            assert row.BackboneSurgery_max_act == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        score = roc_auc_score(rows["category"] == "positive", rows["BackboneSurgery_max_act"])
        received = line["results"]["AUCROCEvaluator"]["BackboneSurgery"]["roc_auc"]
        assert received == pytest.approx(score)
        assert received > 0.7


@pytest.mark.slow
def test_each_factor_is_steered_as_a_row_of_its_own(axbench, folder, detected):
    args = ("steer", folder / "steering.parquet", detected, "--model", "tiny_gpt2")
    result = run(axbench, *args, "--max-new-tokens", "12", "--temperature", "0")
    assert result.exit_code == 0, result.output
    table = pq.read_table(detected / "steering_data.parquet").to_pandas()
    latent = pq.read_table(detected / "latent_data.parquet").to_pandas()
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    for concept in (0, 1):
        vector = bs.ControlVector.load(detected / "vectors" / f"{concept}.safetensors")
        edited = bs.CachedCausalLM(
            bs.operate(lm.backbone, [bs.Steer("x", vector)]), lm.preprocessor
        )
        edited.compile(sampler="greedy")
        most = latent[latent["concept_id"] == concept]["BackboneSurgery_max_act"].max()
        most = most if most > 0 else 50.0
        for row in table[table["concept_id"] == concept].itertuples():
            assert row.BackboneSurgery_strength == pytest.approx(row.factor * most, rel=1e-5)
            controls = {"x": row.BackboneSurgery_strength}
            options = {"max_new_tokens": 12, "strip_prompt": True}
            wanted = edited.generate(row.input, controls=controls, **options)
            assert row.BackboneSurgery_steered_generation == wanted
            assert row.BackboneSurgery_perplexity > 1
        unsteered = table[(table["concept_id"] == concept) & (table["factor"] == 0)]
        plain = lm.generate(OPENING, max_new_tokens=12, strip_prompt=True)
        assert set(unsteered["BackboneSurgery_steered_generation"]) == {plain}


def test_files_of_another_form_are_refused(axbench, folder, tmp_path):
    out, wrong = tmp_path / "out", tmp_path / "wrong.parquet"
    pq.write_table(pa.table({"text": ["a"]}), wrong)
    result = run(axbench, "detect", wrong, folder / "latent.parquet", out, "--model", "tiny_gpt2")
    assert result.exit_code == 2
    assert "Missing are input, output, category, concept_id" in words(result.output)
    result = run(axbench, "steer", tmp_path / "none", out, "--model", "tiny_gpt2")
    assert "expected a Parquet file" in words(result.output)
    table = pq.read_table(folder / "train.parquet")
    pq.write_table(table.filter(pa.compute.equal(table["category"], "positive")), wrong)
    result = run(axbench, "detect", wrong, folder / "latent.parquet", out, "--model", "tiny_gpt2")
    assert "two positive and two negative rows" in words(result.output)
    assert not out.exists()
