"""The digest of a tokenizer tells apart what makes other tokens, and nothing else."""

import json
import os
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

import backbone_surgery as bs
from backbone_surgery.datasets.facts import controls_digest
from backbone_surgery.generation.described import tokenizer_digest
from tests.helpers import train_pieces

models = keras_hub.models
BYTE_PAIR = ["GPT2", "OPT", "Bloom", "Falcon", "GPTNeoX", "Llama3", "Qwen", "Qwen3", "SmolLM3"]
BYTE_PAIR += ["QwenMoe", "Qwen3Moe", "GptOss", "Qwen3_5", "Qwen3_5Moe"]
SENTENCE_PIECE = ["Llama", "Mistral", "Mixtral", "Phi3", "Gemma", "Gemma3", "Gemma4"]


def train(special, **settings):
    """Return a small SentencePiece model with these tokens."""
    symbols = sorted(set(special) - {"<s>", "</s>"})
    return train_pieces(symbols, vocab_size=60, hard_vocab_limit=False, **settings)


def byte_pair(name="GPT2", merges=("a b", "b a"), first="ab", **options):
    """Return a byte-pair tokenizer, with one token before all others."""
    cls = getattr(models, f"{name}Tokenizer")
    special = ("image_pad", "video_pad", "vision_start", "vision_end")
    tokens = {*"abĠ", "ab", "ba", *cls().special_tokens, *(f"<|{each}|>" for each in special)}
    tokens = [first, *sorted(tokens - {first})]
    return cls({token: i for i, token in enumerate(tokens)}, list(merges), **options)


def sentence_piece(name="Llama", **settings):
    cls = getattr(models, f"{name}Tokenizer")
    return cls(train(cls(None).special_tokens, **settings))


def wrap(name, tokenizer, **options):
    return getattr(models, f"{name}CausalLMPreprocessor")(tokenizer, sequence_length=16, **options)


def load_again(preprocessor, folder):
    """Do what a preset does to a preprocessor that is saved and loaded."""
    tokenizer = preprocessor.tokenizer
    tokenizer.save_assets(folder)
    text = json.dumps(keras.saving.serialize_keras_object(tokenizer))
    loaded = keras.saving.deserialize_keras_object(json.loads(text))
    loaded.load_assets(folder)
    config = {k: v for k, v in preprocessor.get_config().items() if k != "tokenizer"}
    return type(preprocessor).from_config({**json.loads(json.dumps(config)), "tokenizer": loaded})


@pytest.mark.parametrize("name", BYTE_PAIR + SENTENCE_PIECE)
def test_a_tokenizer_that_is_made_or_loaded_again_has_the_same_digest(tmp_path, name):
    make = byte_pair if name in BYTE_PAIR else sentence_piece
    first, second = (wrap(name, make(name)) for _ in range(2))
    assert first.name != second.name
    loaded = load_again(first, tmp_path)
    assert len({tokenizer_digest(each) for each in (first, second, loaded)}) == 1


def test_names_of_what_takes_images_do_not_count():
    tokenizer = sentence_piece("Gemma3")
    options, digests = {"num_vision_tokens_per_image": 4}, set()
    for _ in range(2):
        converter = keras_hub.layers.Gemma3ImageConverter(image_size=(8, 8))
        digests.add(
            tokenizer_digest(wrap("Gemma3", tokenizer, image_converter=converter, **options))
        )
    assert len(digests) == 1
    assert tokenizer_digest(wrap("Gemma3", tokenizer, **options)) not in digests


def test_the_order_of_a_set_does_not_count():
    tokens = ["ab", "ba", "<|endoftext|>"]
    one, other = (byte_pair(unsplittable_tokens=each) for each in (tokens, tokens[::-1]))
    assert tokenizer_digest(wrap("GPT2", one)) == tokenizer_digest(wrap("GPT2", other))


@pytest.mark.parametrize(
    "changed",
    [
        lambda: wrap("GPT2", byte_pair(add_prefix_space=True)),
        lambda: wrap("GPT2", byte_pair(unsplittable_tokens=["ab"])),
        lambda: wrap("GPT2", byte_pair(merges=["b a", "a b"])),
        lambda: wrap("GPT2", byte_pair(first="ba")),
        lambda: wrap("GPT2", byte_pair(), add_start_token=False),
        lambda: wrap("GPTNeoX", byte_pair("GPTNeoX")),
    ],
    ids=["prefix", "unsplittable", "merges", "ids", "start", "class"],
)
def test_another_byte_pair_tokenizer_has_another_digest(changed):
    assert tokenizer_digest(changed()) != tokenizer_digest(wrap("GPT2", byte_pair()))


def test_the_token_that_ends_a_text_counts():
    ends = {"ab", "ba"}
    made = (byte_pair("Llama3", eos_token=end, misc_special_tokens=set(ends)) for end in ends)
    assert len({tokenizer_digest(wrap("Llama3", tokenizer)) for tokenizer in made}) == 2


def test_all_of_a_sentencepiece_model_counts():
    tokenizer = sentence_piece()
    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.proto)
    scores = [piece.score for piece in proto.pieces[-9:]]
    for piece, score in zip(proto.pieces[-9:], scores[::-1], strict=True):
        piece.score = score
    others = [
        models.LlamaTokenizer(proto.SerializeToString()),
        sentence_piece(remove_extra_whitespaces=False),
        models.LlamaTokenizer(tokenizer.proto, add_eos=True),
    ]
    assert all(other.get_vocabulary() == tokenizer.get_vocabulary() for other in others)
    digests = {tokenizer_digest(wrap("Llama", each)) for each in (tokenizer, *others)}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("do", "arguments", "text"),
    [
        (bs.harvest, ("blocks.1", "prompt"), ""),  # nothing to run, nothing to compile
        pytest.param(bs.generate_dataset, (), "abba", marks=pytest.mark.slow),
    ],
)
def test_a_job_with_another_tokenizer_is_refused(tmp_path, do, arguments, text):
    backbone = models.GPT2Backbone(50, 2, 2, 8, 16, max_sequence_length=128)
    tokenizers = (byte_pair(add_prefix_space=prefix) for prefix in (False, False, True))
    first, again, other = (
        bs.CachedCausalLM(backbone, wrap("GPT2", tokenizer)) for tokenizer in tokenizers
    )
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt": text}))
    for lm in (first, again):
        do(lm, path, tmp_path / "out", *arguments, verbose=0)
    with pytest.raises(bs.SurgeryError, match="differs in: tokenizer"):
        do(other, path, tmp_path / "out", *arguments, verbose=0)


def test_ranges_that_differ_in_long_prompts_alone_have_other_digests():
    backbone = models.GPT2Backbone(50, 2, 2, 8, 16)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)})]))
    ranges = ["all", "prompt", "last", (-10, None), (-30, None), (0, -1), (-10, -1), (0, 12)]
    controls = [{"mood": bs.Control(1.0, tokens=tokens)} for tokens in ranges]
    digests = {controls_digest("harvest", lm, each) for each in controls}
    assert len(digests) == len(ranges)


@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process():
    code = (
        "from tests.datasets.test_facts import *\n"
        "for name in ('Llama3', 'SmolLM3', 'Qwen3_5'):\n"
        "    print('digest', tokenizer_digest(wrap(name, byte_pair(name))))"
    )
    digests = set()
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(tuple(line for line in done.stdout.splitlines() if line.startswith("digest")))
    assert [len(each) for each in digests] == [3]
