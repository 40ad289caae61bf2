"""The routes that make tokens of text, and text of tokens, as vLLM has them.

The text of tokens is without special ones, as everywhere here.
An evaluation harness counts the tokens of its prompts by them, and needs no files of the tokenizer.
"""

import asyncio
from typing import Any

import numpy as np
from fastapi import FastAPI

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.chat import ChatPrompt, chat_of, token_id
from backbone_surgery.generation.prompts import read_prompts, special_tokens, to_text, token_name
from backbone_surgery.serving.web.body import Detokenize, Tokenize

_ROLES = {"bos_token": "start_token", "eos_token": "end_token", "pad_token": "pad_token"}
"""What tokenizers of KerasHub call the special tokens of Hugging Face."""


def add_tokenizing(app: FastAPI, service: Any) -> None:
    """Add the routes to an application, whose routes share the `Service`."""
    lm, length = service.lm, service.engine.length
    tokenizer = lm.preprocessor.tokenizer

    @app.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        service.check_model(body)
        ids = await asyncio.to_thread(_ids, body, service)
        texts = [_name(i, tokenizer) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts}

    @app.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        service.check_model(body)
        if len(body.tokens) > length:
            raise SurgeryError(
                f"'tokens': expected at most {length}, as many as a text has here. Received "
                f"{len(body.tokens)}. Send them in parts."
            )
        return {"prompt": await asyncio.to_thread(_text, body, lm)}

    @app.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        chat = chat_of(lm.preprocessor)
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **{name: getattr(tokenizer, role, None) for name, role in _ROLES.items()},
            **{name: token for name, token in chat.tokens.items() if token is not None},
            "chat_template": service.chat_template or chat.template,
        }


def _ids(body: Tokenize, service: Any) -> list[int]:
    """Return the token ids of messages, or of a text with the start token of the model, or not."""
    lm: CachedCausalLM = service.lm
    if body.messages is not None:
        chat = service.chat_prompt(body.messages, body.add_generation_prompt is not False)
        return read_prompts([chat], lm.preprocessor, _size(lm), "tokenize").rows[0].tolist()
    tokenizer, text = lm.preprocessor.tokenizer, body.prompt or ""
    service.check_length([text])
    is_bare = body.add_special_tokens is False
    special = token_id(text, tokenizer) if text in special_tokens(tokenizer) else None
    if is_bare and special is not None:
        return [special]  # a SentencePiece model reads none of them in text
    if is_bare and not text:
        return []
    prompt = ChatPrompt(text) if is_bare else text
    return read_prompts([prompt], lm.preprocessor, _size(lm), "tokenize").rows[0].tolist()


def _text(body: Detokenize, lm: CachedCausalLM) -> str:
    ids = np.array([body.tokens], np.int32)
    inputs = {"token_ids": ids, "padding_mask": np.ones(ids.shape, bool)}
    rows = read_prompts(inputs, lm.preprocessor, _size(lm), "detokenize").rows
    return to_text(rows, lm.preprocessor)[0]


def _size(lm: CachedCausalLM) -> int:
    return lm.programs.head.input_dim


def _name(number: int, tokenizer: Any) -> str | None:
    name = token_name(number, tokenizer)
    return name.decode(errors="replace") if isinstance(name, bytes) else name
