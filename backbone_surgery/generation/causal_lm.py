"""`CachedCausalLM`: a KerasHub causal LM task over any backbone graph, edited or not."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import keras_hub
import numpy as np
from rich.progress import track

from backbone_surgery import graph, hosts
from backbone_surgery.caching.model import BackboneWithCache
from backbone_surgery.caching.rewire import rewire
from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation import cached_call, request, score
from backbone_surgery.generation.captures import pack
from backbone_surgery.generation.chat_task import ChatTask
from backbone_surgery.generation.controls import check_by_hand
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.lookup import look_up
from backbone_surgery.generation.penalties import Penalized, Penalties, read_penalties
from backbone_surgery.generation.presets import Presets
from backbone_surgery.generation.programs import Programs
from backbone_surgery.generation.prompts import Prompts, check_preprocessor, text_alone
from backbone_surgery.generation.run_batch import Batch, Row, run_batch
from backbone_surgery.generation.samplers import Strategy, get_sampler, make_strategy
from backbone_surgery.generation.score import InterceptFn
from backbone_surgery.numbers import check_count, check_flag
from backbone_surgery.opening.logits import Logits
from backbone_surgery.opening.model import EditedBackbone, check_names
from backbone_surgery.opening.open import open_backbone
from backbone_surgery.opening.training import TrainsOwnLayers
from backbone_surgery.rewriting.rewrite import by_control

_SEQUENCE_CHECK = 16
"""Steps between two looks at the text, where there are stop sequences."""


@keras.saving.register_keras_serializable("backbone_surgery")
class CachedCausalLM(TrainsOwnLayers, Presets, ChatTask, keras_hub.models.CausalLM):
    """A causal language model that generates from the graph of its backbone, with a cache.

    It is a KerasHub task: `fit`, `evaluate`, `compile` and the rest behave as upstream. Unlike
    upstream it generates from the layer graph of the backbone, whatever was changed in it.

    Args:
        backbone: a `keras_hub` backbone, what `operate` made of one, or a plain Functional model
            cloned from one.
        preprocessor: a `keras_hub.models.CausalLMPreprocessor`, or `None` to pass and get arrays.
        trust: layers of the graph, or their names, to use without a probe; see `rewire`.
        precision: of products of float32 in `generate` and `stream`: `"highest"` for whole float32,
            where a GPU and a TPU round what goes into them by default; `"high"`, `"default"`, or
            `None` for what JAX is set to.

    Attributes:
        backbone: the argument, as it was passed.
        backbone_with_cache: the cached graph, see `rewire`.
        rewired_by: `trust` and `precision`, as they were passed.
        max_positions: how many positions the model has learned; `None` if it is not limited.

    Raises:
        SurgeryError: no family opens the backbone, its cached graph would be wrong, or another
            argument does not fit.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, numpy as np
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> prompt = {"token_ids": np.array([[1, 2, 3]]), "padding_mask": np.ones((1, 3))}
        >>> lm.generate(prompt, max_new_tokens=4, stop_token_ids=None)["token_ids"].shape
        (1, 7)
    """

    @graph.building()
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Wait while another is made: Keras changes the bases of the class meanwhile."""
        return super().__new__(cls, *args, **kwargs)

    @graph.building()
    def __init__(
        self,
        backbone: keras.Model,
        preprocessor: Any = None,
        trust: Iterable[Any] = (),
        precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_preprocessor(preprocessor)
        opened = open_backbone(backbone)
        head = opened.token_embedding
        self.backbone = backbone
        self.preprocessor = preprocessor
        inputs = {t.name: t for t in opened.inputs if t.name in ("token_ids", "padding_mask")}
        check_by_hand(opened.inputs_by_hand.values())
        inputs = {**inputs, **opened.inputs_by_hand}
        hidden_states = opened.hidden_states(opened(inputs))
        object.__setattr__(self, "opened", opened)
        object.__setattr__(self, "trained_layers", opened.trained_layers)
        super().__init__(inputs=inputs, outputs=Logits(head)(hidden_states), **kwargs)
        self.max_positions = opened.max_positions
        trust = list(trust) if isinstance(trust, Iterator) else trust
        object.__setattr__(self, "rewired_by", (trust, precision))
        self._rewire()

    def _rewire(self) -> None:
        """Derive the cached graph from the graph as it is, and programs over it."""
        trust, precision = self.rewired_by
        cached = rewire(self.opened, trust)
        programs = Programs(cached, self.opened.token_embedding, precision=precision)
        object.__setattr__(self, "backbone_with_cache", cached)
        object.__setattr__(self, "programs", programs)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream, on a dict of exactly the inputs of the model."""
        check_names(self, inputs, controls=self._controls)
        return super().__call__(inputs, *args, **kwargs)

    def stateless_call(
        self, trainable_variables: Any, non_trainable_variables: Any, inputs: Any, **kwargs: Any
    ) -> Any:
        """As a call: `fit` and `predict` come this way on JAX."""
        check_names(self, inputs, controls=self._controls)
        return super().stateless_call(
            trainable_variables, non_trainable_variables, inputs, **kwargs
        )

    @property
    def _controls(self) -> set[str]:
        return {*self.opened.control_inputs, *by_control(self.opened.rewrites)}

    rewired_by: tuple[Iterable[Any], str | None]
    opened: EditedBackbone
    backbone_with_cache: BackboneWithCache
    programs: Programs

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """Quantise the backbone, as KerasHub's task does; what a rewrite put in stays as it is.

        Args:
            mode: `"int8"`, `"int4"`, `"gptq"` or `"awq"`; see `keras.Model.quantize`, as for what
                follows.
            config: for GPTQ and AWQ `keras.quantizers.GPTQConfig` or `AWQConfig`, with texts and a
                tokenizer. They are calibrated on the backbone without its edit.
            **kwargs: `filters`.

        Raises:
            SurgeryError: it is a mode of Keras that KerasHub's models do not have, such as
                `"float8"`; a layer is quantised already, or none is chosen; for
                GPTQ and AWQ, KerasHub does not say where the blocks are, they take more than hidden
                states, as Gemma 4's, texts are longer than the model's positions, there is LoRA,
                processes share the model, or for GPTQ weights are in half precision.
            ValueError: Keras knows no such mode.
        """
        self.opened.quantize(mode, config, **kwargs)
        self._rewire()
        self.train_function = self.test_function = self.predict_function = None

    def compile(
        self, optimizer: Any = "auto", loss: Any = "auto", *, sampler: Any = "auto", **kwargs: Any
    ) -> None:
        """Configure training and generation, as `keras_hub.models.CausalLM.compile`.

        Args:
            optimizer: see KerasHub.
            loss: see KerasHub.
            sampler: a sampler's name, config or instance. `"auto"` takes what KerasHub's own task
                for the architecture takes.
            **kwargs: see KerasHub. `run_eagerly` and `jit_compile` are for `fit` and the like:
                generation is compiled whatever they say.
        """
        automatic = isinstance(sampler, str) and sampler == "auto"
        sampler = get_sampler(self.opened.family.sampler if automatic else sampler)
        make_strategy(sampler)
        super().compile(optimizer=optimizer, loss=loss, sampler=sampler, **kwargs)

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """As upstream; of a preprocessor that knows images, the text alone."""
        packed = super().preprocess_samples(x, y, sample_weight)
        return packed if self.preprocessor is None else text_alone(x, packed, self.input)

    def generate(
        self,
        inputs: Any,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Any = "auto",
        stop_sequences: Any = None,
        strip_prompt: bool = False,
        controls: Mapping[str, Any] | None = None,
        seed: Any = None,
        batch_size: int | None = None,
        verbose: int = 0,
        return_captures: bool = False,
        lookup: int | None = None,
        penalties: Penalties | None = None,
        response_format: ResponseFormat | list[ResponseFormat | None] | None = None,
    ) -> Any:
        """Generate from prompts, by the sampler that the model was compiled with.

        Args:
            inputs: a string or a list of strings; or a dict of `token_ids` int[batch, length] and
                `padding_mask` [batch, length], the only way without a preprocessor.
            max_length: tokens of a row at most, its prompt and start token included. Defaults to
                the sequence length of the preprocessor, or to the width of the arrays. Unlike
                KerasHub, which cuts a longer prompt short, this refuses it.
            max_new_tokens: new tokens of a row at most, instead of `max_length`.
            stop_token_ids: `"auto"` (end tokens of the tokenizer, the family and the folder's
                `generation_config.json`), `None`, or token ids. The stop token ends the row and is
                part of it.
            stop_sequences: strings or sequences of token ids; a row ends right after the first.
            strip_prompt: whether to return the new part alone.
            controls: `{name: value}` for the rewrites that declare controls. Changing values
                compiles nothing; a `Schedule` of more than 64 steps does, once for each doubling,
                and a `Patch` of another number of positions or a `Clamp` of more features.
            seed: an int, the seed of every row, or one for each row. A row's text depends on its
                seed and prompt alone. Without one, each call and row draws differently.
            batch_size: how many rows to run at once; all by default.
            verbose: 1 shows a progress bar, of the batches.
            return_captures: whether to return what the graph captures too, see `Capture`.
            lookup: how many tokens to guess at once from what followed the same tokens earlier in
                the text. One pass checks them, so texts that repeat themselves come faster. The
                text stays the same, but for what rounds otherwise in a pass of several tokens. 4
                is good for most texts, and 8 where the prompt comes back nearly as it is, as in an
                edit. One prompt at a time; no beams, and no penalties.
            penalties: against repetition, and for or against tokens; see `Penalties`. No beams.
            response_format: what the new text has to be, such as JSON of a schema; for all rows, or
                a list with one or `None` for each. Not with `lookup`. Another format compiles
                nothing, unless it is four times as large, or there are twice as many at once.

        Returns:
            With a preprocessor text: a string for a string, else a list with one for each row, for
            arrays too. Without one a dict of right-padded `token_ids` int32[batch, length] and
            `padding_mask` bool[batch, length]. With `return_captures`, a pair of that and
            `GeneratedActivations`.

        Raises:
            SurgeryError: bad input, before anything is compiled.
        """
        flags = {"strip_prompt": strip_prompt, "return_captures": return_captures}
        for name, flag in {**flags, "verbose": verbose}.items():
            check_flag("generate", name, flag)
        if batch_size is not None:
            check_count("generate", "batch_size", batch_size, "rows")
        with hosts.telling(self):
            asked = request.read_request(
                self,
                inputs,
                max_length,
                max_new_tokens,
                stop_token_ids,
                stop_sequences,
                controls,
                seed,
                bool(return_captures),
                response_format=response_format,
            )
            prompts, batch = asked.prompts.rows, asked.batch
            at_once = min(len(prompts), batch_size or len(prompts))
            strategy = self._strategy(lookup, at_once, penalties, batch, "generate")
        chunk = _SEQUENCE_CHECK if batch.stops.by_sequence else None
        rows: list[Row] = []
        parts = list(batch.split(batch_size))
        for part in track(parts, "generating") if verbose else parts:
            *_, finished = run_batch(self.programs, strategy, part, chunk)
            rows.extend(finished)
        result = asked.results([row.new for row in rows], strip_prompt)
        if not return_captures:
            return result
        run = [np.append(p, row.new[:-1]) for p, row in zip(prompts, rows, strict=True)]
        return result, pack(run, [row.captures for row in rows])

    def _strategy(
        self,
        lookup: int | None,
        rows: int,
        penalties: Penalties | None,
        batch: Batch,
        operation: str,
    ) -> Strategy:
        """Return how tokens of a batch are chosen, for some rows at once."""
        strategy = make_strategy(self.sampler)
        penalties = read_penalties(penalties, self.programs.head.input_dim, operation)
        if penalties is not None:
            strategy = Penalized(strategy, penalties, operation)
        has_format = any(batch.formats)
        states = self.backbone_with_cache.states
        return look_up(strategy, lookup, rows, states, has_format, operation)

    def stream(
        self,
        inputs: Any,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Any = "auto",
        stop_sequences: Any = None,
        strip_prompt: bool = False,
        controls: Mapping[str, Any] | None = None,
        seed: Any = None,
        chunk_size: int = 8,
        lookup: int | None = None,
        penalties: Penalties | None = None,
        response_format: ResponseFormat | list[ResponseFormat | None] | None = None,
    ) -> Iterator[Any]:
        """Generate, and yield text as it comes: the pieces join to what `generate` returns.

        Args:
            inputs: a string, for pieces of text, or a list of strings, for lists of pieces.
            max_length: see `generate`, as for all that follow.
            max_new_tokens: see `generate`.
            stop_token_ids: see `generate`.
            stop_sequences: see `generate`.
            strip_prompt: see `generate`.
            controls: see `generate`.
            seed: see `generate`.
            chunk_size: tokens between two pieces, after a first piece of one token.
            lookup: see `generate`.
            penalties: see `generate`.
            response_format: see `generate`.

        Yields:
            The next piece of text. The first holds the prompt, unless it is stripped, and comes as
            soon as the prompt was run. A character that takes several tokens is held back until it
            is whole. While you hold a later piece the next one is computed, so a change of weights
            takes effect one piece later.

        Raises:
            SurgeryError: bad input, before anything is compiled; or there is no preprocessor.
        """
        if self.preprocessor is None:
            raise SurgeryError(
                "stream: expected a preprocessor, to make text. Received a model without one. "
                "Attach a preprocessor, or use `generate`."
            )
        check_count("stream", "chunk_size", chunk_size, "tokens")
        check_flag("stream", "strip_prompt", strip_prompt)
        with hosts.telling(self):
            prompts, _, batch = request.read_request(
                self,
                inputs,
                max_length,
                max_new_tokens,
                stop_token_ids,
                stop_sequences,
                controls,
                seed,
                operation="stream",
                response_format=response_format,
            )
            strategy = self._strategy(lookup, len(prompts.rows), penalties, batch, "stream")
        return self._stream(prompts, batch, strategy, strip_prompt, chunk_size)

    def _stream(
        self, prompts: Prompts, batch: Batch, strategy: Any, strip_prompt: bool, chunk: int
    ) -> Iterator[Any]:
        shown = [""] * len(prompts.rows)
        steps = chunk if strategy.width == 1 else None  # beams change until the end
        # Processes of one mesh read what `decode` copies for each of them, and beams their last.
        at_once = steps is not None and not hosts.span(self.backbone_with_cache)
        for rows in run_batch(self.programs, strategy, batch, steps, at_once):
            pieces = []
            for i, row in enumerate(rows):
                text = batch.stops.render(prompts.rows[i], row.new, strip_prompt)
                if not row.finished:
                    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
                piece = text[len(shown[i]) :] if text.startswith(shown[i]) else ""
                shown[i] += piece
                pieces.append(piece)
            if any(pieces):
                yield pieces[0] if prompts.scalar else pieces

    def call_with_cache(
        self,
        token_ids: Any,
        cache: Any,
        cache_update_index: Any,
        positions: Any = None,
        cache_mask: Any = None,
        controls: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run the next tokens over a cache; the counterpart of KerasHub's method of this name.

        Args:
            token_ids: int[batch, time].
            cache: from `new_cache(lm.backbone_with_cache, batch, length)` or the last call.
            cache_update_index: int, the slot of the first of the tokens.
            positions: int[batch, time]; the slots themselves by default.
            cache_mask: bool[batch, length], false where a slot holds padding; none by default.
            controls: `{input name: array[batch, ...]}`.

        Returns:
            `logits` float[batch, time, vocabulary], `hidden_states` float[batch, time,
            hidden_dim], and the updated cache.

        Raises:
            SurgeryError: an argument does not fit the others or the model, or the cache has no room
                for the tokens. Inside a compiled function only shapes are checked: there a slot
                past the end overwrites the last ones.
        """
        arguments = {
            "token_ids": token_ids,
            "cache": cache,
            "cache_update_index": cache_update_index,
            "positions": positions,
            "cache_mask": cache_mask,
        }
        sizes = (self.programs.head.input_dim, self.max_positions)
        outputs = self.backbone_with_cache(
            cached_call.complete(self.backbone_with_cache, *sizes, arguments, controls)
        )
        hidden_states = outputs["hidden_states"]
        logits = self.programs.head(hidden_states, reverse=True)
        return logits, hidden_states, outputs["cache"]

    def score(
        self,
        token_ids: Any,
        padding_mask: Any = None,
        scoring_mode: str = "logits",
        layer_intercept_fn: InterceptFn | None = None,
        target_ids: Any = None,
        controls: Mapping[str, Any] | None = None,
        prompt_lengths: Any = None,
    ) -> Any:
        """Score token ids by the edited graph, uncached; as KerasHub's method of this name.

        It may be differentiated: by `jax.grad`, say, of a function that calls it.

        Args:
            token_ids: int[batch, time].
            padding_mask: bool[batch, time], false at padding; no padding by default.
            scoring_mode: `"logits"` or `"loss"`.
            layer_intercept_fn: `(activations, index) -> activations`, float[batch, time,
                hidden_dim]. It is called on the embeddings with index -1, and on the output of each
                block with the block's index in the edited graph. What it returns takes their place.
                (KerasHub's own Gemma ignores what it returns for index -1.)
            target_ids: int[batch, time], the tokens to take the loss against, for mode `"loss"`.
            controls: as of `generate`, or `{input name: array[batch, ...]}`; those left out take
                their defaults.
            prompt_lengths: how many tokens of a row are its prompt, an int or one for each row, so
                that rewrites with `tokens` of `"prompt"` or `"generated"` act as they did when the
                rest was generated. By default all tokens count as the prompt.

        Returns:
            Logits float[batch, time, vocabulary], or the loss of each token float[batch, time].

        Raises:
            SurgeryError: an argument does not fit.
        """
        return score.score(
            self,
            token_ids,
            padding_mask,
            scoring_mode,
            layer_intercept_fn,
            target_ids,
            controls,
            prompt_lengths,
        )
