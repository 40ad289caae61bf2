"""New texts have the format that is asked for; NumPy chooses the same of the tokens that may be."""

import re

import jax
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.formats import table as tables
from backbone_surgery.generation.formats.table import OVER, START, table_of
from backbone_surgery.generation.formats.token_bytes import token_bytes

PROMPTS = ["Once upon a time there was a", "Tom had a red", "The end"]
CHOICES = [" girl", " green dog", " boy named Ben.", "dog", " girls and boys", "!?"]
NAME = bs.ResponseFormat(r" [a-z]{1,6}( [a-z]{1,6}){2,4}\.")
AGE = bs.ResponseFormat.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer"},
            "toys": {"type": "array", "items": {"enum": ["ball", "car"]}, "maxItems": 2},
        },
        "required": ["age"],
    }
)


@pytest.fixture(scope="module", params=["tiny_gpt2", "tiny_gemma"])
def lm(request):
    return load(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return load("tiny_gpt2")


def load(name):
    """Load a bundled model with a control, which is at 0."""
    plain = bs.CachedCausalLM.from_preset(name)
    size = plain.backbone.hidden_dim
    steer = bs.Steer("mood", {1: np.linspace(-1, 1, size)}, strength=0.0)
    edited = bs.operate(plain.backbone, [steer, bs.Capture("blocks.0")])
    lm = bs.CachedCausalLM(edited, plain.preprocessor)
    lm.compile(sampler="greedy")
    return lm


def texts_of(lm):
    """Return the bytes of each token by the tokenizer's own names, `None` for special ones."""
    size = lm.programs.head.input_dim
    tokens = token_bytes(lm.preprocessor.tokenizer, size)
    found = [None] * size
    for row, token in enumerate(tokens.ids.tolist()):
        levels = [int(level[row]) for level in tokens._levels if row < len(level)]
        found[token] = bytes(levels)
    return found


def chosen_by_hand(lm, prompt, choices, controls=None):
    """Return the greedy tokens of one prompt, of uncached logits, with which a choice may come."""
    choices, texts = [c.encode() for c in choices], texts_of(lm)
    ids = [int(i) for i in lm.preprocessor.generate_preprocess([prompt], 64)["token_ids"][0]]
    mask = lm.preprocessor.generate_preprocess([prompt], 64)["padding_mask"][0]
    ids = ids[: int(np.sum(mask))]
    stops = [lm.preprocessor.tokenizer.end_token_id]
    length, text = len(ids), b""
    while True:
        logits = next_logits(lm, ids, controls=controls, prompt_lengths=[length])
        allowed = [t is not None and any(c.startswith(text + t) for c in choices) for t in texts]
        for token in stops:
            allowed[token] = text in choices
        token = int(np.where(allowed, logits, -np.inf).argmax())
        ids.append(token)
        if token in stops:
            return ids[length:]
        text += texts[token]
        if text in choices and not any(c.startswith(text) and c != text for c in choices):
            return ids[length:]


def next_logits(lm, ids, **options):
    """Return the logits after some tokens, of one program whatever their number."""
    padded = np.pad(ids, (0, 64 - len(ids)))
    return np.asarray(lm.score(padded[None], **options)[0, len(ids) - 1])


def compiled(lm, sampler):
    lm.compile(sampler=sampler)
    return lm


def test_greedy_tokens_are_numpys(lm):
    compiled(lm, "greedy")
    wanted = bs.ResponseFormat.choice(CHOICES)
    controls = {"mood": [0.0, 3.0, -3.0]}
    texts, captured = lm.generate(
        PROMPTS,
        max_new_tokens=30,
        controls=controls,
        response_format=wanted,
        strip_prompt=True,
        return_captures=True,
    )
    for i, prompt in enumerate(PROMPTS):
        tokens = chosen_by_hand(lm, prompt, CHOICES, {"mood": controls["mood"][i]})
        run = captured.token_ids[i, : captured.lengths[i]].tolist()
        assert run[len(run) - len(tokens) + 1 :] == tokens[:-1]
        shown = b"".join(texts_of(lm)[t] or b"" for t in tokens).decode()
        assert texts[i].strip() == shown.strip()
        assert shown in CHOICES


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "sampler",
    [
        "greedy",
        keras_hub.samplers.TopPSampler(p=0.9, k=20),
        keras_hub.samplers.BeamSampler(num_beams=3),
        "random",
        keras_hub.samplers.TopKSampler(k=3, temperature=2.0),
    ],
)
def test_texts_have_their_formats_beside_one_that_has_none(lm, sampler):
    compiled(lm, sampler)
    asked = {"max_new_tokens": 100, "seed": 7, "strip_prompt": True}
    formats = [AGE, None, NAME]
    texts = lm.generate(PROMPTS, response_format=formats, **asked)
    before = dict(lm.programs.compilations)
    for prompt, wanted, text in zip(PROMPTS, formats, texts, strict=True):
        alone = lm.generate(prompt, response_format=wanted, **asked)
        assert text == alone
        # SentencePiece leaves out the space that a text begins with.
        if wanted is not None:
            assert re.fullmatch(wanted.regex, text) or re.fullmatch(wanted.regex, f" {text}")
        pieces = [*lm.stream(prompt, response_format=wanted, **asked)]
        assert "".join(pieces) == text
    assert len(set(texts)) == 3
    assert lm.programs.compilations["prefill"] == before["prefill"] + 2  # one row; with and without


def test_beams_find_the_likeliest_choice(gpt2):
    """With more beams than there are ways to write the choices."""
    lm = compiled(gpt2, keras_hub.samplers.BeamSampler(num_beams=40))
    choices = [" a", " an", " the", " dog", "!"]
    text = lm.generate(
        PROMPTS[0],
        max_new_tokens=12,
        strip_prompt=True,
        stop_token_ids=None,
        response_format=bs.ResponseFormat.choice(choices),
    )
    assert text == likeliest(lm, PROMPTS[0], choices)


def likeliest(lm, prompt, choices):
    """Return the choice that is likeliest among the ways to write one, token by token."""
    texts = texts_of(lm)
    packed = lm.preprocessor.generate_preprocess([prompt], 64)
    start = [int(i) for i in packed["token_ids"][0]][: int(np.sum(packed["padding_mask"][0]))]
    encoded = [c.encode() for c in choices]
    waiting, found = [(0.0, b"", start)], []
    while waiting:
        sum_, text, ids = waiting.pop()
        if text in encoded and not any(c != text and c.startswith(text) for c in encoded):
            found.append((sum_, text))
            continue
        logits = next_logits(lm, ids)
        fits = [
            t for t, x in enumerate(texts) if x and any(c.startswith(text + x) for c in encoded)
        ]
        logprobs = jax.nn.log_softmax(logits[fits])
        for token, logprob in zip(fits, logprobs.tolist(), strict=True):
            waiting.append((sum_ + logprob, text + texts[token], [*ids, token]))
    return max(found)[1].decode()


def test_another_format_compiles_nothing(gpt2):
    lm = compiled(gpt2, "greedy")
    asked = {"max_new_tokens": 20}
    lm.generate(PROMPTS[0], response_format=AGE, **asked)
    before = dict(lm.programs.compilations)
    texts = {
        lm.generate(PROMPTS[0], response_format=bs.ResponseFormat(regex), **asked)
        for regex in (" [0-9]+", "(yes|no)", ".{3,9}!")
    }
    assert len(texts) == 3
    assert lm.programs.compilations == before


def test_stop_tokens_come_where_the_format_may_end(gpt2):
    """Also those that are text; and the row ends with them."""
    lm = compiled(gpt2, "greedy")
    tokenizer = lm.preprocessor.tokenizer
    dot = tokenizer.token_to_id(".")
    asked = {"max_new_tokens": 60, "strip_prompt": True, "stop_token_ids": [dot]}
    text = lm.generate("Once", response_format=bs.ResponseFormat(r"[a-z. ]{30,}"), **asked)
    assert text.endswith(".")
    assert len(text) > 30
    assert "." not in text[:-1]  # another token that begins with one might be there
    asked["stop_token_ids"] = [i for i in range(256) if "." in str(tokenizer.id_to_token(i))]
    for needed in (r"[a-z]\.[a-z]", r"[a-z]*\.[a-z]"):
        with pytest.raises(bs.SurgeryError, match="tokens whose text is not needed for the `resp"):
            lm.generate("Once", response_format=bs.ResponseFormat(needed), **asked)


def test_a_format_beside_penalties_and_stop_sequences(gpt2):
    lm = compiled(gpt2, "greedy")
    digits = bs.ResponseFormat("[0-9]{20}")
    asked = {"max_new_tokens": 40, "strip_prompt": True, "response_format": digits}
    plain = lm.generate("Tom is", **asked)
    against = lm.generate("Tom is", penalties=bs.Penalties(frequency=2.0), **asked)
    assert re.fullmatch("[0-9]{20}", plain)
    assert re.fullmatch("[0-9]{20}", against)
    assert len(set(against)) > len(set(plain))
    cut = lm.generate("Tom is", stop_sequences=[plain[3:5]], **asked)
    assert cut == plain[: plain.index(plain[3:5]) + 2]


def test_a_text_that_is_cut_by_its_budget_is_the_beginning(gpt2):
    lm = compiled(gpt2, "greedy")
    asked = {"strip_prompt": True, "response_format": AGE}
    whole = lm.generate("Tom", max_new_tokens=100, **asked)
    part = lm.generate("Tom", max_new_tokens=4, **asked)
    assert whole.startswith(part)
    assert len(part) < len(whole)
    assert lm.generate("Tom", max_new_tokens=0, **asked) == ""


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("yes|no", "expected a `bs.ResponseFormat` or None, or a list of 1, one for each row"),
        ([AGE, None], "or a list of 1, one for each row. Received"),
        (
            bs.ResponseFormat("(a"),
            r"Received the regular expression '\(a', but it is no regular expression",
        ),
        (
            bs.ResponseFormat(""),
            "Received the regular expression '', but a text has at least one character",
        ),
        (
            bs.ResponseFormat("[a&&b]"),
            "Received the regular expression '.a&&b.', but no text matches it",
        ),
        (bs.ResponseFormat(r"\x00"), "but no text has a character 0. Change it"),
    ],
)
def test_bad_formats_are_refused(gpt2, wanted, words):
    before = dict(gpt2.programs.compilations)
    with pytest.raises(bs.SurgeryError, match=words):
        gpt2.generate("Tom", max_new_tokens=5, response_format=wanted)
    assert gpt2.programs.compilations == before


def test_one_whose_table_is_too_large(gpt2, monkeypatch):
    monkeypatch.setattr(tables, "MOST_ENTRIES", 1000)
    with pytest.raises(
        bs.SurgeryError,
        match=r"but its table has 102 states and .* which is more than 1000 entries",
    ):
        gpt2.generate("Tom", max_new_tokens=5, response_format=bs.ResponseFormat("[a-z ]{101}"))


def test_not_with_lookup_nor_without_a_preprocessor(gpt2):
    with pytest.raises(bs.SurgeryError, match="Received `response_format` too, which depends on"):
        gpt2.generate("Tom", max_new_tokens=5, response_format=AGE, lookup=4)
    bare = bs.CachedCausalLM(gpt2.backbone)
    inputs = {"token_ids": np.array([[1, 2]]), "padding_mask": np.ones((1, 2))}
    with pytest.raises(bs.SurgeryError, match="expected a model with a preprocessor, whose tokens"):
        bare.generate(inputs, max_new_tokens=5, response_format=AGE, stop_token_ids=None)


def test_tables_are_kept_for_the_formats_used_last(gpt2, monkeypatch):
    tokenizer, size = gpt2.preprocessor.tokenizer, gpt2.programs.head.input_dim
    formats = [bs.ResponseFormat(f"a{{{n}}}") for n in range(1, 4)]
    first, second = (table_of(f, tokenizer, size) for f in formats[:2])
    monkeypatch.setattr(tables, "_KEPT_BYTES", first.nbytes + 2 * second.nbytes)
    assert table_of(formats[0], tokenizer, size) is first
    table_of(formats[2], tokenizer, size)
    assert table_of(formats[0], tokenizer, size) is first
    assert table_of(formats[1], tokenizer, size) is not second


def test_another_vocabulary_has_tables_of_its_own():
    words = {"a": 0, "b": 1, "<|endoftext|>": 2, "ab": 3}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=words, merges=["a b"])
    first = table_of(bs.ResponseFormat("a"), tokenizer, 4)
    tokenizer.set_vocabulary_and_merges({**words, "a": 1, "b": 0}, ["a b"])
    second = table_of(bs.ResponseFormat("a"), tokenizer, 4)
    for table, token in ((first, 0), (second, 1)):
        assert np.flatnonzero(table.following[START][table.classes] >= 0).tolist() == [token]


def test_a_table_leads_to_the_end_from_everywhere(gpt2):
    tokenizer, size = gpt2.preprocessor.tokenizer, gpt2.programs.head.input_dim
    table = table_of(AGE, tokenizer, size)
    reached, states = set(), {OVER}
    for _ in range(len(table.following)):
        states |= {
            s for s in range(START, len(table.following)) if set(table.following[s]) & states
        }
    assert states == set(range(len(table.following)))
    waiting = [START]
    while waiting:
        state = waiting.pop()
        if state not in reached:
            reached.add(state)
            waiting += [int(s) for s in set(table.following[state]) if s >= START]
    assert reached == set(range(START, len(table.following)))
