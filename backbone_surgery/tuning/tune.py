"""Tune: find which method, which blocks and which strength steer best, by the user's own judge."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.progress import Progress

from backbone_surgery import hosts
from backbone_surgery.errors import SurgeryError, closest, shown
from backbone_surgery.files import as_path
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.fingerprint import digest
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.numbers import is_int
from backbone_surgery.tuning.candidates import (
    NAMES,
    STEERING,
    UNEDITED,
    Candidate,
    Interventions,
    Steering,
    blocks_of,
    learned_vector,
)
from backbone_surgery.tuning.judging import Judge, Perplexity, as_judged, ask
from backbone_surgery.tuning.record import Measured, Record
from backbone_surgery.tuning.result import Trial, Tuning
from backbone_surgery.vectors.activations import check_batch_size, check_task
from backbone_surgery.vectors.directions import METHODS, check_method
from backbone_surgery.vectors.pairs import check_pairs
from backbone_surgery.vectors.vector import ControlVector, residual_norms
from backbone_surgery.weights.tree import weights_digest

_KEPT = 3
"""One of so many candidates goes on to the next round."""


def tune(
    lm: CachedCausalLM,
    pairs: Iterable[tuple[Any, Any]],
    judge: Judge,
    prompts: Sequence[str],
    methods: Sequence[str] = ("mean_diff", "pca_diff", "logistic", "learned", "reft"),
    budget: int = 1200,
    seed: int = 0,
    verbose: int = 1,
    *,
    vectors: Mapping[str, ControlVector] | None = None,
    name: str = "tuned",
    fluency: Judge | None = None,
    max_new_tokens: int = 60,
    batch_size: int = 64,
    rank: int = 4,
    steps: int = 80,
    orthogonal_to: Sequence[ControlVector] = (),
    file: str | Path | None = None,
) -> Tuning:
    """Find an edit that moves what is written both ways, and keeps it fluent.

    Each method is tried at each block, at runs of blocks, and at several strengths. All of it are
    rows of few batches. The worse two thirds are dropped, and the rest tried on more prompts, until
    few are left (successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943). What is best
    on one half of the prompts is reported on the other. A candidate counts by the harmonic mean of
    the judge at strength 1, one less the judge at -1, and the fluency, as AxBench (Wu et al. 2025,
    arXiv:2501.17148) joins its ratings.

    Args:
        lm: the model, compiled with the sampler to judge it by.
        pairs: `[(positive text, negative text), ...]`, as of `ControlVector.train`.
        judge: a function of a list of texts, without their prompts, that returns a number for each,
            from 0 for the negative to 1 for the positive side.
        prompts: at least two; half of them are searched on.
        methods: those of `ControlVector.train`; `"learned"`, a direction for each block that makes
            the texts of the pairs likely, learned at up to half the length of the hidden states
            there, and tried at any; `"reft"`, a `Reft` of one block that does. May be empty if
            there are `vectors`.
        budget: about how many texts to write in the search, for each method: at least two prompts
            for each candidate and round. The report writes two more for each of its prompts.
        seed: of the search; the same seed gives the same result.
        verbose: 1 shows a progress bar.
        vectors: directions of your own to search in the same way, of a file or another library, by
            a name for each: with a direction for every block. Their lengths do not matter.
        name: of the control of the edits.
        fluency: a function as `judge` is, from 0 to 1 for texts that are as they should be. By
            default the perplexity of the text under the unedited model, next to what it writes
            itself: 1 at the same or less, and in inverse proportion beyond.
        max_new_tokens: of each text.
        batch_size: texts to write at once.
        rank: of `"reft"`.
        steps: how many steps the methods that learn take, of 16 texts.
        orthogonal_to: vectors that directions are made orthogonal to, so that what these steer
            stays. `"reft"` has no direction: leave it out.
        file: where to keep what was measured: a search that was killed goes on from it. It does not
            know `judge` and `fluency`: for others take another file.

    Returns:
        The result: `best` is an edit for `operate`.

    Raises:
        SurgeryError: bad texts, methods or settings, a judge that returns anything but numbers from
            0 to 1, or the file of another search.
    """
    check_task(lm, "tune")
    listed, texts = check_pairs(pairs), _check_prompts(lm, prompts)
    given = _check_vectors(lm, vectors)
    others = _check_methods(methods, orthogonal_to, bool(given))
    check_batch_size(batch_size, "tune")
    numbers = {"budget": budget, "rank": rank, "steps": steps, "max_new_tokens": max_new_tokens}
    _check_numbers(lm, numbers, seed)
    for what, function in {"judge": judge, "fluency": fluency}.items():
        if not callable(function) and (function is not None or what == "judge"):
            raise SurgeryError(
                f"tune at '{what}': expected a function of a list of texts. Received "
                f"{shown(function)}. Pass one that returns a number from 0 to 1 for each."
            )
    seed = int(seed)
    Random(seed).shuffle(texts)
    strategy = make_strategy(lm.sampler)
    settings = [budget, seed, max_new_tokens, rank, steps, fluency is None, strategy.settings()]
    apart = [dict(vector.directions) for vector in others]
    own = {key: dict(vector.directions) for key, vector in given.items()}
    model = [weights_digest(lm.opened), lm.programs.outline, dict(lm.opened.defaults)]
    facts = [model, listed, texts, [*methods], own, apart, settings, digest(strategy.key)]
    path = None if file is None else as_path(file, "tune")
    search = _Search(
        texts=texts,
        judge=judge,
        fluent=Perplexity(lm, batch_size).losses if fluency is None else as_judged(fluency),
        is_relative=fluency is None,
        options={"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        seed=seed,
        budget=budget,
        record=Record(path, hosts.digest(facts).hex()),
    )
    steering = Steering(lm, name, residual_norms(lm))
    learning = {"steps": steps, "seed": seed}

    def prepare(method: str) -> Any:
        if method == "reft":
            return Interventions(lm, name, rank, listed, learning)
        if method == "learned":
            vector = learned_vector(lm, listed, steering.size, learning)
        elif method in given:
            vector = given[method]
        else:
            vector = ControlVector.train(lm, listed, method=method, verbose=0)
        steering.add(method, vector.orthogonal_to(*others) if others else vector)
        return steering

    return search.run(name, [*methods, *given], steering, prepare, verbose)


@dataclass
class _Search:
    """Measures candidates on prompts, once each: the first half to choose by, the other to report.

    Attributes:
        texts: the prompts.
        judge: see `tune`.
        fluent: gives the fluency of texts by their prompts, or what it is derived from.
        is_relative: whether it gives losses, to be compared with those of the unedited model.
        options: for `generate`.
        seed: of the first prompt; the next ones count up.
        budget: see `tune`.
        record: of what was measured.
    """

    texts: list[str]
    judge: Judge
    fluent: Callable[[list[str], list[str]], np.ndarray]
    is_relative: bool
    options: dict[str, Any]
    seed: int
    budget: int
    record: Record

    def run(
        self,
        name: str,
        methods: Sequence[str],
        steering: Steering,
        prepare: Callable[[str], Any],
        verbose: int,
    ) -> Tuning:
        """Try each method, and report its best."""
        half, end = len(self.texts) // 2, len(self.texts)
        found: dict[str, tuple[Any, Candidate]] = {}
        with Progress(disable=not verbose) as progress:
            bar = progress.add_task("tuning", total=len(methods))
            self.measure(steering, [UNEDITED], 0, half)
            self.measure(steering, [UNEDITED], half, end)
            for method in methods:
                progress.update(bar, description=method)
                runner = prepare(method)
                best = self.halve(runner, runner.candidates(method), half)
                self.measure(runner, [best], half, end)
                found[method] = runner, best
                progress.advance(bar)
        report = [self.trial(best, half, end) for _, best in found.values()]
        tried = {key[0] for key in self.record.known} - {UNEDITED}
        return Tuning(
            name,
            self.trial(UNEDITED, half, end),
            tuple(sorted(report, key=lambda t: -t.score)),
            {method: runner.edit(best) for method, (runner, best) in found.items()},
            tuple(self.trial(c, 0, half) for c in sorted(tried, key=repr)),
        )

    def halve(self, runner: Any, candidates: list[Candidate], half: int) -> Candidate:
        """Return the best of some candidates, dropping the worse ones round by round."""
        rounds = max(int(np.ceil(np.log(len(candidates)) / np.log(_KEPT))), 1)
        stop = 0
        for _ in range(rounds):
            start, count = stop, len(candidates)
            stop = min(max(self.budget // rounds // (2 * count), start + 2), half)
            if stop > start:
                self.measure(runner, candidates, start, stop)
            trials = [self.trial(candidate, 0, half) for candidate in candidates]
            trials.sort(key=lambda t: -t.score)
            candidates = [t.candidate for t in trials if t.candidate][: -(-count // _KEPT)]
        return candidates[0]

    def measure(self, runner: Any, candidates: list[Candidate], start: int, stop: int) -> None:
        """Have candidates write from some prompts, and judge it."""
        new = [c for c in candidates if self.record.get(c, start, stop) is None]
        if not new:
            return
        signs, index = (1, -1), range(start, stop)
        rows = [(c, i, sign) for c in new for i in index for sign in signs]
        prompts = [self.texts[i] for _, i, _ in rows]
        written = runner.lm.generate(
            prompts,
            controls=runner.controls([(c, sign) for c, _, sign in rows]),
            seed=[(self.seed + i) % 2**32 for _, i, _ in rows],
            strip_prompt=True,
            **self.options,
        )
        judged = ask(self.judge, written, "judge")
        fluent = self.fluent(prompts, written)
        values = np.stack([judged, fluent], axis=-1).reshape(len(new), len(index), 2, 2)
        self.record.add(new, start, stop, [*values])

    def trial(self, candidate: Candidate, start: int, stop: int) -> Trial:
        """Return what came of a candidate on the prompts of a range, as far as it was tried."""
        measured: Measured = self.record.all_of(candidate, start, stop)
        judged, fluent = measured[..., 0].mean(axis=0), measured[..., 1].mean(axis=0)
        if self.is_relative:
            alone = self.record.all_of(UNEDITED, 0, len(self.texts))[..., 1].mean()
            fluent = np.minimum(np.exp(alone - fluent), 1)
        own = None if candidate == UNEDITED else candidate
        return Trial(own, float(judged[0]), float(judged[1]), float(fluent.min()), len(measured))


def _check_prompts(lm: CachedCausalLM, prompts: Any) -> list[str]:
    texts = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else []
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


def _check_numbers(lm: CachedCausalLM, numbers: dict[str, Any], seed: Any) -> None:
    for what, value in numbers.items():
        if not is_int(value) or value < 1:
            raise SurgeryError(
                f"tune at '{what}': expected an integer of 1 or more. Received {shown(value)}. "
                "Leave it out for the usual."
            )
    if not is_int(seed) or not 0 <= seed < 2**31:
        raise SurgeryError(
            f"tune at 'seed': expected an integer from 0 to {2**31 - 1}. Received {shown(seed)}. "
            "Leave it out for 0."
        )
    size = lm.opened.token_embedding.output_dim
    if numbers["rank"] >= size:
        raise SurgeryError(
            f"tune at 'rank': expected fewer than {size}, the size of the hidden states. Received "
            f"{numbers['rank']}. Ranks such as 4 are usual."
        )


def _check_vectors(lm: CachedCausalLM, vectors: Any) -> dict[str, ControlVector]:
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
                f"'{name}'. Received {received}. Train it on all blocks of this model."
            )
    return own


def _check_methods(methods: Any, orthogonal_to: Any, has_vectors: bool) -> list[ControlVector]:
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
