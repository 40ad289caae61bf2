"""lm-evaluation-harness itself asks a server, which CI installs beside the other peers."""

import numpy as np
import pytest
from scipy.special import log_softmax

from tests.serving.tiny import TEXT, Server, make_steered

pytestmark = pytest.mark.slow

START = "<|endoftext|>"
PAIRS = [
    (f"{START}{TEXT} Lily was a very", " happy girl."),
    (f"{START}{TEXT} Lily was a very", " gloomy girl."),
    (TEXT, " Lily had a red box."),
    ("", TEXT),
]


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm_eval[api]")


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


@pytest.mark.parametrize(("strength", "batch_size"), [(0.0, 1), (1.5, 3)])
def test_its_log_likelihoods_are_those_of_score(harness, strength, batch_size):
    lm = make_steered()
    tokenizer = lm.preprocessor.tokenizer

    def ids(text):
        return np.asarray(tokenizer(text)).tolist()

    with Server(lm, controls={"mood": strength}) as server:
        url = f"{server.url}/v1/completions"
        asked = harness.LocalCompletionsAPI(
            base_url=url, model="tiny", max_length=128, batch_size=batch_size
        )
        answers = asked.loglikelihood(instances("loglikelihood", PAIRS))
        rolling = asked.loglikelihood_rolling(instances("loglikelihood_rolling", [(TEXT,)]))
        until = ((START + TEXT, {"until": ["."], "max_gen_toks": 20}),)
        (text,) = asked.generate_until(instances("generate_until", until))

    def score(before, after):
        row = np.array([[*before, *after]])
        logits = np.asarray(lm.score(row, controls={"mood": strength}), np.float64)[0]
        logprobs = log_softmax(logits, axis=-1)[len(before) - 1 : -1]
        own = np.take_along_axis(logprobs, row[0, len(before) :, None], axis=-1)
        return own.sum(), bool((logprobs.argmax(-1) == row[0, len(before) :]).all())

    for (context, continuation), (total, is_greedy) in zip(PAIRS, answers, strict=True):
        before = ids(context) or [tokenizer.start_token_id]
        wanted, greedy = score(before, ids(context + continuation)[len(ids(context)) :])
        assert abs(total - wanted) <= 1e-4
        assert is_greedy == greedy
    assert abs(rolling[0] - answers[3][0]) <= 1e-4
    whole = lm.generate(TEXT, max_new_tokens=20, controls={"mood": strength})
    assert text == whole[len(TEXT) :].partition(".")[0]
