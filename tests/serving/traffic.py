"""Random requests to an engine, and what `generate` makes of each of them alone."""

import keras_hub
import numpy as np

import backbone_surgery as bs

SIZE, VOCABULARY = 16, 60


def edited(rng, backbone, **more):
    """A model with an edit of each kind that a request can have settings for."""
    blocks = range(backbone.num_layers + 1)
    size = backbone.hidden_dim

    def vector():
        return rng.normal(size=size).astype("float32")

    rewrites = [
        bs.Repeat("blocks.1"),
        bs.Condition("asked", vector(), threshold=0.9, at="blocks.0"),
        bs.Patch("blocks.0.mlp_output", name="patch"),
        bs.Patch("blocks.1", name="along", directions=rng.normal(size=(2, size))),
        bs.ProjectOut("none", vector(), strength=0.0),
        bs.Steer("mood", {i: vector() for i in blocks}, strength=0.0),
        bs.Steer("style", {1: vector()}, tokens=(3, 12), when="asked", strength=0.0),
        bs.Ablate("blocks.*.head_outputs", name="heads"),
        bs.Capture("blocks.*"),
    ]
    lm = bs.CachedCausalLM(bs.operate(backbone, rewrites), **more)
    lm.compile(sampler="greedy")
    return lm


def random_gpt2(rng):
    """A small model whose texts are no loops."""
    backbone = keras_hub.models.GPT2Backbone(VOCABULARY, 2, 2, SIZE, 32, max_sequence_length=128)
    for variable in backbone.variables:
        variable.assign(rng.normal(size=variable.shape) * 0.4)
    return backbone


class Asked:
    """One request: its prompt, its settings, and whether its captures are wanted."""

    def __init__(self, prompt, captures, **settings):
        self.prompt, self.captures, self.settings = prompt, captures, settings

    @property
    def inputs(self):
        ids = np.array([self.prompt])
        return {"token_ids": ids, "padding_mask": np.ones_like(ids, bool)}

    def submit(self, engine):
        return engine.submit(self.inputs, **self.settings, return_captures=self.captures)

    def alone(self, lm):
        """The token ids that `generate` gives for it, prompt included, and the captures."""
        settings = dict(self.settings)
        names = ("temperature", "top_k", "top_p")
        lm.compile(sampler=sampler(*(settings.pop(name, None) for name in names)))
        made = lm.generate(self.inputs, **settings, return_captures=self.captures)
        lm.compile(sampler="greedy")
        out, captures = made if self.captures else (made, None)
        return out["token_ids"][0][out["padding_mask"][0].astype(bool)], captures

    def __repr__(self):
        return f"{len(self.prompt)} tokens, {self.settings}, captures={self.captures}"


def sampler(temperature, top_k, top_p):
    """The sampler of KerasHub that these settings stand for."""
    samplers = keras_hub.samplers
    if not temperature:
        return "greedy"
    if top_p is not None and top_p < 1:
        return samplers.TopPSampler(p=top_p, k=top_k or None, temperature=temperature)
    if top_k:
        return samplers.TopKSampler(k=top_k, temperature=temperature)
    return samplers.RandomSampler(temperature=temperature)


def random_controls(rng, hidden_dim, blocks, heads, run=40):
    """Settings for some of the edits of `edited`, of a request of which so many tokens are run."""

    def vector():
        return rng.normal(size=hidden_dim).astype("float32")

    def patch():
        return {"positions": [int(rng.integers(run))], "values": vector()[None]}

    choices = {
        "mood": lambda: [
            float(rng.normal()),
            bs.Control(float(rng.normal()), tokens=(int(rng.integers(20)), None)),
            bs.Control(float(rng.normal()), tokens="generated"),
            bs.Control(float(rng.normal()), tokens="last"),
            bs.Control(float(rng.normal()), tokens=(-1 - int(rng.integers(20)), None)),
            bs.Schedule(rng.normal(size=5).tolist(), prompt=0.0),
            bs.Control(float(rng.normal()), directions=bs.ControlVector({1: vector()})),
        ][rng.integers(7)],
        "none": lambda: [
            float(rng.uniform()),
            bs.Control(1.0, tokens="generated"),
            bs.Control(1.0, directions=vector()),
            bs.Control(0.5, directions=[vector()], tokens=(int(rng.integers(20)), None)),
        ][rng.integers(4)],
        "style": lambda: float(rng.normal()),
        "asked": lambda: float(rng.uniform(-0.5, 1)),
        "heads": lambda: rng.integers(0, 2, (1, blocks + 1, heads)),
        "patch": patch,
        "along": patch,
    }
    return {name: make() for name, make in choices.items() if rng.random() < 0.4} | {
        "heads": choices["heads"]() if rng.random() < 0.5 else 0
    }


def random_request(
    rng, prefixes, blocks=2, heads=2, size=SIZE, vocabulary=VOCABULARY, most=60, least_k=0
):
    """A request whose prompt may begin as others do.

    Of hundreds of tokens in the order of their probabilities, two may change places by rounding
    alone, and a draw by that order with them; `least_k` of 1 keeps such draws to a few tokens.
    """
    prefix = prefixes[rng.integers(len(prefixes))][: rng.integers(most)]
    prompt = [*prefix, *rng.integers(0, vocabulary, rng.integers(1, 12)).tolist()]
    new = int(rng.integers(0, 25))
    run = len(prompt) + max(new - 1, 0)  # what is chosen last is not
    settings = {
        "max_new_tokens": new,
        "controls": random_controls(rng, size, blocks, heads, run),
        "stop_token_ids": tuple(rng.integers(0, vocabulary, rng.integers(0, 3)).tolist()),
        "stop_sequences": [rng.integers(0, vocabulary, 2).tolist()],
        "seed": int(rng.integers(100)),
    }
    kind = rng.integers(6)
    if kind >= 2:
        settings["temperature"] = [0.7, 1.3][kind % 2]
    if kind >= 3:
        settings["top_k"] = int(rng.integers(least_k, 12))
    if kind >= 4:
        settings["top_p"] = float(rng.choice([0.3, 0.9, 1.0]))
    if rng.random() < 0.4:
        settings["penalties"] = bs.Penalties(
            float(rng.choice([1.0, 1.3])),
            presence=float(rng.choice([0.0, 0.5])),
            frequency=float(rng.choice([0.0, 0.3])),
            bias={int(i): float(rng.normal()) for i in rng.integers(0, vocabulary, 3)},
        )
    return Asked(prompt, bool(rng.random() < 0.3), **settings)
