"""llama.cpp, as an independent peer: its own converters, and its library.

It takes `pip install llama-cpp-python`, which compiles it, and the sources of that, whose folder
`vendor/llama.cpp` holds the converters:

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import llama_cpp as api

_FLOAT32 = 0
"""Of GGML's types: of the cache."""


@api.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    """Print nothing."""


api.llama_log_set(_silent, None)


def convert_model(sources: Path, folder: Path, path: Path, kind: str = "ALL_F32") -> None:
    """Write a model of Hugging Face as GGUF.

    Args:
        sources: of llama.cpp.
        folder: with `config.json` and weights.
        path: of the file.
        kind: `LlamaFileType` of `gguf`.
    """
    script = Path(__file__).with_name("llama_cpp_convert.py")
    _run(sources, script, folder, path, "--type", kind)


def convert_adapter(sources: Path, adapter: Path, base: Path, path: Path) -> None:
    """Write an adapter in PEFT's folder as GGUF, by llama.cpp's own command line.

    Args:
        sources: of llama.cpp.
        adapter: the folder of the adapter.
        base: the folder of the model, of Hugging Face.
        path: of the file.
    """
    _run(sources, sources / "convert_lora_to_gguf.py", adapter, "--base", base, "--outfile", path)


def _run(sources: Path, script: Path, *args: str | Path) -> None:
    """Run a script with llama.cpp's version of `gguf`."""
    paths = f"{sources / 'gguf-py'}{os.pathsep}{sources}"
    command = [sys.executable, script, *args]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)


class LlamaCpp:
    """A model that llama.cpp has read.

    Args:
        path: of a GGUF file.
    """

    def __init__(self, path: Path) -> None:
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = _there(api.llama_model_load_from_file(str(path).encode(), parameters), path)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._width = api.llama_model_n_embd(self._model)
        self._blocks = api.llama_model_n_layer(self._model)

    def logits(
        self, token_ids: list[int], vector: Path | None = None, adapter: Path | None = None
    ) -> np.ndarray:
        """Return the logits of one row, float32[tokens, vocabulary].

        Args:
            token_ids: of the row.
            vector: a control vector in a GGUF file, added as llama.cpp does at strength 1.
            adapter: a LoRA adapter in a GGUF file, at strength 1.
        """
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = len(token_ids)
        parameters.type_k = parameters.type_v = _FLOAT32
        parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
        parameters.n_threads = parameters.n_threads_batch = 1
        context = _there(api.llama_init_from_model(self._model, parameters), "context")
        if vector is not None:
            self._steer(context, vector)
        if adapter is not None:
            self._adapt(context, adapter)
        logits = self._decode(context, np.array([token_ids]), 0, [*range(len(token_ids))])
        api.llama_free(context)
        return logits

    def generate(self, prompts: np.ndarray, length: int, threads: int) -> np.ndarray:
        """Return the likeliest new tokens of all rows at once, int[batch, new].

        Args:
            prompts: int32[batch, prompt].
            length: tokens of a row in the end, its prompt included.
            threads: to run on.
        """
        rows, prompt = prompts.shape
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = rows * length, rows
        parameters.n_batch = parameters.n_ubatch = rows * prompt
        parameters.n_threads = parameters.n_threads_batch = threads
        context = _there(api.llama_init_from_model(self._model, parameters), "context")
        ends = [row * prompt + prompt - 1 for row in range(rows)]
        new = [self._decode(context, prompts, 0, ends).argmax(axis=1)]
        for position in range(prompt, length - 1):
            logits = self._decode(context, new[-1][:, None], position, [*range(rows)])
            new.append(logits.argmax(axis=1))
        api.llama_free(context)
        return np.stack(new, axis=1)

    def _decode(
        self, context: Any, tokens: np.ndarray, position: int, wanted: list[int]
    ) -> np.ndarray:
        """Run tokens of each row, int[batch, time], and return some of the logits.

        Args:
            context: whose cache has what came before.
            tokens: to run.
            position: of the first of each row.
            wanted: numbers of the tokens, counted through all rows.
        """
        time = tokens.shape[1]
        batch = api.llama_batch_init(tokens.size, 0, 1)
        batch.n_tokens = tokens.size
        for i, token in enumerate(tokens.reshape(-1).tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i % time, 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i // time
        for i in wanted:
            batch.logits[i] = 1
        _done(api.llama_decode(context, batch), "decode")
        rows = [api.llama_get_logits_ith(context, i) for i in wanted]
        logits = np.stack([np.ctypeslib.as_array(row, (self._vocabulary,)) for row in rows])
        api.llama_batch_free(batch)
        return logits

    def _steer(self, context: Any, path: Path) -> None:
        """Add `direction.N` to the output of layer N, from 1 on, as its command line does."""
        values = np.zeros((self._blocks - 1, self._width), np.float32)
        for tensor in gguf.GGUFReader(path).tensors:
            values[int(tensor.name.removeprefix("direction.")) - 1] += tensor.data
        data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        args = (data, values.size, self._width, 1, self._blocks)
        _done(api.llama_set_adapter_cvec(context, *args), path)

    def _adapt(self, context: Any, path: Path) -> None:
        adapter = _there(api.llama_adapter_lora_init(self._model, str(path).encode()), path)
        adapters = (api.llama_adapter_lora_p_ctypes * 1)(adapter)
        _done(api.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)), path)


def _there(pointer: Any, what: object) -> Any:
    if not pointer:
        raise RuntimeError(f"llama.cpp has refused {what}")
    return pointer


def _done(code: int, what: object) -> None:
    if code:
        raise RuntimeError(f"llama.cpp has refused {what} with code {code}")
