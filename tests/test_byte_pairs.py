"""Byte-pair tokenizers: words are cut as each model was trained, with KerasHub and in `tf.data`.

The reference is a tokenizer of `tokenizers`, trained with the pattern of words that stands in the
published `tokenizer.json` of a model.
"""

import functools
import json
import shutil
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

import backbone_surgery as bs
from backbone_surgery import byte_pairs
from backbone_surgery.families.phi3 import FAMILY
from backbone_surgery.generation.described import tokenizer_digest
from backbone_surgery.generation.request import resolve_stop_ids

ROOT = Path(__file__).parents[1]
HF_GPT2 = ROOT / "tests" / "fixtures" / "hf_gpt2"

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
TURN = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LIKE_GPT_2 = ("<|endoftext|>",)
CHAT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = {
    "GPT2": (None, LIKE_GPT_2),
    "OPT": (None, ("</s>", "<pad>")),
    "Falcon": (None, LIKE_GPT_2),
    "GPTNeoX": (None, LIKE_GPT_2),
    "Bloom": (BLOOM, ("<s>", "</s>", "<pad>")),
    "Llama3": (LLAMA_3, (*TURN, "<|begin_of_text|>", "<|end_of_text|>")),
    "SmolLM3": (LLAMA_3, ("<|begin_of_text|>", "<|end_of_text|>", "<think>", "</think>")),
    "Qwen": (QWEN_2, CHAT),
    "Qwen3": (QWEN_2, CHAT),
    "QwenMoe": (QWEN_2, CHAT),
    "Qwen3Moe": (QWEN_2, CHAT),
    "Qwen3_5": (QWEN_3_5, (*CHAT, *VISION)),
    "Qwen3_5Moe": (QWEN_3_5, (*CHAT, *VISION)),
    "GptOss": (GPT_OSS, ("<|startoftext|>", "<|return|>", "<|endoftext|>")),
}
BY_DEFAULT = ("GPT2", "Bloom", "Llama3", "Qwen3_5", "GptOss")
COMPOSED = ("GPTNeoX", "Qwen", "Qwen3", "QwenMoe", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe")
ALL_WORDS = ("Llama3", "SmolLM3", "GptOss")
"""What is in the vocabulary is one token, whatever the merges say."""

TEXTS = [
    'In 2020, 123456789 people (he said) \'twas "odd".',
    "def f(x):\n        return  x\n\n\n\tif x:   # don't DON'T HelloWorld\n",
    "a  b   c \r\n  \r\n x+=1;y=[1,2]  ",
    "cafe\u0301 na\u00efve \u4e2d\u6587\uff0c\u597d\u3002 \u0939\u093f\u0928\u094d\U0001f600!",
]
SOURCES = ("docs/*.md", "backbone_surgery/opening/*.py", "tests/opening/*.py")


def train(name, *further):
    """Return what `tokenizers` makes of the pattern of a model."""
    return Tokenizer.from_str(trained(name, *further))


@functools.cache
def trained(name, *further):
    pattern, specials = WORDS[name]
    own = Tokenizer(models.BPE(ignore_merges=name in ALL_WORDS))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    own.pre_tokenizer = by_bytes
    if pattern is not None:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        own.pre_tokenizer = pre_tokenizers.Sequence([cut, by_bytes])
    if name in COMPOSED:
        own.normalizer = normalizers.NFC()
    own.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=[*specials, *further],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    own.train([str(path) for source in SOURCES for path in sorted(ROOT.glob(source))], trainer)
    whole = json.loads(own.to_str())
    if name in ALL_WORDS:  # one that no merges lead to
        whole["model"]["vocab"]["\u0120xylophones"] = len(whole["model"]["vocab"])
    return json.dumps(whole)


def in_keras_hub(name, reference):
    model = json.loads(reference.to_str())["model"]
    cls = getattr(keras_hub.models, f"{name}Tokenizer")
    return cls(vocabulary=model["vocab"], merges=[" ".join(pair) for pair in model["merges"]])


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in WORDS if name not in BY_DEFAULT]


@pytest.fixture(scope="module", params=[*BY_DEFAULT, *OTHERS])
def pair(request):
    reference = train(request.param)
    return reference, in_keras_hub(request.param, reference)


def texts_of_a_corpus():
    paths = sorted(ROOT.glob("backbone_surgery/graph/*.py"))
    return [text for path in paths for text in path.read_text().split("\n\n") if text]


def test_tokens_are_those_of_the_model(pair):
    reference, tokenizer = pair
    bs.repair_tokenizer(tokenizer)
    special = tokenizer.unsplittable_tokens[0]
    for text in [*TEXTS, f"{special}two xylophones {special}\n", *texts_of_a_corpus()]:
        wanted = reference.encode(text).ids
        assert np.asarray(tokenizer(text)).tolist() == wanted
        normal = text if reference.normalizer is None else reference.normalizer.normalize_str(text)
        assert tokenizer.detokenize(wanted) == normal


def test_tokens_in_a_pipeline_of_tensorflow(pair):
    reference, tokenizer = pair
    bs.repair_tokenizer(tokenizer)
    wanted = [reference.encode(text).ids for text in TEXTS]
    data = tf.data.Dataset.from_tensor_slices(TEXTS)
    assert [x.numpy().tolist() for x in data.map(tokenizer)] == wanted
    assert next(iter(data.batch(4).map(tokenizer))).to_list() == wanted


def test_kerashub_cuts_nothing():
    """Once this fails, KerasHub cuts by itself, and `byte_pairs` may go."""
    reference = train("Llama3")
    tokenizer, texts = in_keras_hub("Llama3", reference), texts_of_a_corpus()
    others = [t for t in texts if tokenizer(t).tolist() != reference.encode(t).ids]
    assert len(others) > len(texts) / 2


def test_rows_of_one_length():
    reference = train("GPT2")
    tokenizer = in_keras_hub("GPT2", reference)
    tokenizer.sequence_length = 6
    bs.repair_tokenizer(tokenizer)
    short, long = (reference.encode(text).ids for text in ("a (b", TEXTS[0]))
    wanted = [short + [0] * (6 - len(short)), long[:6]]
    np.testing.assert_array_equal(tokenizer(["a (b", TEXTS[0]]), wanted)
    data = tf.data.Dataset.from_tensor_slices(["a (b", TEXTS[0]]).batch(2).map(tokenizer)
    np.testing.assert_array_equal(next(iter(data)), wanted)


def folder_with(tokenizer, tmp_path):
    """A folder of Hugging Face whose model has the tokens of a tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(HF_GPT2, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    config = json.loads((folder / "config.json").read_text())
    size = {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps({**config, **size}))
    return folder


@pytest.mark.slow
def test_folder_of_hugging_face_brings_its_own_words(tmp_path):
    """A tokenizer of GPT-2's class that cuts as Llama 3's does, with a token between others."""
    reference = train("Llama3", "<|endoftext|>")
    reference.add_tokens(["        ", AddedToken("<x>", lstrip=True, rstrip=True)])
    reference.add_tokens([AddedToken("cafe\u0301", single_word=True, normalized=True)])
    lm = bs.CachedCausalLM.from_preset(str(folder_with(reference, tmp_path)), load_weights=False)
    saved = tmp_path / "saved"
    lm.save_to_preset(saved)
    lm.save(tmp_path / "lm.keras")
    again = bs.CachedCausalLM.from_preset(str(saved))
    archive = keras.models.load_model(tmp_path / "lm.keras", compile=False)
    texts = ["12345 (he said)", TEXTS[1], "<|endoftext|>x", "a  <x>  b", "cafe\u0301s cafe\u0301"]
    wanted = [reference.encode(text).ids for text in texts]
    for each in (lm, again, archive):
        assert [np.asarray(row).tolist() for row in each.preprocessor.tokenizer(texts)] == wanted
    digests = {tokenizer_digest(each.preprocessor) for each in (lm, again, archive)}
    assert len(digests) == 1
    assert tokenizer_digest(bs.CachedCausalLM.from_preset("tiny_gpt2").preprocessor) not in digests


def llama_2_tokenizer(*added):
    """Byte pairs with marks of spaces, which fall back to bytes."""
    reference = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    reference.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    reference.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    reference.train_from_iterator((ROOT / "README.md").read_text().splitlines(), trainer)
    whole = json.loads(reference.to_str())
    whole["added_tokens"] = whole["added_tokens"][:3]
    reference = Tokenizer.from_str(json.dumps(whole))
    reference.add_special_tokens([*added])
    return reference


def put_into(reference, folder, source, **settings):
    """Copy a model without a tokenizer, and give it one."""
    shutil.copytree(ROOT / "tests" / "fixtures" / "hf_families" / source, folder)
    reference.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = reference.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.slow
def test_folder_of_llama_2(tmp_path):
    """KerasHub reads its tokenizer as that of Llama 3."""
    reference, folder = llama_2_tokenizer(), tmp_path / "model"
    ends = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    put_into(reference, folder, "llama", **ends)
    lm = bs.CachedCausalLM.from_preset(str(folder), load_weights=False)
    lm.save_to_preset(tmp_path / "saved")
    for each in (lm, bs.CachedCausalLM.from_preset(str(tmp_path / "saved"))):
        tokenizer = each.preprocessor.tokenizer
        for text in ("Steering  a model (2020) \u4e2d", "</s>x"):
            ids = tokenizer(text).tolist()
            assert ids == reference.encode(text).ids
            assert tokenizer.detokenize(ids) == reference.decode(ids, skip_special_tokens=False)
        assert (tokenizer.start_token_id, tokenizer.end_token_id) == (1, 2)
        assert each.preprocessor.generate_preprocess(["a"])["token_ids"][0][0] == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    lm = bs.CachedCausalLM.from_preset(str(folder), load_weights=False)
    packed = lm.preprocessor.generate_preprocess(["a"])["token_ids"][0]
    assert packed[:2].tolist() == [2, *reference.encode("a").ids]


@pytest.mark.slow
def test_folder_of_phi_3(tmp_path):
    """The tokens of its turns take the space behind them, and are in no file of SentencePiece."""
    turns = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    reference = llama_2_tokenizer(*(AddedToken(x, rstrip=x != turns[0]) for x in turns))
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    ends = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "chat_template": template}
    put_into(reference, tmp_path / "model", "phi3", **ends)
    lm = bs.CachedCausalLM.from_preset(str(tmp_path / "model"), load_weights=False)
    lm.save_to_preset(tmp_path / "saved")
    text = "<|user|>\nIs it  42?<|end|>\n<|assistant|>\n"
    wanted = reference.encode(text).ids
    assert reference.token_to_id("\n") not in wanted
    for each in (lm, bs.CachedCausalLM.from_preset(str(tmp_path / "saved"))):
        packed = each.preprocessor.generate_preprocess([text])
        ids = packed["token_ids"][0][packed["padding_mask"][0] == 1].tolist()
        assert ids == [1, *wanted]
        assert each.preprocessor.tokenizer.detokenize(wanted) == reference.decode(
            wanted, skip_special_tokens=False
        )
        ends = resolve_stop_ids("auto", each.preprocessor, 700, FAMILY.stop_tokens, "generate")
        assert ends == [reference.token_to_id(turns[0]), reference.token_to_id("<|end|>")]


def test_preset_of_keras_hub_gets_the_words_of_its_class(tmp_path):
    reference = train("GPT2")
    tokenizer = in_keras_hub("GPT2", reference)
    backbone = keras_hub.models.GPT2Backbone(tokenizer.vocabulary_size(), 1, 2, 8, 16)
    backbone.save_to_preset(str(tmp_path))
    keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, 64).save_to_preset(str(tmp_path))
    lm = bs.CachedCausalLM.from_preset(str(tmp_path))
    row = lm.preprocessor.tokenizer(TEXTS[1])
    assert row.tolist() == reference.encode(TEXTS[1]).ids != tokenizer(TEXTS[1]).tolist()
    lm.save_to_preset(tmp_path / "saved")
    assert not (tmp_path / "saved" / byte_pairs.FILE).exists()


def test_space_before_each_text():
    reference = train("GPT2")
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    model = json.loads(reference.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary=model["vocab"], merges=merges, add_prefix_space=True
    )
    bs.repair_tokenizer(tokenizer)
    assert tokenizer("two words").tolist() == reference.encode("two words").ids


def test_what_a_pipeline_of_tensorflow_may_hold():
    tokenizer = in_keras_hub("GPT2", train("GPT2"))
    bs.repair_tokenizer(tokenizer)
    data = tf.data.Dataset.from_tensor_slices([b"caf\xe9"])
    wanted = tokenizer("caf\ufffd").tolist()
    assert [x.numpy().tolist() for x in data.map(tokenizer)] == [wanted]
    with pytest.raises(ValueError, match="a string or a batch of strings, received rank 2"):
        tf.data.Dataset.from_tensors([["a"]]).map(tokenizer)


def test_damaged_pipeline_is_refused(tmp_path):
    folder = folder_with(train("GPT2"), tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["pre_tokenizer"] = {"type": "Cut"}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(bs.SurgeryError, match=r"expected a 'tokenizer.json' that `tokenizers` re"):
        bs.CachedCausalLM.from_preset(str(folder), load_weights=False)


@pytest.mark.slow
def test_tokenizer_of_keras_hub_is_warned_of_once():
    tokenizer = in_keras_hub("GPT2", train("GPT2"))
    backbone = keras_hub.models.GPT2Backbone(tokenizer.vocabulary_size(), 1, 2, 8, 16)
    lm = bs.CachedCausalLM(backbone, keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, 64))
    lm.generate("the same tokens", max_new_tokens=1)
    with pytest.warns(UserWarning, match=r"GPT2Tokenizer: expected the tokens that .*def f"):
        lm.generate(TEXTS[1], max_new_tokens=1)
    lm.generate(TEXTS[1], max_new_tokens=1)
    bs.repair_tokenizer(tokenizer)
    lm.generate(TEXTS[1], max_new_tokens=1)


def test_other_tokenizers_are_refused():
    with pytest.raises(bs.SurgeryError, match=r"one of BloomTokenizer, .*Received RWKVTokenizer"):
        bs.repair_tokenizer(keras_hub.models.RWKVTokenizer(["1 'a' 1"]))
