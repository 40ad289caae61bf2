"""Tune: find which method, which blocks and which strength steer best, by the user's own judge."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.progress import Progress

from backbone_surgery import hosts
from backbone_surgery.files import as_path
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.described import described
from backbone_surgery.generation.fingerprint import digest
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.numbers import check_count
from backbone_surgery.tuning.candidates import UNEDITED, Candidate, Steering
from backbone_surgery.tuning.checks import (
    check_autoencoders,
    check_judges,
    check_methods,
    check_numbers,
    check_prompts,
    check_vectors,
)
from backbone_surgery.tuning.judging import Judge, Perplexity, added, as_judged, ask
from backbone_surgery.tuning.methods import Methods
from backbone_surgery.tuning.record import Measured, Record
from backbone_surgery.tuning.result import Trial, Tuning
from backbone_surgery.vectors.activations import check_task
from backbone_surgery.vectors.norms import residual_norms
from backbone_surgery.vectors.pairs import check_pairs
from backbone_surgery.vectors.vector import ControlVector

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
    autoencoders: Mapping[int, str | Path] | None = None,
    file: str | Path | None = None,
) -> Tuning:
    """Find an edit that moves what is written both ways, and keeps it fluent.

    Each method is tried at each block, at runs of blocks, and at several strengths. All of it are
    rows of few batches. The worse two thirds are dropped, and the rest tried on more prompts, until
    few are left (successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943). The best of
    each method write once more, on new seeds, which decides between the methods: what won among
    many candidates was lucky too. All that is on one half of the prompts; the other half is
    reported. A candidate counts by the harmonic mean of
    the judge at strength 1, one less the judge at -1, and the fluency, as AxBench (Wu et al. 2025,
    arXiv:2501.17148) joins its ratings.

    Args:
        lm: the model, compiled with the sampler to judge it by.
        pairs: `[(positive text, negative text), ...]`, as of `ControlVector.train`.
        judge: a function of a list of texts, without their prompts, that returns a number for each,
            from 0 for the negative to 1 for the positive side; True counts as 1.
        prompts: at least two; half of them are searched on.
        methods: those of `ControlVector.train`, and others that learn. Directions, one for each
            block: `"learned"`, which makes the texts of the pairs likely; `"bipo"`, which makes one
            text of a pair likelier than the other (BiPO, Cao et al. 2024, arXiv:2406.00045);
            `"reft_r1"`, which is learned to detect and to steer (ReFT-r1, Wu et al. 2025,
            arXiv:2501.17148); `"sae"`, the decoder row of the one feature of each of
            `autoencoders` that tells the sides apart best. The first two are learned at up to half
            the length of the hidden states; all are tried at any. Or rewrites: `"reft"`, a `Reft`
            of one block, and `"lora"`, a `LowRank` at the values of all, both of which make the
            texts likely. May be empty if there are `vectors`.
        budget: about how many texts to write in the search, for each method: at least two prompts
            for each candidate and round, and a prompt with other seeds where there are few. The
            last decision takes an eighth of it more, the report two for each of its prompts.
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
        rank: of `"reft"` and `"lora"`.
        steps: how many steps the methods that learn take, of 16 texts.
        orthogonal_to: vectors that directions are made orthogonal to, so that what these steer
            stays. `"reft"` and `"lora"` have no direction: leave them out.
        autoencoders: for method `"sae"`, `{block: folder}` of sparse autoencoders of the output of
            blocks, as `SparseAutoencoder` reads them.
        file: where to keep what was measured: a search that was killed goes on from it. It does not
            know `judge` and `fluency`: for others take another file. The model must be one whose
            edit a recipe can hold.

    Returns:
        The result: `best` is an edit for `operate`.

    Raises:
        SurgeryError: bad texts, methods or settings, a judge that returns anything but numbers from
            0 to 1, or the file of another search.
    """
    check_task(lm, "tune")
    listed, texts = check_pairs(pairs), check_prompts(lm, prompts)
    given = check_vectors(lm, vectors)
    others = check_methods(methods, orthogonal_to, bool(given), len(listed))
    encoders = check_autoencoders(lm, autoencoders, "sae" in methods)
    check_count("tune", "batch_size", batch_size, "texts")
    numbers = check_numbers(lm, budget, rank, steps, max_new_tokens, seed)
    budget, rank, steps, max_new_tokens, seed = numbers
    check_judges(judge, fluency)
    Random(seed).shuffle(texts)
    strategy = make_strategy(lm.sampler)
    settings = [budget, seed, max_new_tokens, rank, steps, fluency is None, strategy.settings()]
    apart = [dict(vector.directions) for vector in others]
    own = {key: dict(vector.directions) for key, vector in given.items()}
    path, facts = None if file is None else as_path(file, "tune"), ""
    if path is not None:
        model = json.dumps({**described("tune", lm), "versions": None}, sort_keys=True)
        asked = [listed, texts, [*methods], own, apart, settings, digest(strategy.key), encoders]
        facts = hosts.digest([model, *asked]).hex()
    half = len(texts) // 2
    search = _Search(
        searched=texts[:half],
        reported=texts[half:],
        judge=judge,
        fluent=Perplexity(lm, batch_size).losses if fluency is None else as_judged(fluency),
        is_relative=fluency is None,
        options={"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        seed=seed,
        budget=budget,
        record=Record(path, facts),
    )
    steering = Steering(lm, name, residual_norms(lm))
    learning = {"steps": steps, "seed": seed}
    ways = Methods(lm, name, listed, rank, steering, learning, given, others, encoders)
    return search.run(name, [*methods, *given], steering, ways.prepare, verbose)


@dataclass
class _Search:
    """Measures candidates on draws: a prompt and a seed each, the same ones for all candidates.

    The first draws are the prompts to report on. Then come the draws of the search, round by round,
    and from `decisive` on those that decide between methods.

    Attributes:
        searched: the prompts to choose by, again and again.
        reported: the prompts to report on.
        judge: see `tune`.
        fluent: gives the fluency of texts by their prompts, or what it is derived from.
        is_relative: whether it gives losses, to be compared with those of the unedited model.
        options: for `generate`.
        seed: of the first draw; the next ones count up.
        budget: see `tune`.
        record: of what was measured.
    """

    searched: list[str]
    reported: list[str]
    judge: Judge
    fluent: Callable[[list[str], list[str]], np.ndarray]
    is_relative: bool
    options: dict[str, Any]
    seed: int
    budget: int
    record: Record

    @property
    def decisive(self) -> int:
        """The first of the draws that decide; a search takes two in a round, or its budget."""
        return len(self.reported) + self.budget + 64

    def run(
        self,
        name: str,
        methods: Sequence[str],
        steering: Steering,
        prepare: Callable[[str], Any],
        verbose: int,
    ) -> Tuning:
        """Try each method, decide, and report the best of each."""
        reported, decisive = len(self.reported), self.decisive
        end = decisive + max(self.budget // 16, 2)
        found: dict[str, tuple[Any, Candidate]] = {}
        with Progress(disable=not verbose) as progress:
            bar = progress.add_task("tuning", total=len(methods))
            self.measure(steering, [UNEDITED], 0, reported)
            for method in methods:
                progress.update(bar, description=method)
                runner = prepare(method)
                best = self.halve(runner, runner.candidates(method))
                self.measure(runner, [best], decisive, end)
                self.measure(runner, [best], 0, reported)
                found[method] = runner, best
                progress.advance(bar)
        ends = [best for _, best in found.values()]
        report = [self.trial(best, 0, reported) for best in ends]
        tried = {key[0] for key in self.record.known} - {UNEDITED}
        return Tuning(
            name,
            self.trial(UNEDITED, 0, reported),
            tuple(sorted(report, key=lambda t: -t.score)),
            {method: runner.edit(best) for method, (runner, best) in found.items()},
            tuple(self.trial(best, decisive, end) for best in ends),
            tuple(self.trial(c, reported, decisive) for c in sorted(tried, key=repr)),
        )

    def halve(self, runner: Any, candidates: list[Candidate]) -> Candidate:
        """Return the best of some candidates, dropping the worse ones round by round."""
        rounds = max(int(np.ceil(np.log(len(candidates)) / np.log(_KEPT))), 1)
        first = stop = len(self.reported)
        for _ in range(rounds):
            start, count = stop, len(candidates)
            stop = start + max(self.budget // rounds // (2 * count), 2)
            self.measure(runner, candidates, start, stop)
            trials = [self.trial(candidate, first, stop) for candidate in candidates]
            trials.sort(key=lambda t: -t.score)
            candidates = [t.candidate for t in trials if t.candidate][: -(-count // _KEPT)]
        return candidates[0]

    def measure(self, runner: Any, candidates: list[Candidate], start: int, stop: int) -> None:
        """Have candidates write on some draws, and judge it."""
        new = [c for c in candidates if self.record.get(c, start, stop) is None]
        if not new:
            return
        signs, index = (1, -1), range(start, stop)
        rows = [(c, i, sign) for c in new for i in index for sign in signs]
        prompts = [self.prompt_of(i) for _, i, _ in rows]
        texts = runner.lm.generate(
            prompts,
            controls=runner.controls([(c, sign) for c, _, sign in rows]),
            seed=[(self.seed + i) % 2**32 for _, i, _ in rows],
            **self.options,
        )
        written = added(runner.lm, prompts, texts)
        judged = ask(self.judge, written, "judge")
        fluent = self.fluent(prompts, written)
        values = np.stack([judged, fluent], axis=-1).reshape(len(new), len(index), 2, 2)
        self.record.add(new, start, stop, [*values])

    def prompt_of(self, draw: int) -> str:
        """Return the prompt of a draw."""
        reported = len(self.reported)
        if draw < reported:
            return self.reported[draw]
        return self.searched[(draw - reported) % len(self.searched)]

    def trial(self, candidate: Candidate, start: int, stop: int) -> Trial:
        """Return what came of a candidate on the draws of a range, as far as it was tried."""
        measured: Measured = self.record.all_of(candidate, start, stop)
        judged, fluent = measured[..., 0].mean(axis=0), measured[..., 1].mean(axis=0)
        if self.is_relative:
            alone = self.record.all_of(UNEDITED, 0, len(self.reported))[..., 1].mean()
            fluent = np.minimum(np.exp(alone - fluent), 1)
        own = None if candidate == UNEDITED else candidate
        return Trial(own, float(judged[0]), float(judged[1]), float(fluent.min()), len(measured))
