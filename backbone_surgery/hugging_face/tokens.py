"""Tokenizers of KerasHub from the files of a model of Hugging Face."""

from collections.abc import Collection
from typing import Any

import keras
import keras_hub

from backbone_surgery import graph

_LLAMA_3 = ("<|begin_of_text|>", ("<|end_of_text|>", "<|eot_id|>"))
"""What begins a text, and what ends one."""


@keras.saving.register_keras_serializable("backbone_surgery")
class Llama3Tokenizer(keras_hub.models.Llama3Tokenizer):
    """A tokenizer whose texts begin and end with other tokens than those of Llama 3.

    KerasHub's takes them too, but does not keep them in its config.

    Args:
        bos_token: what begins a text.
        eos_token: what ends one.
        misc_special_tokens: others that are not to be split.
        **kwargs: see `keras_hub.models.Llama3Tokenizer`.
    """

    def __init__(
        self,
        bos_token: str,
        eos_token: str,
        misc_special_tokens: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        others = sorted(misc_special_tokens)
        super().__init__(
            bos_token=bos_token, eos_token=eos_token, misc_special_tokens=set(others), **kwargs
        )
        self.ends = {"bos_token": bos_token, "eos_token": eos_token, "misc_special_tokens": others}

    def get_config(self) -> dict[str, Any]:
        """Return the config, with these tokens."""
        return {**super().get_config(), **self.ends}


def byte_pairs(cls: type, preset: str, **kwargs: Any) -> Any:
    """Read a tokenizer of byte pairs: from `tokenizer.json`, or from `vocab.json` and others."""
    if graph.check_file_exists(preset, "tokenizer.json"):
        found = graph.load_json(preset, "tokenizer.json")
        added = {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
        vocabulary, pairs = found["model"]["vocab"], found["model"]["merges"]
        merges: Any = [x if isinstance(x, str) else " ".join(x) for x in pairs]
    else:
        vocabulary = graph.load_json(preset, "vocab.json")
        merges = graph.get_file(preset, "merges.txt")
        has_more = graph.check_file_exists(preset, "added_tokens.json")
        added = graph.load_json(preset, "added_tokens.json") if has_more else {}
    tokenizer = cls(vocabulary={**vocabulary, **added}, merges=merges, **kwargs)
    whole = {*(tokenizer.unsplittable_tokens or ()), *added}
    tokenizer.unsplittable_tokens = sorted(whole)  # as KerasHub's own converters have it
    return tokenizer


def sentence_pieces(cls: type, preset: str, **kwargs: Any) -> Any:
    """Read a tokenizer of SentencePiece, from `tokenizer.model`."""
    return cls(proto=graph.get_file(preset, "tokenizer.model"), **kwargs)


def phi3(cls: type, preset: str) -> Any:
    """Read the tokenizer of a model of type `phi3`, whose own tokens KerasHub's class has not.

    Those of Phi-3 are not in its file of SentencePiece, and Phi-4 has byte pairs as GPT-4's.
    """
    return llama(preset)


def llama(preset: str) -> Any:
    """Read the tokenizer of a model of type `llama`.

    Where no token begins a text, that which ends one does, as KerasHub has it for GPT-2.
    """
    config = graph.load_json(preset, "tokenizer_config.json")
    names = (config.get("bos_token"), config.get("eos_token"))
    begin, end = (x["content"] if isinstance(x, dict) else x for x in names)
    begin = end if begin is None else begin
    is_llama_3 = begin == _LLAMA_3[0] and end in _LLAMA_3[1]
    cls = keras_hub.models.Llama3Tokenizer if is_llama_3 else Llama3Tokenizer
    added = graph.load_json(preset, "tokenizer.json").get("added_tokens") or ()
    others = {token["content"] for token in added if token["special"]} - {begin, end}
    ends = {"bos_token": begin, "eos_token": end, "misc_special_tokens": others}
    return byte_pairs(cls, preset, **ends)
