"""Checks: what `tune` is given, refused before anything is compiled."""

from collections.abc import Mapping, Sequence
from typing import Any

from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.prompts import text_list
from backbone_surgery.numbers import check_count, is_int
from backbone_surgery.tuning.candidates import UNEDITED, blocks_of
from backbone_surgery.tuning.features import Autoencoder, read_autoencoders
from backbone_surgery.tuning.methods import NAMES, STEERING
from backbone_surgery.vectors.directions import METHODS, check_method
from backbone_surgery.vectors.vector import ControlVector


def check_prompts(lm: CachedCausalLM, prompts: Any) -> list[str]:
    """Check the prompts, and that the model can write texts."""
    listed = text_list(prompts)
    texts = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else []
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise SurgeryError(
            "tune at 'prompts': expected a list of two strings or more, half of them to search on. "
            f"Received {shown(prompts)}. Pass some, better 50 or more."
        )
    if lm.preprocessor is None:
        raise SurgeryError(
            "tune: expected a preprocessor, to make text for the judge. Received a model without "
            "one. Attach a preprocessor."
        )
    return texts


def check_judges(judge: Any, fluency: Any) -> None:
    """Check that judges are functions."""
    for what, function in {"judge": judge, "fluency": fluency}.items():
        if not callable(function) and (function is not None or what == "judge"):
            raise SurgeryError(
                f"tune at '{what}': expected a function of a list of texts. Received "
                f"{shown(function)}. Pass one that returns a number from 0 to 1 for each."
            )


def check_numbers(
    lm: CachedCausalLM, budget: Any, rank: Any, steps: Any, max_new_tokens: Any, seed: Any
) -> tuple[int, ...]:
    """Return the integers that say how much to do, as Python's: JSON knows no others."""
    check_count("tune", "budget", budget, "texts")
    check_count("tune", "rank", rank, "directions")
    check_count("tune", "steps", steps, "steps")
    check_count("tune", "max_new_tokens", max_new_tokens, "tokens")
    check_seed("tune", seed)
    size = lm.opened.token_embedding.output_dim
    if rank >= size:
        raise SurgeryError(
            f"tune at 'rank': expected fewer than {size}, the size of the hidden states. Received "
            f"{rank}. Ranks such as 4 are usual."
        )
    return int(budget), int(rank), int(steps), int(max_new_tokens), int(seed)


def check_seed(operation: str, seed: Any) -> None:
    """Refuse what is no seed."""
    if not is_int(seed) or not 0 <= seed < 2**31:
        raise SurgeryError(
            f"{operation} at 'seed': expected an integer from 0 to {2**31 - 1}. Received "
            f"{shown(seed)}. Leave it out for 0."
        )


def check_vectors(lm: CachedCausalLM, vectors: Any) -> dict[str, ControlVector]:
    """Check the directions that a user brings."""
    own = dict(vectors) if isinstance(vectors, Mapping) else {}
    kinds = all(isinstance(k, str) and isinstance(v, ControlVector) for k, v in own.items())
    if not kinds or (vectors is not None and not own):
        raise SurgeryError(
            f"tune at 'vectors': expected ControlVectors by name. Received {shown(vectors)}. Pass "
            "{'mine': vector}, or leave it out."
        )
    size = lm.opened.token_embedding.output_dim
    for name, vector in own.items():
        if name in (*NAMES, UNEDITED.method):
            raise SurgeryError(
                f"tune at 'vectors': expected another name than those of methods. Received "
                f"'{name}'. Rename it."
            )
        missing = [block for block in blocks_of(lm) if block not in vector.directions]
        if missing or len(vector.directions[0]) != size:
            received = f"none for block {missing[0]}" if missing else f"{len(vector.directions[0])}"
            raise SurgeryError(
                f"tune at 'vectors': expected a direction of {size} numbers for each block of "
                f"'{name}'. Received {received}. Train it on all blocks of "
                "this model, and keep it as safetensors: a GGUF file leaves block 0 out."
            )
    return own


def check_methods(
    methods: Any, orthogonal_to: Any, has_vectors: bool, pairs: int
) -> list[ControlVector]:
    """Check the names of methods, and return the vectors to stay apart from."""
    listed = list(methods) if isinstance(methods, list | tuple) else []
    is_empty = not listed and not (has_vectors and isinstance(methods, list | tuple))
    if is_empty or len(set(map(str, listed))) < len(listed):
        raise SurgeryError(
            f"tune at 'methods': expected a list with each method once. Received {shown(methods)}. "
            f"Name at least one of {', '.join(NAMES)}."
        )
    for method in listed:
        if not isinstance(method, str) or method not in NAMES:
            raise SurgeryError(
                f"tune at 'methods': expected names of methods. Received {shown(method)}. "
                f"{closest(method if isinstance(method, str) else '', NAMES)} Choose some of these."
            )
        if method in METHODS:
            check_method(method)
    if pairs == 1 and "pca_diff" in listed:
        raise SurgeryError(
            "tune at 'methods': expected more than one pair for 'pca_diff', which looks at how "
            "differences vary. Received one. Add pairs, or leave the method out."
        )
    others: list[Any] = list(orthogonal_to) if isinstance(orthogonal_to, list | tuple) else [None]
    if not all(isinstance(vector, ControlVector) for vector in others):
        raise SurgeryError(
            f"tune at 'orthogonal_to': expected a list of ControlVectors. Received "
            f"{shown(orthogonal_to)}. Pass such a list."
        )
    without = [method for method in listed if method not in STEERING]
    if others and without:
        raise SurgeryError(
            f"tune at 'orthogonal_to': expected methods that find a direction. Received "
            f"'{without[0]}' among them. Leave it out of `methods`."
        )
    return others


def check_autoencoders(lm: CachedCausalLM, paths: Any, are_used: bool) -> dict[int, Autoencoder]:
    """Read the autoencoders of method `"sae"`; without it there are none."""
    if paths is None and not are_used:
        return {}
    if not are_used:
        raise SurgeryError(
            f"tune at 'autoencoders': expected them for method 'sae' alone. Received "
            f"{shown(paths)} without it. Add 'sae' to `methods`, or leave them out."
        )
    return read_autoencoders(paths, blocks_of(lm), lm.opened.token_embedding.output_dim)
