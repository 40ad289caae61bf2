"""Byte-pair tokenizers of KerasHub, made to cut a text into words as their models were trained.

Byte pairs are merged within words, and each model has its own pattern of words. KerasHub 0.32 hands
its pattern to `tokenizers` as plain text, which is searched for as it stands and never found. So
nothing is cut, and pairs are merged over the ends of words; in a pipeline of `tf.data` the words of
all models are about those of GPT-2. Numbers, indentation, empty lines and quotes then become other
tokens than the model has learned. Patterns: those of the published `tokenizer.json` of each model.
"""

import json
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from backbone_surgery import graph
from backbone_surgery.errors import SurgeryError, shown

Pipeline = dict[str, Any]
"""A `tokenizer.json` of Hugging Face without its vocabulary and merges."""

FILE = "tokenizer_pipeline.json"
"""In a preset of KerasHub: the pipeline of its tokenizer, where it is not that of its class."""

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WHOLE_WORDS = {"ignore_merges": True}
_MARKS = r"\p{L}\p{M}"


def _words(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, _BYTES]}


def _like_llama(digits: str, letters: str = r"\p{L}") -> dict[str, Any]:
    """Return words of letters with what stands before them, and of some digits."""
    return _words(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _like_gpt_4o() -> dict[str, Any]:
    """Return words that end where a lower letter is followed by a capital."""
    first, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"\p{Lu}\p{Lt}", r"\p{Ll}"
    others, ending = r"\p{Lm}\p{Lo}\p{M}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return _words(
        rf"{first}[{upper}{others}]*[{lower}{others}]+{ending}"
        rf"|{first}[{upper}{others}]+[{lower}{others}]*{ending}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_COMPOSED = {"type": "NFC"}
_GPT_2: Pipeline = {"pre_tokenizer": {**_BYTES, "use_regex": True}}
_QWEN: Pipeline = {"normalizer": _COMPOSED, "pre_tokenizer": _like_llama(r"\p{N}")}
_QWEN_3_5: Pipeline = {"normalizer": _COMPOSED, "pre_tokenizer": _like_llama(r"\p{N}", _MARKS)}
_LLAMA_3: Pipeline = {"pre_tokenizer": _like_llama(r"\p{N}{1,3}"), "model": _WHOLE_WORDS}

_PIPELINES: dict[str, Pipeline] = {
    "BloomTokenizer": {"pre_tokenizer": _words(" ?[^(\\s|[.,!?…。\uff0c、।\u06d4،])]+")},
    "FalconTokenizer": _GPT_2,
    "GPT2Tokenizer": _GPT_2,
    "GPTNeoXTokenizer": {"normalizer": _COMPOSED, **_GPT_2},
    "GptOssTokenizer": {"pre_tokenizer": _like_gpt_4o(), "model": _WHOLE_WORDS},
    "Llama3Tokenizer": _LLAMA_3,
    "OPTTokenizer": _GPT_2,
    "Qwen3MoeTokenizer": _QWEN,
    "Qwen3Tokenizer": _QWEN,
    "Qwen3_5MoeTokenizer": _QWEN_3_5,
    "Qwen3_5Tokenizer": _QWEN_3_5,
    "QwenMoeTokenizer": _QWEN,
    "QwenTokenizer": _QWEN,
    "SmolLM3Tokenizer": _LLAMA_3,
}
"""By the class of a tokenizer. Others of KerasHub cut by themselves, or are of other models."""

_repaired: weakref.WeakKeyDictionary[Any, Pipeline] = weakref.WeakKeyDictionary()
_seen: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""For a tokenizer that was not repaired: one that is; `None` once the user was warned."""


def repair_tokenizer(tokenizer: Any) -> None:
    """Have a byte-pair tokenizer of KerasHub cut a text into words as its models were trained.

    `CachedCausalLM.from_preset` does so by itself. Call this for a tokenizer that KerasHub loaded.
    It is changed in place, in `tf.data` too. It gets the pattern of its class; a folder of Hugging
    Face with another one is loaded by `from_preset`. A copy of the tokenizer alone is KerasHub's
    again.

    Args:
        tokenizer: such as `preprocessor.tokenizer`; of GPT-2, OPT, BLOOM, Falcon, GPT-NeoX, Llama
            3, Qwen, SmolLM3 or GPT-OSS.

    Raises:
        SurgeryError: it is another one.

    Examples:
        >>> import backbone_surgery as bs, keras_hub
        >>> table = {"a": 0, "-": 1, "a-": 2, "<|endoftext|>": 3}
        >>> tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=table, merges=["a -"])
        >>> tokenizer("a-").tolist()
        [2]
        >>> bs.repair_tokenizer(tokenizer)
        >>> tokenizer("a-").tolist()
        [0, 1]
    """
    if type(tokenizer).__name__ not in _PIPELINES:
        raise SurgeryError(
            f"repair_tokenizer: expected one of {', '.join(sorted(_PIPELINES))}. Received "
            f"{type(tokenizer).__name__}. Leave it as it is, if it comes from KerasHub."
        )
    repair(tokenizer)


def repair(tokenizer: Any, pipeline: Pipeline | None = None) -> None:
    """Repair a tokenizer of one of the classes that need it; leave any other as it is.

    Args:
        tokenizer: of KerasHub.
        pipeline: what comes with its model; else that of its class is taken.
    """
    usual = _PIPELINES.get(type(tokenizer).__name__)
    if usual is None:
        return
    if pipeline is None:
        pipeline = _after_a_space(usual) if tokenizer.add_prefix_space else usual
    graph.use_backend(tokenizer, partial(_make, tokenizer.unsplittable_tokens or (), pipeline))
    _repaired[tokenizer] = pipeline


def _after_a_space(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline that puts a space before each text, as `add_prefix_space` asks for."""
    parts = pipeline["pre_tokenizer"]
    if parts["type"] == "Sequence":
        *others, last = parts["pretokenizers"]
        parts = {**parts, "pretokenizers": [*others, {**last, "add_prefix_space": True}]}
    else:
        parts = {**parts, "add_prefix_space": True}
    return {**pipeline, "pre_tokenizer": parts}


def pipeline_of(tokenizer: Any) -> Pipeline | None:
    """Return what a tokenizer was repaired with, if it was."""
    return _repaired.get(tokenizer)


def load_pipeline(tokenizer: Any, preset: str, is_hugging_face: bool) -> Pipeline | None:
    """Read the pipeline that comes with a tokenizer, in a folder or repository.

    Returns:
        It; `None` where there is none, or the tokenizer needs none.

    Raises:
        SurgeryError: the file is damaged.
    """
    if type(tokenizer).__name__ not in _PIPELINES:
        return None
    name = "tokenizer.json" if is_hugging_face else FILE
    is_hub = preset.startswith("hf://")
    if not (graph.check_file_exists(preset, name) if is_hub else (Path(preset) / name).is_file()):
        return None
    try:
        found = graph.load_json(preset, name)
        model = dict(found["model"])
        if model.get("type", "BPE") != "BPE":
            return None
        pipeline = {"model": {k: x for k, x in model.items() if k not in ("vocab", "merges")}}
        for part in ("added_tokens", *_PARTS):
            pipeline[part] = found.get(part)
        _make((), pipeline, {}, [])
    except Exception as error:  # `tokenizers` raises nothing more special
        raise SurgeryError(
            f"from_preset at '{preset}': expected a '{name}' that `tokenizers` reads. Received "
            f"another one ({type(error).__name__}: {str(error)[:200]}). Get the original."
        ) from error
    return pipeline


def save_pipeline(tokenizer: Any, folder: Path) -> None:
    """Write what `load_pipeline` reads, where it is not that of the class."""
    pipeline = pipeline_of(tokenizer)
    if pipeline is not None and pipeline is not _PIPELINES.get(type(tokenizer).__name__):
        text = json.dumps(pipeline, indent=2, ensure_ascii=False)
        (folder / FILE).write_text(text, encoding="utf-8")


def warn_of_words(tokenizer: Any, texts: Sequence[str], tokens: Sequence[Any]) -> None:
    """Warn, once, where a tokenizer that was not repaired makes other tokens of a text.

    Args:
        tokenizer: of KerasHub.
        texts: the texts.
        tokens: what it made of each.
    """
    pipeline = _PIPELINES.get(type(tokenizer).__name__)
    if pipeline is None or tokenizer in _repaired or tokenizer.sequence_length:
        return
    if _seen.get(tokenizer, "") is None:
        return
    if tokenizer not in _seen:
        unsplittable = tokenizer.unsplittable_tokens or ()
        _seen[tokenizer] = _make(unsplittable, pipeline, tokenizer.vocabulary, tokenizer.merges)
    for text, own in zip(texts, tokens, strict=True):
        if _seen[tokenizer].encode(text).ids != np.asarray(own).tolist():
            _seen[tokenizer] = None
            warnings.warn(
                f"{type(tokenizer).__name__}: expected the tokens that the model has learned. "
                f"KerasHub makes others of {shown(text[:60])}, since it merges pairs over the ends "
                "of words. Load the model by `CachedCausalLM.from_preset`, or call "
                "`bs.repair_tokenizer(preprocessor.tokenizer)`.",
                stacklevel=2,
            )
            return


_NOTHING_ELSE: dict[str, Any] = {
    "version": "1.0",
    **dict.fromkeys(("truncation", "padding", "post_processor", *_PARTS)),
    "added_tokens": [],
}


def _make(
    unsplittable: Sequence[str], pipeline: Pipeline, vocabulary: dict[str, int], merges: Any
) -> tokenizers.Tokenizer:
    """Return a tokenizer of Hugging Face: a vocabulary and merges, after a pipeline.

    Tokens that the vocabulary has not, or by another number, are left out.
    """
    added = {
        token["content"]: token
        for token in pipeline.get("added_tokens") or ()
        if vocabulary.get(token["content"]) == token["id"]
    }
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name in unsplittable:
        if name in vocabulary:
            own = {"id": vocabulary[name], "content": name, "special": True, **plain}
            added.setdefault(name, own)
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    parts = {"decoder": _BYTES, **{x: pipeline[x] for x in _PARTS if pipeline.get(x)}}
    made = tokenizers.Tokenizer.from_str(json.dumps({**_NOTHING_ELSE, **parts, "model": empty}))
    options = {k: x for k, x in (pipeline.get("model") or {}).items() if k != "type" and x}
    pairs = [tuple(m.split(" ")) for m in merges if not m.lstrip().startswith("#version:")]
    made.model = tokenizers.models.BPE(vocab=vocabulary, merges=pairs, **options)
    for token in sorted(added.values(), key=lambda token: token["id"]):
        settings = {k: x for k, x in token.items() if k not in ("id", "special")}
        add = made.add_special_tokens if token["special"] else made.add_tokens
        add([tokenizers.AddedToken(**settings)])
    return made
