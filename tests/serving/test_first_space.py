"""A tokenizer that leaves out the space that a text begins with, as that of Llama does.

What a client puts after its prompt has the space; what is decoded alone has not.
"""

import json
from types import SimpleNamespace

import keras_hub
import numpy as np
import pytest
from fastapi.testclient import TestClient

import backbone_surgery as bs
from backbone_surgery.generation.stopping import Stops
from backbone_surgery.serving.logprobs import TokenLogprobs
from backbone_surgery.serving.serve import make_server_app
from backbone_surgery.serving.web.logprobs import ShownLogprobs
from backbone_surgery.tuning.judging import added
from tests.helpers import train_pieces

# KerasHub leaves the file of a SentencePiece model to the garbage collector to close.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in.*tokenizer\.model:pytest.PytestUnraisableExceptionWarning"
)

PROMPT = "the quick brown"


@pytest.fixture
def lm(rng):
    tokenizer = keras_hub.models.LlamaTokenizer(train_pieces([], vocab_size=60))
    preprocessor = keras_hub.models.LlamaCausalLMPreprocessor(tokenizer, sequence_length=64)
    backbone = keras_hub.models.LlamaBackbone(tokenizer.vocabulary_size(), 2, 2, 16, 32, 1)
    for variable in backbone.variables:
        variable.assign(rng.normal(size=variable.shape) * 0.4)
    return bs.CachedCausalLM(backbone, preprocessor)


@pytest.fixture
def client(lm):
    with TestClient(make_server_app(lm, warm_up=False, rows=2, length=64)) as client:
        yield client


def asked(client, **body):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 1.0, **body})
    if not body.get("stream"):
        return answer.json()["choices"][0]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return {"text": "".join(json.loads(line)["choices"][0]["text"] for line in lines)}


@pytest.mark.slow
def test_an_answer_joins_to_its_prompt_and_stops_before_it_is_shown(lm, client):
    lm.compile(sampler="random")
    options = {"max_new_tokens": 12, "stop_token_ids": None, "seed": list(range(40))}
    whole = lm.generate([PROMPT] * 40, **options)
    alone = lm.generate([PROMPT] * 40, strip_prompt=True, **options)
    seed = next(i for i in range(40) if whole[i] == f"{PROMPT} {alone[i]}")
    added = f" {alone[seed]}"

    body = {"seed": seed, "max_tokens": 12}
    for stream in (False, True):
        assert asked(client, **body, stream=stream)["text"] == added
        assert asked(client, **body, stream=stream, echo=True)["text"] == whole[seed]
        assert asked(client, **body, stream=stream, stop=added[:3])["text"] == ""
    logprobs = asked(client, **body, logprobs=0)["logprobs"]
    ends = [*logprobs["text_offset"][1:], len(added)]
    shown = [added[a:b] for a, b in zip(logprobs["text_offset"], ends, strict=True)]
    assert logprobs["tokens"] == shown


@pytest.mark.slow
def test_fluency_is_of_the_text_that_was_written(lm):
    lm.compile(sampler="random")
    texts = lm.generate([PROMPT] * 40, max_new_tokens=5, seed=list(range(40)), stop_token_ids=None)
    written = added(lm, [PROMPT] * 40, texts)
    assert [PROMPT + text for text in written] == texts
    assert any(text.startswith(" ") for text in written)


def test_a_special_token_before_one_takes_no_space_from_it(lm):
    tokenizer = lm.preprocessor.tokenizer
    prompt = np.append(tokenizer("the quick"), tokenizer.start_token_id)
    new = np.asarray(tokenizer("brown fox"))
    notes = TokenLogprobs(new, np.zeros(len(new)), new[:, None], np.zeros((len(new), 1)))
    stops = Stops([], preprocessor=lm.preprocessor)
    request = SimpleNamespace(
        prompt_token_ids=prompt,
        preprocessor=lm.preprocessor,
        logprobs=notes,
        added_text=lambda count=None: stops.added(prompt, new[:count]),
    )
    shown = ShownLogprobs(request, 0, False).next(1000)
    assert "".join(shown["tokens"]) == " brown fox"
