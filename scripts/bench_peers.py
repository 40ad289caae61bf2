"""The contenders of the benchmark: each generates greedily, from the same weights and prompts.

A contender has a `name` and `generate(work, stop)`, which returns the new tokens int[batch, new].
`stop` holds token ids that end a row. The benchmark passes the first tokens as stop ids to time
the first token alone, at the lengths of the whole text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import keras
import keras_hub
import numpy as np
from bench_checkpoints import spread
from bench_convert import convert

import backbone_surgery as bs
from backbone_surgery.generation.run_batch import Batch, run_batch
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.generation.stopping import Stops

CHUNK = 8
"""Tokens between two pieces of a stream."""


@dataclass(frozen=True)
class Work:
    """What is generated.

    Attributes:
        prompts: int32[batch, prompt].
        length: tokens of a row in the end, its prompt included.
        directions: float32[batch, blocks, hidden], what is added to each block's output, if any.
        strengths: float32[batch], by how much.
    """

    prompts: np.ndarray
    length: int
    directions: np.ndarray | None = None
    strengths: np.ndarray | None = None

    @property
    def new_tokens(self) -> int:
        """How many tokens each row gets."""
        return self.length - self.prompts.shape[1]


class Contender(Protocol):
    """One way to generate."""

    name: str
    on_jax: bool

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Return the new tokens, int[batch, new]."""


class Ours:
    """This project: the rewired graph, steered or captured at every block if asked to."""

    on_jax = True

    def __init__(self, backbone: keras.Model, kind: str = "plain", name: str = "ours") -> None:
        self.name = name
        self.control = "bench" if kind == "steered" else None
        self.capturing = kind == "capturing"
        rewrites: list[bs.Rewrite] = []
        if self.control:
            zeros = np.zeros(backbone.hidden_dim, "float32")
            vector = {block: zeros for block in range(backbone.num_layers)}
            rewrites = [bs.Steer(self.control, vector, strength=0.0)]
        if self.capturing:
            rewrites = [bs.Capture("blocks.*")]
        self.lm = bs.CachedCausalLM(bs.operate(backbone, rewrites) if rewrites else backbone)
        self.lm.compile(sampler="greedy")

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Generate all rows at once, each with its own vector and strength."""
        controls = None
        if self.control and work.directions is not None:
            control = bs.Control(strength=work.strengths, directions=work.directions)
            controls = {self.control: control}
        prompts = {"token_ids": work.prompts, "padding_mask": np.ones_like(work.prompts)}
        result = self.lm.generate(
            prompts,
            max_length=work.length,
            stop_token_ids=stop or None,
            strip_prompt=True,
            controls=controls,
            return_captures=self.capturing,
        )
        tokens = result[0] if self.capturing else result
        return tokens["token_ids"][:, : int(tokens["padding_mask"].sum(axis=1).max())]


class Streaming(Ours):
    """This project, handing out the tokens every few steps."""

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Generate all rows at once, in chunks."""
        budget = np.full(len(work.prompts), work.new_tokens, np.int32)
        seeds = np.zeros((len(budget), 2), np.uint32)
        batch = Batch([*work.prompts], budget, seeds, {}, Stops([*stop]))
        strategy = make_strategy(self.lm.sampler)
        *_, rows = run_batch(self.lm.programs, strategy, batch, CHUNK)
        return np.stack([row.new for row in rows])


class KerasHub:
    """KerasHub's own task over the same backbone."""

    name = "keras_hub"
    on_jax = True

    def __init__(self, backbone: keras.Model) -> None:
        tasks = [t for t in vars(keras_hub.models).values() if _is_task_of(t, backbone)]
        self.task = tasks[0](backbone=backbone, preprocessor=None)
        self.task.compile(sampler="greedy")

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Generate into arrays of the full length, as this task wants them."""
        batch, prompt = work.prompts.shape
        token_ids = np.zeros((batch, work.length), "int32")
        token_ids[:, :prompt] = work.prompts
        mask = np.zeros((batch, work.length), bool)
        mask[:, :prompt] = True
        inputs = {"token_ids": token_ids, "padding_mask": mask}
        if isinstance(self.task, keras_hub.models.Gemma3CausalLM):
            inputs["images"] = np.zeros((batch, 0, 1, 1, 3))  # which it asks for even of a text
        result = self.task.generate(inputs, stop_token_ids=stop or None)
        new = 1 if stop else work.new_tokens
        return np.asarray(result["token_ids"])[:, prompt : prompt + new]


def _is_task_of(task: Any, backbone: keras.Model) -> bool:
    is_task = isinstance(task, type) and issubclass(task, keras_hub.models.CausalLM)
    return is_task and task.backbone_cls is type(backbone)


class HuggingFace:
    """`transformers`' generate.

    As it comes, with a static cache and a compiled forward (`static`), or returning the hidden
    states of all blocks (`capturing`).
    """

    on_jax = False

    def __init__(self, model: Any, static: bool = False, capturing: bool = False) -> None:
        import torch

        self.name = "hf_static" if static else "hf_hidden_states" if capturing else "hf"
        self.model, self.static, self.torch, self.capturing = model, static, torch, capturing
        self.eager = model.forward
        self.compiled = torch.compile(model.forward) if static else model.forward

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Generate all rows at once."""
        options: dict[str, Any] = {"cache_implementation": "static"} if self.static else {}
        if self.capturing:
            options = {"output_hidden_states": True, "return_dict_in_generate": True}
        self.model.forward = self.compiled
        try:
            return self._generate(work.prompts, work.new_tokens, stop, options)
        finally:
            self.model.forward = self.eager

    def _generate(
        self, prompts: np.ndarray, new_tokens: int, stop: tuple[int, ...], options: dict[str, Any]
    ) -> np.ndarray:
        token_ids = self.torch.tensor(prompts, dtype=self.torch.long, device=self.model.device)
        with self.torch.inference_mode():
            result = self.model.generate(
                token_ids,
                attention_mask=self.torch.ones_like(token_ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=list(stop) or None,
                **options,
            )
        token_ids = result.sequences if self.capturing else result
        return token_ids[:, prompts.shape[1] :].cpu().numpy()


class Repeng(HuggingFace):
    """repeng over `transformers`: it holds one vector and strength, so rows run in turn."""

    def __init__(self, model: Any) -> None:
        np.float_ = np.float64  # a name that NumPy 2 dropped, in a type annotation of repeng
        from repeng import ControlModel

        super().__init__(model)
        self.name = "repeng"
        self.blocks = range(model.config.num_hidden_layers)
        with contextlib.redirect_stdout(None):
            self.controlled = ControlModel(model, list(self.blocks))

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Set each row's vector, and generate it."""
        rows = []
        for i in range(len(work.prompts)):
            if work.directions is not None:
                control = work.strengths[i] * work.directions[i]
                raw = {b: self.torch.tensor(control[b]) for b in self.blocks}
                self.controlled.set_raw_control(raw)
            rows.append(self._generate(work.prompts[i : i + 1], work.new_tokens, stop, {})[0])
        self.controlled.reset()
        return np.stack(rows)


class Hooked(HuggingFace):
    """`transformers` with all rows in one batch, and hooks that add each row's own vector.

    What a careful engineer would write: a hook on each block adds float[batch, 1, hidden].
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.name = "hf_hooks"
        is_gpt2 = hasattr(model, "transformer")
        self.blocks = list(model.transformer.h if is_gpt2 else model.model.layers)

    def generate(self, work: Work, stop: tuple[int, ...] = ()) -> np.ndarray:
        """Hook the blocks, and generate all rows at once."""
        if work.directions is None or work.strengths is None:
            return super().generate(work, stop)
        steering = self.torch.tensor(work.strengths[:, None, None] * work.directions)
        hooks = [
            block.register_forward_hook(partial(self._add, steering[:, i, None]))
            for i, block in enumerate(self.blocks)
        ]
        try:
            return super().generate(work, stop)
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def _add(vectors: Any, module: Any, args: Any, output: Any) -> Any:
        is_tuple = isinstance(output, tuple)
        return (output[0] + vectors, *output[1:]) if is_tuple else output + vectors


def contenders(
    backbone: keras.Model, peer: Any, kind: str, only_keras: bool
) -> tuple[list[Contender], list[str]]:
    """Make all contenders of a kind of row that can run here, and notes on those that cannot.

    Args:
        backbone: holds the weights.
        peer: the model of `transformers` with the same weights; `None` to convert the backbone.
        kind: see `bench.Row`.
        only_keras: leave out what needs PyTorch.
    """
    ours: dict[str, Callable[[], list[Contender]]] = {
        "steered": lambda: [Ours(backbone, "steered")],
        "overhead": lambda: [Ours(backbone, "steered", "ours_steered"), Ours(backbone)],
        "capture": lambda: [Ours(backbone, "capturing", "ours_capturing"), Ours(backbone)],
        "stream": lambda: [Streaming(backbone, name="ours_streaming"), Ours(backbone)],
    }
    on_keras = ours.get(kind, lambda: [Ours(backbone), KerasHub(backbone)])()
    if kind in ("overhead", "stream"):
        return on_keras, []
    if only_keras:
        return on_keras, ["transformers: left out"]
    try:
        model = convert(backbone) if peer is None else peer
        if kind == "steered":
            return _steering_peers(on_keras, model)
        if kind == "capture":
            return [*on_keras, HuggingFace(model, capturing=True)], []
        return [*on_keras, HuggingFace(model), HuggingFace(model, static=True)], []
    except ImportError as error:
        return on_keras, [f"transformers: left out, {error}"]


def _steering_peers(on_keras: list[Any], model: Any) -> tuple[list[Contender], list[str]]:
    hooked = [*on_keras, Hooked(model)]
    try:
        return [*hooked, Repeng(model)], []
    except ImportError as error:
        return hooked, [f"repeng: left out, {error}"]


def backbone_of(config: dict[str, Any], family: str, dtype: str, seed: int = 0) -> keras.Model:
    """Build a backbone with random weights.

    They are spread further than new ones are, so that texts vary and the greedy choice is clear.
    """
    kinds = {"gpt2": keras_hub.models.GPT2Backbone, "gemma": keras_hub.models.GemmaBackbone}
    keras.utils.set_random_seed(seed)
    backbone = kinds[family](**config, dtype=dtype)
    spread(backbone, seed)
    return backbone
