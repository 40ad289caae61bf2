"""Meshes of devices: what is generated on eight fake ones is what one gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import keras_hub
import pytest
from typer.testing import CliRunner

import backbone_surgery as bs
from backbone_surgery.cli import app
from backbone_surgery.cli.options import parse_mesh
from backbone_surgery.meshes.layout_map import splits
from backbone_surgery.opening import family
from tests.families import ROWS
from tests.opening.test_family import OwnBlock, make_own, open_own

ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count=8"
slow = pytest.mark.slow


def run(*arguments):
    """Run Python with eight devices, and return what it prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
    command = [sys.executable, "-W", "ignore", *arguments]
    env = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.PIPE).stdout


@slow
@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", "gemma3n", "llama", "gpt_oss", "qwen3_5", "rwkv7"]
)
def test_texts_and_captures_are_those_of_one_device(name):
    run("-m", "tests.meshes.on_devices", "texts", name)


@slow
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gemma", "gemma3n", "gemma4", "llama", "qwen3"),
        *("mixtral", "gpt_oss", "qwen2_moe", "qwen3_5", "rwkv7"),
    ],
)
def test_what_is_exchanged_and_where_caches_lie(name):
    run("-m", "tests.meshes.on_devices", "placement", name)


@slow
def test_where_rows_weights_and_caches_lie():
    run("-m", "tests.meshes.on_layouts")


@slow
def test_what_is_packed_and_attended_to_is_shared():
    run("-m", "tests.meshes.on_shares")


@slow
@pytest.mark.parametrize("kind", ["engine", "learning", "fitting", "tools", "variants"])
def test_on_a_mesh(kind):
    run("-m", "tests.meshes.on_devices", kind)


COMMAND = ["-c", "from backbone_surgery.cli import app; app()"]
MESH = ["--mesh", "batch=2,model=4"]


@slow
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "Once upon a time", "--max-new-tokens", "20", "--control", "mood=1"],
        ["steer", "Once", "--vector", "mood", "--strengths=-1,0,1", "--max-new-tokens", "12"],
    ],
)
def test_the_command_line_gives_the_same_text_on_a_mesh(words):
    assert run(*COMMAND, *words, *MESH) == run(*COMMAND, *words) != b""


@slow
def test_a_data_set_gets_the_same_texts_on_a_mesh(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once upon a time"}\n{"prompt": "Tom"}\n')
    words = ["batch", tmp_path / "in.jsonl", "--max-new-tokens", "12"]
    for name, mesh in (("one", []), ("mesh", MESH)):
        run(*COMMAND, *words[:2], tmp_path / name, *words[2:], *mesh)
    one, mesh = ((tmp_path / name / "in-00000.jsonl").read_text() for name in ("one", "mesh"))
    assert one == mesh
    assert "generated" in one


@slow
def test_what_is_done_with_families_is_what_one_device_gives():
    """Some of what `python -m tests.meshes.matrix` compares."""
    run("-m", "tests.meshes.matrix", "gemma2", "qwen3", "--edits", "low_rank", "cut", "bfloat16")


@pytest.mark.parametrize(
    "text", ["", "2", "batch", "batch=0", "batch=x", "rows=2", "batch=2,,", "batch=2,batch=4"]
)
def test_bad_sizes_of_a_mesh_are_refused(text):
    with pytest.raises(bs.SurgeryError, match="such as batch=2,model=4"):
        parse_mesh(text)


def test_more_devices_than_there_are_are_refused():
    answer = CliRunner().invoke(app, ["generate", "Once", "--mesh", "model=1024"])
    assert answer.exit_code != 0
    assert "expected at most" in answer.output


def one_device_mesh():
    return keras.distribution.DeviceMesh((1, 1), ["batch", "model"])


@pytest.mark.parametrize("name", list(ROWS))
def test_a_block_of_every_family_is_shared(name):
    """Queries and what follows them, and the MLP or the experts; what is split has the axis."""
    backbone = ROWS[name].make()
    layout = bs.layout_map(backbone, one_device_mesh())
    laid_out = {v.path: layout[v.path] for v in backbone.variables if layout[v.path]}
    assert len(laid_out) == len(layout)
    for variable in backbone.variables:
        entry = laid_out.get(variable.path)
        assert entry is None or len(entry.axes) == len(variable.shape)
        assert entry is None or entry.axes.count("model") == 1
    # The numbers in the names of the next one may be others.
    following = [layout[v.path] for v in ROWS[name].make().variables]
    assert following == [layout[v.path] for v in backbone.variables]
    edited = bs.operate(backbone, [bs.LowRank("blocks.*.query", rank=2), bs.Capture("blocks.*")])
    again = bs.layout_map(edited, one_device_mesh())
    assert {k: v.axes for k, v in again.items()} == {k: v.axes for k, v in layout.items()}
    for split in splits(backbone):
        size = split.variable.shape[split.axis]
        assert size == split.units or (size % split.units == 0 and len(split.variable.shape) == 2)
    # RWKV-7 has narrow matrices too, which are no layers.
    names = ("kernel", "embeddings", "reverse_embeddings")
    kernels = [v for v in backbone.variables if len(v.shape) > 2 or v.name in names]
    least = len(kernels) / (3 if name == "gemma3n" else 2)  # what mixes its streams is small
    assert sum(v.path in laid_out for v in kernels) >= least


class MLP2D(keras.layers.Layer):
    """Keras calls it `mlp2d`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(32, name="up.1")
        self.down = keras.layers.Dense(16, name="down (back)")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))

    def call(self, x):
        return self.down(keras.ops.relu(self.up(x)))


class BlockWithMLP(OwnBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mlp = MLP2D()

    def call(self, stream, keep):
        return self.mlp(super().call(stream, keep))


def open_with_mlp(block, hidden_states, padding_mask, positions):
    x = open_own(block, hidden_states, padding_mask, positions)
    x = bs.Site("mlp_hidden")(keras.layers.ReLU(name="activation")(block.mlp.up(x)))
    return bs.Site("mlp_output")(block.mlp.down(x))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("name", ["block_{}", "block({}", "block[{}]", "a.b+{}?"])
def test_a_layout_fits_the_next_backbone_whatever_its_layers_are_called(monkeypatch, name):
    monkeypatch.setattr(family, "_families", dict(family._families))
    bs.register_family(bs.Family("mlp", BlockWithMLP, open_with_mlp, "stream", "keep"))
    layout = bs.layout_map(make_own(BlockWithMLP, name), one_device_mesh())
    following = {v.path: layout[v.path] for v in make_own(BlockWithMLP, name).variables}
    ends = ("query/kernel", "key/kernel", "value/kernel", "(back)/kernel", "up.1/kernel", "1/bias")
    ends += ("token_embedding/embeddings",)
    assert {path for path, entry in following.items() if entry} == {
        path for path in following if path.endswith(ends)
    }


class TwoDense(BlockWithMLP):
    """Its MLP has two layers without a name, side by side."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mlp.up, self.mlp.down = keras.layers.Dense(32), keras.layers.Dense(16)


@keras.saving.register_keras_serializable("tests")
class TwoDenseBackbone(keras_hub.models.Backbone):
    def __init__(self, dtype=None, **kwargs):
        own = make_own(TwoDense)
        super().__init__(own.input, own.output, dtype=dtype, **kwargs)


@pytest.mark.slow
def test_a_layout_of_a_preset_fits_the_next_one_that_is_made_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(family, "_families", dict(family._families))
    bs.register_family(bs.Family("two", TwoDense, open_with_mlp, "stream", "keep"))
    TwoDenseBackbone().save_to_preset(tmp_path)
    layout = bs.layout_map(str(tmp_path), one_device_mesh())
    backbone = keras_hub.models.Backbone.from_preset(str(tmp_path))
    meant = {split.variable.path for split in splits(backbone)}
    assert sum("dense" in path for path in meant) == 6
    assert {v.path for v in backbone.variables if layout[v.path]} == meant


@pytest.mark.parametrize(
    ("name", "sizes", "axes"),
    [
        ("mixtral", {"intermediate_dim": 32}, (2, 2, 1)),
        ("gpt_oss", {"intermediate_dim": 32}, (2, 1)),
        ("gpt_oss", {"intermediate_dim": 16}, (2, 1)),
        ("qwen2_moe", {"moe_intermediate_dim": 16}, (0, 0)),
        ("qwen3_moe", {"moe_intermediate_dim": 32}, (0, 0)),
        ("qwen3_5_moe", {"moe_intermediate_dim": 16}, (0, 0)),
        ("gemma4", {"enable_moe_block": True, "num_experts": 4, "num_experts_per_token": 2,
                    "expert_intermediate_dim": 32, "hidden_size_per_layer_input": 0}, (2, 2, 1)),
    ],
)  # fmt: skip
def test_experts_are_shared_by_what_their_kernels_are_for(name, sizes, axes):
    """Whatever their sizes: those of features may be those of inner units, or of two of them."""
    found = [s for s in splits(ROWS[name].make(**sizes)) if len(s.variable.shape) == 3]
    banks = [s for s in found if "expert" in s.variable.path]
    assert tuple(s.axis for s in banks[: len(axes)]) == axes
    assert [s.summed for s in banks[: len(axes)]] == [False] * (len(axes) - 1) + [True]


@slow
def test_a_preset_takes_no_memory_and_has_the_same_layout():
    layout = bs.layout_map("tiny_gpt2", one_device_mesh())
    backbone = bs.CachedCausalLM.from_preset("tiny_gpt2").backbone
    own = bs.layout_map(backbone, one_device_mesh())
    assert {k: v.axes for k, v in layout.items()} == {k: v.axes for k, v in own.items()}


@pytest.mark.parametrize(
    ("mesh", "model", "words"),
    [
        ("batch=2", "model", "expected a `keras.distribution.DeviceMesh`"),
        (None, "modle", "Did you mean 'model'"),
    ],
)
def test_bad_meshes_are_refused(mesh, model, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.layout_map("tiny_gpt2", mesh or one_device_mesh(), model)


@slow
def test_weights_go_to_their_shards_and_no_device_holds_one_whole(tmp_path):
    """From one file, from many, into a model that is there, copied, and as Hugging Face saves."""
    lines = run("-m", "tests.meshes.on_loading", str(tmp_path)).decode().splitlines()
    kinds = [json.loads(line) for line in lines if line.startswith("[")]
    assert [kind for kind, *_ in kinds] == ["one", "many", "load_weights", "transfer", "hf"]
    for kind, total, largest, own, most, looks, whole in kinds:
        assert looks > 10, kind
        assert whole == [], kind
        assert own < 0.3 * total
        # The shards that are replaced, and those of one array on its way.
        assert most <= own + largest, (kind, own, most)
