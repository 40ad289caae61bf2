"""A model of `transformers` that was loaded from its folder, and what it answered there."""

from dataclasses import dataclass

import numpy as np

import backbone_surgery as bs


@dataclass(frozen=True)
class Case:
    """A loaded model, and what is expected of it.

    Attributes:
        lm: the model.
        arrays: those of `expected.npz`, see `scripts/make_hf_fixtures.py`.
        texts: those of `expected.json`, where the model has a tokenizer.
    """

    lm: bs.CachedCausalLM
    arrays: dict
    texts: tuple = ()

    @property
    def new_tokens(self):
        return self.arrays["greedy"].shape[1]

    @property
    def mask(self):
        lengths = self.arrays["lengths"]
        return np.arange(lengths.max())[None] < lengths[:, None]

    @property
    def prompts(self):
        return [ids[:n] for ids, n in zip(*self.batch, strict=True)]

    @property
    def batch(self):
        return self.arrays["token_ids"], self.arrays["lengths"]

    @property
    def greedy(self):
        return self.arrays["greedy"].tolist()

    @property
    def stopped(self):
        """The greedy tokens of each row up to the stop token, with it."""
        lengths = self.arrays["stopped_lengths"]
        return [row[:n] for row, n in zip(self.greedy, lengths, strict=True)]


def run_whole(case):
    """Run the prompts uncached, padded on the right."""
    inputs = {"token_ids": case.arrays["token_ids"], "padding_mask": case.mask.astype("int32")}
    return np.asarray(case.lm(inputs))


def pack(prompts):
    longest = max(map(len, prompts))
    ids = np.stack([np.pad(p, (0, longest - len(p))) for p in prompts])
    mask = np.arange(longest)[None] < np.array([len(p) for p in prompts])[:, None]
    return {"token_ids": ids, "padding_mask": mask}


def generate(lm, prompts, max_new_tokens, stop_token_ids=None):
    """Return the new tokens of each row."""
    result = lm.generate(
        pack(prompts),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        strip_prompt=True,
    )
    pairs = zip(result["token_ids"], result["padding_mask"], strict=True)
    return [ids[mask.astype(bool)].tolist() for ids, mask in pairs]
