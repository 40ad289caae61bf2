"""Log-probabilities: of each token that is chosen, and of the likeliest that could have been."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from backbone_surgery.generation.samplers import Arrays
from backbone_surgery.serving.sampling import RequestSampling

MOST_LIKELIEST = 20
"""How many of the likeliest tokens are noted at each step, as OpenAI has it."""


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of tokens of one request, by the logits as the model gives them.

    Penalties, a response format, the temperature, `top_k` and `top_p` do not change them.

    Attributes:
        token_ids: int32[tokens], the new tokens; or those of the prompt but its first one.
        logprobs: float32[tokens], of these.
        likeliest_ids: int32[tokens, 20], the likeliest tokens at each step, the likeliest first; of
            a smaller vocabulary, all.
        likeliest_logprobs: float32[tokens, 20], of those.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    likeliest_ids: np.ndarray
    likeliest_logprobs: np.ndarray


class RecordedSampling:
    """Choose as `RequestSampling` does, and note log-probabilities for the rows that ask for them.

    Args:
        steps: for how many steps there is room; `rewind` begins again.
        vocabulary_size: how many tokens there are.
    """

    width = 1
    read: tuple[str, ...] = ("notes",)

    def __init__(self, steps: int, vocabulary_size: int) -> None:
        self._sampling = RequestSampling()
        self.steps, self.count = steps, min(MOST_LIKELIEST, vocabulary_size)
        self.key = (*self._sampling.key, steps, self.count)

    def settings(self) -> Arrays:
        """Return nothing: each request brings those of its `Sampling`."""
        return {}

    def start(self, seeds: np.ndarray) -> Arrays:
        """Return the state of each row. seeds: uint32[batch, 2]."""
        rows, steps = len(seeds), self.steps
        notes = {
            "logprobs": np.zeros((rows, steps), np.float32),
            "likeliest_ids": np.zeros((rows, steps, self.count), np.int32),
            "likeliest_logprobs": np.zeros((rows, steps, self.count), np.float32),
        }
        draws = self._sampling.start(seeds)
        return {"notes": notes, "draws": draws, "step": np.zeros(rows, np.int32)}

    def rewind(self, state: Arrays) -> Arrays:
        """Have the next step be the first."""
        return {**state, "step": np.zeros(len(state["notes"]["logprobs"]), np.int32)}

    def choose(
        self, logits: jax.Array, done: jax.Array, state: Arrays, settings: Arrays
    ) -> tuple[jax.Array, None, Arrays]:
        """Choose a token for each row. What no row asks for is not computed.

        `settings` have the `logits` that are noted, too: those before a format took some away.
        """
        tokens, _, draws = self._sampling.choose(logits, done, state["draws"], settings)
        notes, step = state["notes"], state["step"]

        def noted() -> Arrays:
            new = self.notes(settings["logits"], tokens)
            return {
                name: jax.lax.dynamic_update_slice_in_dim(table, new[name][:, None], step[0], 1)
                for name, table in notes.items()
            }

        asked = (settings["logprobs"] & ~done).any()
        notes = jax.lax.cond(asked, noted, lambda: notes)
        return tokens, None, {"draws": draws, "notes": notes, "step": step + 1}

    def notes(self, logits: jax.Array, tokens: jax.Array) -> Arrays:
        """Return what is noted of int32[rows] tokens, by logits float[rows, vocabulary]."""
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        likeliest, ids = jax.lax.top_k(logprobs, self.count)
        own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        return {"logprobs": own, "likeliest_ids": ids, "likeliest_logprobs": likeliest}
