"""Run on eight fake devices: texts on meshes, compared with those of one device.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.meshes.on_devices texts gpt2
"""

import contextlib
import itertools
import json
import math
import re
import sys
import tempfile
import threading
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.experimental import multihost_utils
from keras import distribution

import backbone_surgery as bs
from backbone_surgery import hosts
from backbone_surgery.generation.request import read_request
from backbone_surgery.generation.run_batch import run_batch
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.tuning.learning import learn
from backbone_surgery.tuning.preferences import prefer
from tests.families import ROWS
from tests.helpers import ragged, relative
from tests.meshes.hlo import exchanged

MESHES = ((2, 4), (1, 8), (8, 1))
SAMPLERS = {
    "greedy": "greedy",
    "top_p": keras_hub.samplers.TopPSampler(p=0.9),
    "beam": keras_hub.samplers.BeamSampler(num_beams=2),
}
OPTIONS = {"max_new_tokens": 9, "stop_token_ids": None}
TOOL_CASES = [(4, "greedy"), (3, "greedy"), (4, "top_p"), (3, "beam")]
PAIRS = [([1, 2, 3], [4, 5]), ([6, 7, 8, 9], [10, 11, 12])]


@contextlib.contextmanager
def on(mesh, backbone, axes=("batch", "model"), more=()):
    """Have weights lie on a mesh of this shape; on one device if it is `None`.

    Args:
        mesh: the shape.
        backbone: laid out by `layout_map`.
        axes: names of the axes of the mesh; one of them is `model`.
        more: pairs of a path and a layout, that the map names too.
    """
    if mesh is None:
        yield
        return
    devices = distribution.list_devices()[: math.prod(mesh)]
    devices = distribution.DeviceMesh(mesh, list(axes), devices)
    layout = bs.layout_map(backbone, devices)
    for path, split in more:
        layout[path] = distribution.TensorLayout(split, devices)
    # Names count up; and it would drop the distribution, once that is set.
    keras.utils.clear_session(free_memory=False)
    rows = next((axis for axis in axes if axis != "model"), None)
    parallel = distribution.ModelParallel(layout_map=layout, batch_dim_name=rows)
    distribution.set_distribution(parallel)
    try:
        yield
    finally:
        distribution.set_distribution(None)


def make_edited(backbone):
    """Edit a backbone in all ways that bring arrays along."""
    rng = np.random.default_rng(5)
    size = bs.open_backbone(backbone).token_embedding.output_dim
    direction, vector = rng.normal(size=(2, size)).astype("float32")
    model = bs.operate(
        backbone,
        [
            bs.Condition("asked", direction, threshold=0.2, at="blocks.0"),
            bs.Steer("mood", {1: vector}, when="asked", strength=1.0),
            bs.LowRank("blocks.1.query", rank=2),
            bs.Capture("blocks.*"),
        ],
    )
    for variable in model.trainable_variables:
        if "low_rank" in variable.path:
            variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


def prompts(rows):
    rng = np.random.default_rng(6)
    return ragged(rng, rng.integers(2, 8, rows), 8)


def texts(lm, rows, sampler):
    """Generate with a seed and a strength for each row."""
    lm.compile(sampler=SAMPLERS[sampler])
    options = {**OPTIONS, "seed": list(range(rows)), "controls": {"mood": np.linspace(-1, 2, rows)}}
    text, captures = lm.generate(prompts(rows), return_captures=True, **options)
    return text["token_ids"], captures.values


def check_texts(name):
    """Compare the texts and captures of a family on every mesh with those of one device."""
    cases = [(3, "greedy"), (4, "greedy"), (1, "greedy"), (3, "top_p"), (3, "beam")]
    wanted = {}
    for mesh in (None, *MESHES):
        keras.utils.clear_session(free_memory=False)
        with on(mesh, ROWS[name].make(num_layers=3)):
            lm = bs.CachedCausalLM(make_edited(ROWS[name].make(num_layers=3)))
            for case in cases if mesh in (None, MESHES[0]) else cases[:2]:
                ids, captures = texts(lm, *case)
                if mesh is None:
                    wanted[case] = ids, captures
                    continue
                np.testing.assert_array_equal(ids, wanted[case][0], err_msg=f"{mesh} {case}")
                for path, value in captures.items():
                    assert relative(value, wanted[case][1][path]) <= 1e-4, path
            specs = {str(v.value.sharding.spec) for v in lm.backbone.variables if mesh}
            assert mesh is None or any("model" in spec for spec in specs)
        if mesh == MESHES[0]:
            bs.check(lm.opened)
    print("equal")


def make_divisible(name="gpt2", dtype="float32", **others):
    """Make a model of three blocks, all of whose axes divide by the devices, but for others given.

    Inner units of GPT-OSS are as many as its features, as in the released models.
    """
    inner = 64 if name == "gpt_oss" else 128
    sizes = {"vocabulary_size": 64, "num_layers": 3, "hidden_dim": 64, "intermediate_dim": inner}
    if name == "qwen2_moe":
        sizes |= {"moe_intermediate_dim": 32, "shared_expert_intermediate_dim": 96}
    if name == "gemma4":  # as many keys and values as queries, in all blocks
        sizes |= {"num_global_key_value_heads": 8}
    if name == "qwen3_5":
        sizes |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    if name == "gemma3n":
        sizes |= {"text_hidden_size": sizes.pop("hidden_dim"), "vocab_size_per_layer_input": 64}
        sizes |= {"intermediate_size": [sizes.pop("intermediate_dim")] * 3}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    elif name == "gpt2":
        heads = {"num_heads": 8}
    elif name == "rwkv7":
        heads = {"hidden_size": sizes.pop("hidden_dim"), "head_size": 8}
    else:
        heads = {"num_query_heads": 8, "num_key_value_heads": 8}
    return ROWS[name].make(**{**sizes, **heads, "dtype": dtype, **others})


def check_placement(name):
    """Count what is exchanged for a token, and where caches lie, whatever the scope and thread."""
    keras.utils.clear_session(free_memory=False)
    with on((2, 4), make_divisible(name)):
        lm = bs.CachedCausalLM(make_divisible(name))
        lm.compile(sampler="greedy")
        states = bs.new_cache(lm.backbone_with_cache, 4, 16)
        # The first of RWKV-7 is the token before, which every device has.
        first = states[1 if name == "rwkv7" else 0]
        lm.generate(prompts(4), **OPTIONS)
        inside = dict(lm.programs.compilations)
        lm.generate(prompts(4), **OPTIONS)
        lm.predict(prompts(4), verbose=0)  # it writes the shardings of the weights another way
        lm.generate(prompts(4), **OPTIONS)
    for x in first.values():
        assert x.addressable_shards[0].data.nbytes * 8 == x.nbytes, x.sharding
    thread = threading.Thread(target=lambda: lm.generate(prompts(4), **OPTIONS))
    thread.start()
    thread.join()
    lm.generate(prompts(4), **OPTIONS)
    assert lm.programs.compilations == inside, (inside, lm.programs.compilations)
    step, test, rest = exchanged(lm.programs.compiled("decode")[-1].as_text())
    # Two a block, one for the embedding, two for the choice.
    # Two blocks of three have channels of queries, keys and values side by side.
    channels = {"all-gather": 2} if name == "qwen3_5" else {}
    # One MLP of Gemma 3n compares each unit with the mean and the deviation of all.
    within = 2 if name == "gemma3n" else 0
    assert step == {"all-reduce": 2 * 3 + 3 + within, **channels}, step
    assert test == {"all-reduce": 1}, test
    assert rest == {"all-gather": 2}, rest  # the tokens and flags that the host reads
    paper = bs.plan(lm.backbone, {"batch": 2, "model": 4}, batch=4, length=16)
    # XLA sums what the mixture and the expert beside it give in one go, and what is looked up in
    # two tables.
    beside = {"qwen2_moe": 3, "gemma4": 1, "gemma3n": 1}.get(name, 0)
    assert paper.collectives == {"all-reduce": step["all-reduce"] + 1 + beside, **channels}
    shards = [v.value.addressable_shards[0].data.nbytes for v in lm.backbone.weights]
    assert paper.weight_bytes == sum(shards)
    cache = bs.new_cache(lm.backbone_with_cache, paper.rows, paper.slots)
    states = [x.addressable_shards[0].data.nbytes for entry in cache for x in entry.values()]
    assert paper.cache_bytes == sum(states)


def formatted(lm):
    """Return texts of response formats, as characters, of a task whose tokens are letters."""
    letters = {chr(ord("0") + i): i for i in range(62)} | {"01": 62, "<|endoftext|>": 63}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=letters, merges=["0 1"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=24)
    task = bs.CachedCausalLM(lm.opened, preprocessor)
    wanted = [bs.ResponseFormat("[a-e]{4,9}"), None, bs.ResponseFormat("([AB][CD])+;")]
    arrays, options = {}, {**OPTIONS, "strip_prompt": True, "response_format": wanted}
    for sampler in ("greedy", "beam", "top_p"):
        task.compile(sampler=SAMPLERS[sampler])
        texts = task.generate(prompts(3), seed=4, **options)
        assert re.fullmatch("[a-e]{4,9}", texts[0])
        assert re.fullmatch("([AB][CD])+(;|[AB])?", texts[2])
        arrays[f"ids in formats {sampler}"] = np.array([list(t.ljust(24).encode()) for t in texts])
        if sampler == "greedy" and not hosts.span(task):
            engine = bs.Engine(task, rows=4, length=48, chunk_size=4)
            assert engine.generate(prompts(3), **options) == texts
    return arrays


def tools(folder):
    """Return what each tool gives: generation, analysis, vectors, recipes, transfer."""
    backbone = make_divisible()
    lm = bs.CachedCausalLM(make_edited(backbone))
    arrays = {}
    for rows, sampler in TOOL_CASES:
        ids, captures = texts(lm, rows, sampler)
        arrays[f"ids {rows} {sampler}"] = ids
        arrays |= {f"{path} {rows} {sampler}": value for path, value in captures.items()}
    penalties = bs.Penalties(1.3, presence=0.4, frequency=0.3, bias={5: 2.0, 7: -100})
    lm.compile(sampler="top_p")
    ids = lm.generate(prompts(3), penalties=penalties, seed=4, **OPTIONS)["token_ids"]
    arrays["ids with penalties"] = ids
    arrays |= formatted(lm)
    bs.check(lm.opened)
    vector = bs.ControlVector.train(lm, PAIRS, "mean_diff", verbose=0)
    vector.save(folder / "vector.safetensors")
    saved = bs.ControlVector.load(folder / "vector.safetensors", lm=lm)
    arrays |= {f"vector {block}": x for block, x in saved.directions.items()}
    grid = bs.patch_grid(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6))
    arrays |= {"patch_grid": grid.values, "logit_lens": bs.logit_lens(lm, [1, 2, 3]).entropies}
    arrays["attribution"] = bs.attribution(lm, [1, 2, 3], target=7).values
    neurons = {"at": "blocks.*.mlp_hidden", "by_feature": True, "corrupted": [1, 4, 3]}
    arrays["neurons"] = bs.attribution(lm, [1, 2, 3], (5, 6), **neurons).values
    edges = bs.edge_attribution(lm, [1, 2, 3], [1, 4, 3], (5, 6), by_head=True, steps=2)
    arrays["edge_attribution"] = np.nan_to_num(edges.values)
    patched = bs.edge_patching(lm, [1, 2, 3], [1, 4, 3], (5, 6), "blocks.*.*_output")
    arrays["edge_patching"] = np.nan_to_num(patched.values)
    circuits = bs.faithfulness(lm, [1, 2, 3], [1, 4, 3], (5, 6), edges, (0, 20, 50))
    arrays["faithfulness"] = circuits.values
    arrays["direct"] = bs.direct_logit_attribution(lm, [1, 2, 3], 7, by_head=True).values
    arrays["weights"] = bs.weight_tree(lm)["blocks"]["1"]["self_attention"]["query"]["kernel"]
    bs.save_recipe(lm, folder / "edit.recipe")
    again = bs.CachedCausalLM(bs.load_recipe(folder / "edit.recipe", backbone))
    arrays["ids of the recipe"], _ = texts(again, 4, "greedy")
    lines = [{"prompt": list(range(1, n)), "strength": n / 3} for n in range(3, 10)]
    if jax.process_index() == 0:
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    multihost_utils.sync_global_devices("the data set is there")
    placement = lm.programs.placement
    output = folder / f"{jax.process_count()} {placement and placement.mesh.devices.shape}"
    options = {"shard_rows": 3, "batch_size": 2, "verbose": 0, "controls": {"mood": "strength"}}
    paths = bs.generate_dataset(lm, folder / "in.jsonl", output, **options, **OPTIONS)
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    arrays["ids of the data set"] = np.array([row["generated"] for row in rows])
    other = make_divisible()
    for variable in other.trainable_variables:
        variable.assign(np.zeros(variable.shape, "float32"))
    assert not bs.transfer_weights(other, backbone).differences
    arrays["digest"] = np.array(bs.weights_digest(other) == bs.weights_digest(backbone))
    return arrays


def compare(got, wanted):
    """Compare arrays by name: tokens and weights as they are, the rest by size."""
    assert set(got) == set(wanted)
    for name in wanted:
        if name.startswith("ids") or name in ("weights", "digest"):
            np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)
        else:
            assert relative(got[name], wanted[name]) <= 1e-4, name


def check_tools():
    """What analyses, trains, saves and copies gives what it gives on one device."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = tools(Path(folder))
        for mesh in ((2, 4), (1, 8)):
            keras.utils.clear_session(free_memory=False)
            with on(mesh, make_divisible()):
                compare(tools(Path(folder)), wanted)
        assert wanted["digest"]
    print("equal")


def make_variant(kind):
    """Make a backbone in half precision, quantised, or with LoRA factors that are not zero."""
    backbone = make_divisible(dtype="bfloat16" if kind == "bfloat16" else "float32")
    if kind == "int8":
        backbone.quantize("int8")
    if kind == "lora":
        backbone.enable_lora(2)
        rng = np.random.default_rng(8)
        for variable in backbone.trainable_variables:
            if "lora" in variable.path:
                variable.assign(rng.normal(0, 0.1, variable.shape))
    return backbone


def check_variants():
    """Half precision, int8, LoRA and streams agree with one device."""
    tolerances = {"float32": 1e-4, "lora": 1e-4, "int8": 1e-2, "bfloat16": 3e-2}
    for kind, tolerance in tolerances.items():
        results = []
        for mesh in (None, (2, 4), (1, 8)):
            keras.utils.clear_session(free_memory=False)
            with on(mesh, make_divisible()):
                lm = bs.CachedCausalLM(bs.operate(make_variant(kind), [bs.Capture("blocks.*")]))
                lm.compile(sampler="greedy")
                bs.check(lm.opened)
                ids, captures = lm.generate(prompts(4), return_captures=True, **OPTIONS)
                results.append((ids["token_ids"], captures.values))
            widths = [len(row) for row in streamed(lm, mesh)]
            assert widths == [9] * 4
        for ids, values in results[1:]:
            if kind in ("float32", "lora"):
                np.testing.assert_array_equal(ids, results[0][0])
            prompt = slice(0, 8)  # what follows may be another token, where rounding is coarse
            for path, value in values.items():
                error = relative(value[:, prompt], results[0][1][path][:, prompt])
                assert error <= tolerance, (kind, path, error)
    print("equal")


def streamed(lm, mesh):
    """Return the tokens of a generation in chunks, which must be those of one in a piece."""
    whole = lm.generate(prompts(4), strip_prompt=True, **OPTIONS)["token_ids"][:, :9]
    compiled = dict(lm.programs.compilations)
    request = read_request(lm, prompts(4), **OPTIONS)
    *_, rows = run_batch(lm.programs, make_strategy(lm.sampler), request.batch, 4)
    np.testing.assert_array_equal(np.stack([row.new for row in rows]), whole, err_msg=str(mesh))
    assert lm.programs.compilations == compiled, mesh
    return [row.new for row in rows]


def noted(lm):
    """Return the log-probabilities of some prompts, whose last chunks are of several lengths."""
    engine = bs.Engine(lm, rows=4, length=48, prefill_chunk=4)
    inputs = prompts(5)
    rows = [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(5)]
    options = {"stop_token_ids": None, "prompt_logprobs": True}
    requests = [engine.submit(row, i % 3, **options) for i, row in enumerate(rows)]
    return [request.prompt_logprobs.logprobs for request in requests]


def check_engine():
    """An engine on a mesh gives what `generate` gives on one device."""
    backbone = make_divisible()
    alone = bs.CachedCausalLM(backbone)
    alone.compile(sampler="greedy")
    wanted = alone.generate(prompts(7), **OPTIONS)
    wanted = [
        ids[mask] for ids, mask in zip(wanted["token_ids"], wanted["padding_mask"], strict=True)
    ]
    logprobs = noted(alone)
    keras.utils.clear_session(free_memory=False)
    with on((2, 4), backbone):
        lm = bs.CachedCausalLM(make_divisible())
        lm.compile(sampler="greedy")
        engine = bs.Engine(lm, rows=4, length=48, prefill_chunk=8, chunk_size=4)
        engine.warm_up(prompt_logprobs=True)
        compiled = engine.stats.compilations
        got = engine.generate(prompts(7), **OPTIONS)
        one = {name: x[:1] for name, x in prompts(7).items()}
        engine.submit(one, prompt_logprobs=True, **OPTIONS).result()
        assert engine.stats.compilations == compiled
        shared = noted(lm)
    for ids, text in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(text, ids.astype("int32"))
    for one, other in zip(logprobs, shared, strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5)
    print("equal")


def check_learning():
    """What an edit learns is the same, however many devices share each row.

    A step takes 16 texts, and 18 where three devices share them.
    """
    for train in (learn, prefer):
        found = {}
        for mesh in (None, (2, 4), (3, 1), (3, 2)):
            keras.utils.clear_session(free_memory=False)
            with on(mesh, make_divisible()):
                lm = bs.CachedCausalLM(make_divisible())
                steer = bs.Steer("mood", {1: np.zeros(64)}, trainable=True)
                edited = bs.operate(lm.backbone, [steer])
                train(lm, edited, PAIRS, {"mood_strength": np.ones((1, 1), "float32")}, steps=3)
                (layer,) = edited.trained_layers
                found[mesh] = [np.asarray(v) for v in layer.trainable_variables]
        for one, other in ((None, (2, 4)), ((3, 1), (3, 2))):
            for wanted, got in zip(found[one], found[other], strict=True):
                assert wanted.any()
                assert relative(got, wanted) <= 1e-4
    print("equal")


def check_fitting():
    """A `fit` in int8 or int4 is that of one device; a batch they can't share is told in words."""
    ids = np.random.default_rng(4).integers(1, 60, (7, 8))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    found = {"int8": [], "int4": []}
    for mode, mesh in itertools.product(found, (None, (2, 4))):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        with on(mesh, make_divisible()):
            edit = bs.LowRank("blocks.*.value", rank=2)
            lm = bs.CachedCausalLM(bs.operate(make_divisible(), [edit]))
            lm.quantize(mode)
            lm.compile(optimizer=keras.optimizers.SGD(0.1))
            if mesh is not None:
                for run in (lm.fit, lm.evaluate):
                    with pytest.raises(bs.SurgeryError, match="the devices of the mesh can share"):
                        run(inputs, ids, batch_size=7, verbose=0)
            six = {name: value[:6] for name, value in inputs.items()}
            options = {"batch_size": 2, "shuffle": False, "verbose": 0}
            history = lm.fit(six, np.roll(ids[:6], -1, 1), **options).history
            found[mode].append((history["loss"], lm.generate(prompts(3), **OPTIONS)["token_ids"]))
    for (loss, texts), (got, own) in found.values():
        np.testing.assert_allclose(got, loss, rtol=1e-3)
        np.testing.assert_array_equal(own, texts)
    print("equal")


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    kind, *names = sys.argv[1:]
    checks = {
        "texts": check_texts,
        "placement": check_placement,
        "engine": check_engine,
        "learning": check_learning,
        "fitting": check_fitting,
        "tools": check_tools,
        "variants": check_variants,
    }
    checks[kind](*names)
