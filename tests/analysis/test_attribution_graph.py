"""Edges of an attribution graph equal runs in NumPy without the sender, all else held fast."""

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph as graph_of
from backbone_surgery.rewriting.autoencoder_layers import Encoder
from tests import numpy_models
from tests.compilations import counted
from tests.families import ROWS
from tests.helpers import make_gpt2, relative
from tests.transcoders import (
    arrays,
    encode,
    save_circuit_tracer,
    save_gemma_scope,
    save_gemma_scope_2,
)

IDS = np.array([5, 9, 2, 30, 4, 17])
PAIR = (3, 21)
LATENTS, BLOCKS = 24, 3


class Held:
    """Norms that keep the scale of their first run."""

    def __init__(self, monkeypatch):
        self.scales, self.next = [], None
        for name in ("layer_norm", "rms_norm"):
            norm = getattr(numpy_models, name)
            monkeypatch.setattr(numpy_models, name, lambda *a, norm=norm: self.run(norm, *a))

    def run(self, norm, layer, x):
        if self.next is None:
            self.scales.append(x)
            return norm(layer, x)
        first = self.scales[self.next]
        self.next += 1
        bias = numpy_models.weights_of(layer)[1] if norm.__name__ == "layer_norm" else 0
        one = norm(layer, first) - bias  # linear in x, once the scale is that of `first`
        if norm.__name__ == "layer_norm":
            first, x = (t - t.mean(-1, keepdims=True) for t in (first, x))
        return x * np.divide(one, first, out=np.zeros_like(one), where=first != 0) + bias


class InNumpy:
    """A model of transcoders in NumPy, attention and norms held fast from the second run on."""

    def __init__(self, backbone, weights, roles, error, monkeypatch):
        self.weights, self.roles, self.error = weights, roles, error
        self.held = Held(monkeypatch)
        self.model = numpy_models.Model(backbone)
        self.epsilon = backbone.layer_norm.epsilon
        self.kept, self.without, self.scores = {}, None, {}
        for i, block in enumerate(self.model.blocks):
            block.at("attention_pattern", lambda x, _, i=i: self.keep(f"pattern {i}", x))
            block.at(roles[i], lambda x, _, i=i: self.read(i, x))
            block.at("mlp_output", lambda x, _, i=i: self.written(i, x))
        embedding = numpy_models.weights_of(backbone.token_embedding)[0]
        self.direction = embedding[PAIR[0]] - embedding[PAIR[1]]

    def keep(self, name, x):
        return self.kept.setdefault(name, x)

    def read(self, i, x):
        self.read_now = s = rms(x, self.epsilon) if self.roles[i] == "residual_mid" else x
        if self.roles[i] == "residual_mid":  # held fast as other norms are
            mean = np.square(x).mean(-1, keepdims=True)
            self.read_now = s = x * self.keep(f"scale {i}", (mean + self.epsilon) ** -0.5)
        w = self.weights[i]
        self.scores[i] = s @ w["W_enc"].astype("float64") + w["b_enc"]
        self.keep(f"features {i}", encode(s, w, "jumprelu"))
        return x

    def written(self, i, x):
        w, s = self.weights[i], self.read_now
        features = self.kept[f"features {i}"]
        first = self.keep(f"read {i}", s)
        made = x if self.error else features @ w["W_dec"] + w["b_dec"] + first @ w["W_skip"]
        self.keep(f"own {i}", made - features @ w["W_dec"] - w["b_dec"] - first @ w["W_skip"])
        own, features = self.kept[f"own {i}"].copy(), features.copy()
        if self.without is not None and self.without[0] == f"blocks.{i}.transcoder_latents":
            features[0, self.without[2], self.without[1]] = 0
        if self.without is not None and self.without[0] == f"blocks.{i}.transcoder_error":
            own[0, self.without[2]] = 0
        return own + features @ w["W_dec"] + w["b_dec"] + s @ w["W_skip"]

    def run(self, without=None):
        """Return the scores of all features and the metric, without a sender."""
        self.without, self.held.next = without, None if not self.held.scales else 0
        first = self.model.blocks[0]
        whole = first.whole
        if without is not None and without[0] == "embeddings":

            def cut(block, x):
                x = x.copy()
                x[0, without[2]] = 0
                return whole(block, x)

            first.whole = cut
        states = self.model(IDS[None])
        first.whole = whole
        return {**self.scores, "logits": states[0, -1] @ self.direction}


def rms(x, epsilon):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon)


def sender(name):
    """Read a name: the path, the feature or nothing, and the token."""
    place, _, token = name.partition(" @ ")
    path, _, feature = place.rstrip("]").partition("[")
    return path, int(feature or -1), int(token)


SUMS = [name for name in ROWS if name != "gemma3n"]
"""Families whose residual stream is the sum of what is written to it."""


def make(
    name, tmp_path, rng, error=True, blocks=range(BLOCKS), save=save_gemma_scope_2, plain=False
):
    backbone = ROWS[name].make(num_layers=BLOCKS)
    size = bs.open_backbone(backbone).token_embedding.output_dim
    weights = {i: arrays(rng, size, LATENTS, size) for i in blocks}
    for w in weights.values():
        w["threshold"] += 1.0
        if plain:
            w["W_skip"] *= 0
            w["b_dec"] *= 0
    rewrites = [
        bs.Transcoder(
            f"blocks.{i}.mlp_output", save(tmp_path / str(i), w, i), name=f"mlp_{i}", error=error
        )
        for i, w in weights.items()
    ]
    return bs.CachedCausalLM(bs.operate(backbone, rewrites)), weights


@pytest.mark.by_default(1)
@pytest.mark.parametrize("error", [True, False], ids=["error", "alone"])
@pytest.mark.parametrize("kind", ["skip", "rms"])
@pytest.mark.parametrize("name", ["gpt2", "gemma", "gemma2"])
def test_edges_equal_numpy(name, kind, error, tmp_path, rng, monkeypatch):
    save = {"skip": save_gemma_scope_2, "rms": save_gemma_scope}[kind]
    lm, weights = make(name, tmp_path, rng, error, save=save)
    if save is save_gemma_scope:
        weights = {i: {**w, "W_skip": 0 * w["W_skip"]} for i, w in weights.items()}
    graph = bs.attribution_graph(lm, IDS, PAIR)
    role = "residual_mid" if save is save_gemma_scope else "mlp_norm"
    model = InNumpy(lm.backbone.owner, weights, [role] * BLOCKS, error, monkeypatch)
    whole = model.run()
    active = {i: np.argwhere(model.kept[f"features {i}"][0]) for i in range(BLOCKS)}
    found = [[i, *cell] for i, cells in active.items() for cell in cells]
    assert graph.features.tolist() == found
    assert len(found) > 10
    assert relative(graph.metric, whole["logits"]) <= 1e-4
    assert all(relative(model.run()[key], value) <= 1e-6 for key, value in whole.items())
    scale = np.abs(graph.values).max()
    for row, name_of in enumerate(graph.senders):
        without = model.run(sender(name_of))
        changes = [(whole[b] - without[b])[0, t, f] for b, t, f in graph.features]
        changes.append(whole["logits"] - without["logits"])
        assert np.abs(graph.values[row] - changes).max() <= 3e-5 * scale, name_of
    scores = [whole[b][0, t, f] for b, t, f in graph.features]
    total = graph.values.sum(axis=0) + graph.rest
    assert relative(total, np.append(scores, whole["logits"])) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_edges_into_logits_are_direct_attributions(name, tmp_path, rng):
    """Of the last block, which acts on the logits by no other way; one MLP has no transcoder."""
    if "blocks.0.mlp_norm" not in bs.sites(ROWS[name].make(num_layers=BLOCKS)):
        pytest.skip("no site of the MLP's input")
    lm, _ = make(name, tmp_path, rng, blocks=(0, BLOCKS - 1), plain=True)
    graph = bs.attribution_graph(lm, IDS, PAIR)
    direct = bs.direct_logit_attribution(lm, IDS, PAIR)
    last = f"blocks.{BLOCKS - 1}.mlp_output"
    into = graph.values[:, -1]
    mine = [name.startswith(f"blocks.{BLOCKS - 1}.transcoder") for name in graph.senders]
    assert sum(mine) > len(IDS)
    wanted = direct.values[direct.sites.index(last)]
    assert abs(into[mine].sum() - wanted) <= 1e-4 * max(abs(wanted), np.abs(into[mine]).max())
    assert np.isclose(graph.metric, direct.metric, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_without_biases_nothing_is_left(name, tmp_path, rng):
    """What features and logits are is a sum of the edges into them, and nothing more."""
    if "blocks.0.mlp_norm" not in bs.sites(ROWS[name].make(num_layers=BLOCKS)):
        pytest.skip("no site of the MLP's input")
    lm, _ = make(name, tmp_path, rng, plain=True)
    for variable in lm.backbone.owner.variables:
        if variable.path.rpartition("/")[2] in ("bias", "beta"):
            variable.assign(0 * variable)
    for layer in {n.operation for n in graph_of.all_nodes(lm.opened)}:
        if isinstance(layer, Encoder):
            layer.bias.assign(0 * layer.bias)
    graph = bs.attribution_graph(lm, IDS, PAIR)
    assert len(graph.features) > 5
    total = graph.values.sum(axis=0) + graph.rest
    assert np.abs(graph.rest).max() <= 1e-4 * np.abs(total).max()


@pytest.mark.slow
def test_features_that_a_rewrite_sets_come_of_nothing(tmp_path, rng):
    lm, _ = make("gpt2", tmp_path, rng)
    clamp = bs.Clamp("blocks.1.transcoder_latents", features=(3,), values=50.0)
    clamped = bs.CachedCausalLM(bs.operate(lm.backbone, [clamp]))
    graph = bs.attribution_graph(clamped, IDS, PAIR)
    is_set = (graph.features[:, 0] == 1) & (graph.features[:, 2] == 3)
    assert is_set.sum() == len(IDS)
    assert (graph.activations[is_set] == 50).all()
    assert not graph.values[:, :-1][:, is_set].any()
    assert graph.values[:, :-1][:, ~is_set].any()
    assert graph.values[: len(graph.features)][is_set].any()
    roots = graph.influence[: len(is_set)][is_set].sum()
    assert roots > 0.01
    assert np.isclose(graph.influence[len(is_set) :].sum() + roots, 1)


@pytest.mark.slow
def test_numbers_past_a_dtype_are_refused(tmp_path, rng):
    backbone = ROWS["gpt2"].make(num_layers=1, dtype="float16")
    w = arrays(rng)
    w["W_dec"] *= 1e5
    path = save_gemma_scope_2(tmp_path, w, 0)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Transcoder("blocks.0.mlp_output", path)]))
    with pytest.raises(bs.SurgeryError, match="attribution_graph: expected finite numbers"):
        bs.attribution_graph(lm, IDS, PAIR)


@pytest.mark.slow
def test_fewer_features_are_those_of_the_greatest_influence(tmp_path, rng):
    lm, _ = make("gpt2", tmp_path, rng)
    whole = bs.attribution_graph(lm, IDS, PAIR)
    few = bs.attribution_graph(lm, IDS, PAIR, max_features=8)
    assert (few.active, len(few.features)) == (len(whole.features), 8)
    assert repr(few).startswith(f"AttributionGraph(8 of {few.active} active features; metric ")
    names = {n: i for i, n in enumerate(whole.senders)}
    columns = [*(names[n] for n in few.receivers[:-1]), -1]
    features = [names[n] for n in few.senders[:8]]
    np.testing.assert_allclose(few.values[:8], whole.values[np.ix_(features, columns)], atol=1e-5)
    np.testing.assert_allclose(few.rest, whole.rest[columns], atol=1e-4)
    for row, name in enumerate(few.senders[8:], 8):
        place, _, token = name.partition(" @ ")
        same = [place.replace("error", f"latents[{f}] @ {token}") for f in range(LATENTS)]
        summed = [names[name], *(names[n] for n in same if n in names and n not in few.senders)]
        wanted = whole.values[summed if place.startswith("blocks") else [names[name]]]
        np.testing.assert_allclose(few.values[row], wanted.sum(axis=0)[columns], atol=1e-4)
    assert few.explained < whole.explained
    best = np.argsort(-np.abs(whole.values[: len(whole.features), -1]))[0]
    assert whole.senders[best] in few.senders


@pytest.mark.slow
def test_influence_and_pruning(tmp_path, rng):
    """Influence is the sum over all ways; the shares of what is no feature add up to 1."""
    lm, _ = make("gpt2", tmp_path, rng)
    graph = bs.attribution_graph(lm, IDS, PAIR)
    count = len(graph.features)
    shares = np.abs(graph.values) / np.abs(graph.values).sum(axis=0)
    square = np.zeros((len(graph.senders) + 1,) * 2)
    square[:-1, :count], square[:-1, -1] = shares[:, :-1], shares[:, -1]
    ways = np.linalg.inv(np.eye(len(square)) - square) - np.eye(len(square))
    np.testing.assert_allclose(graph.influence, ways[:-1, -1], atol=1e-6)
    assert np.isclose(graph.influence[count:].sum(), 1, atol=1e-6)
    assert 0 < graph.explained < 1
    has_influence = np.append(graph.influence[:count] > 1e-6, np.full(len(graph.tokens) * 4, True))
    assert set(np.array(graph.senders)[has_influence]) <= set(graph.pruned(1.0).senders)
    half = graph.pruned(0.5)
    kept = [graph.senders.index(name) for name in half.receivers[:-1]]
    assert graph.influence[kept].sum() >= 0.5 * graph.influence[:count].sum()
    assert len(kept) < count / 2
    np.testing.assert_allclose(half.rest, graph.rest[[*kept, -1]], atol=1e-4)
    total = graph.values.sum(axis=0)[[*kept, -1]]
    np.testing.assert_allclose(half.values.sum(axis=0), total, atol=1e-4)
    assert half.explained < graph.explained
    sent, received, value = graph.top(1)[0]
    assert value == graph.values[graph.senders.index(sent), graph.receivers.index(received)]


@pytest.mark.slow
def test_other_tokens_and_texts_compile_nothing(tmp_path, rng):
    lm, _ = make("gpt2", tmp_path, rng)
    bs.attribution_graph(lm, IDS, PAIR)
    with counted() as compiled:
        bs.attribution_graph(lm, IDS[:-1], (7, 8), max_features=5)
    assert not compiled


def test_what_is_refused(tmp_path, rng):
    lm, _ = make("gpt2", tmp_path, rng)
    for arguments, words in (
        ({"target": lambda x: x[:, 0]}, "expected a token or a pair of tokens"),
        ({"max_features": 0}, "'max_features': expected"),
    ):
        with pytest.raises(bs.SurgeryError, match=words):
            bs.attribution_graph(lm, IDS, **{"target": PAIR, **arguments})
    with pytest.raises(bs.SurgeryError, match="expected a model with transcoders"):
        bs.attribution_graph(bs.CachedCausalLM(make_gpt2()), IDS, PAIR)
    path = save_circuit_tracer(tmp_path / "elsewhere", arrays(rng))
    elsewhere = [bs.Transcoder("blocks.1.attention_output", path, source="blocks.1.attention_norm")]
    with pytest.raises(bs.SurgeryError, match=r"'blocks.1.transcoder_latents': expected transc"):
        bs.attribution_graph(bs.CachedCausalLM(bs.operate(make_gpt2(), elsewhere)), IDS, PAIR)
    graph = bs.attribution_graph(lm, IDS, PAIR)
    with pytest.raises(bs.SurgeryError, match="over 0, at most 1"):
        graph.pruned(0)
    with pytest.raises(bs.SurgeryError, match=r"AttributionGraph.top at 'count'"):
        graph.top(0)
