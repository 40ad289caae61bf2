"""The bytes of a token are what its tokenizer adds to a text."""

import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.formats.token_bytes import TokenBytes, token_bytes
from backbone_surgery.generation.prompts import to_text
from tests.helpers import train_pieces


def names(tokens):
    """Return the bytes of each token that has some."""
    found = {}
    for token, levels in zip(tokens.ids.tolist(), range(len(tokens.ids)), strict=True):
        found[token] = bytes(int(level[levels]) for level in tokens._levels if levels < len(level))
    return found


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_gemma"])
def test_they_are_what_the_tokenizer_adds(name):
    lm = bs.CachedCausalLM.from_preset(name)
    tokenizer, start = lm.preprocessor.tokenizer, lm.preprocessor.tokenizer("a cat").tolist()
    found = names(token_bytes(tokenizer, tokenizer.vocabulary_size() + 3))
    before, *texts = to_text(
        [np.array(start), *(np.array([*start, token]) for token in found)], lm.preprocessor
    )
    for text, added in zip(texts, found.values(), strict=True):
        shown = added.decode(errors="replace")
        assert text == before + shown
    left_out = set(range(tokenizer.vocabulary_size())) - set(found)
    assert left_out == {i for i in left_out if tokenizer.id_to_token(i).startswith("<")}
    assert tokenizer.end_token_id in left_out
    assert len(found) > 200


def test_pieces_of_sentencepiece():
    symbols = ["<start_of_turn>", "\n\n", "<b"]
    proto = train_pieces(symbols, vocab_size=320, byte_fallback=True, pad_id=3)
    tokenizer = keras_hub.tokenizers.SentencePieceTokenizer(proto)
    found = names(token_bytes(tokenizer, tokenizer.vocabulary_size()))
    ids = {name: tokenizer.token_to_id(name) for name in ["<0x0A>", "<0xFF>", "\n\n", "<b"]}
    assert found[ids["<0x0A>"]] == b"\n"
    assert found[ids["<0xFF>"]] == b"\xff"
    assert found[ids["\n\n"]] == b"\n\n"
    assert found[ids["<b"]] == b"<b"
    for name in ("<s>", "</s>", "<unk>", "<pad>", "<start_of_turn>"):
        assert tokenizer.token_to_id(name) not in found


def test_tokens_that_are_bytes():
    lines = [f"{i} {bytes([i])!r} 1" for i in range(1, 256)] + ["256 ' é' 3"]
    tokenizer = keras_hub.tokenizers.RWKVTokenizer(["0 '<s>' 3", *lines])
    found = names(token_bytes(tokenizer, 300))
    assert found[256] == " é".encode()
    assert found[0xE9] == b"\xe9"
    assert set(found) == set(range(257))


def test_another_tokenizer_is_refused():
    class Words(keras_hub.tokenizers.Tokenizer):
        def vocabulary_size(self):
            return 2

        def id_to_token(self, i):
            return "ab"[i]

    with pytest.raises(bs.SurgeryError, match=r"by byte pairs, of SentencePiece, or RWKV's\. "):
        token_bytes(Words(), 2)


def test_a_walk_is_that_of_each_token_alone(rng):
    texts = {bytes(rng.integers(0, 4, rng.integers(1, 6)).tolist()) for _ in range(200)}
    tokens = TokenBytes([None, *sorted(texts), b""])
    for share in (0.05, 0.6):  # states that few, and that most tokens can follow
        table = np.where(rng.random((6, 256)) < share, rng.integers(0, 5, (6, 256)), 5)
        table[5] = 5
        for state in range(5):
            wanted = {}
            for token, text in enumerate(sorted(texts), 1):
                after = state
                for byte in text:
                    after = table[after, byte]
                if after != 5:
                    wanted[token] = after
            ids, states = tokens.walk(table.reshape(-1).astype(np.int32), state)
            assert dict(zip(ids.tolist(), states.tolist(), strict=True)) == wanted
