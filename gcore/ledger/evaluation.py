"""Evaluations: how prompts are split into parts, how part records are combined, pass@k, and the best checkpoint.

An evaluation answers held-out prompts with the current weights. The controllers share the work: each takes parts of
some prompts of one set. The split is a pure function of the set sizes, so every controller computes the same split. A
part is written once, under a key that was absent, and never changed. The evaluation is composed from all stored parts,
so it is the same on every controller, even if two controllers answered the same part. Its transaction compares head, so
that no evaluation is written for weights that a rollback discarded. Parts contain sums and counts; means are computed
only when they are composed.

The best checkpoint depends only on evaluations of versions on head's chain (not of discarded branches). Of equal ones
the earlier step wins, because it needed less training and moved less from the initial model.

pass@k: of n responses to a prompt c are correct. The unbiased estimate of the probability that at least one of k
responses is correct is 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
section 2.1). The simpler 1 - (1 - c/n)^k is biased downwards, because it samples with replacement.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gcore.config.data import ACCURACY, ACCURACY_OR_REWARD, OF_PART, REWARD, EvalSampling
from gcore.ledger.records.chain import Head
from gcore.ledger.records.job import EvalAsked, EvalPart, EvalSample, Evaluation, SourceScore
from gcore.ledger.selection import MOST_BYTES, is_ancestor
from gcore.ledger.transactions import Revisioned, Transaction, TxnKind, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put
from gcore.types import Version

_MANY = 64


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k for one prompt: `c` of `n` responses are correct. Between 0 and 1.

    Exactly 0 for c = 0, exactly 1 for n - c < k, and c/n for k = 1. Otherwise the relative error is about 1e-12, also
    for n of many thousands, where the binomial coefficients have thousands of digits. Takes min(c, k) steps. Raises
    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} correct responses among {n} is not defined")
    if n - c < k:
        return 1.0
    # C(n-c, k) / C(n, k) is the product over j < c of 1 - k / (n-j), and the same with c and k exchanged.
    terms, other = min(c, k), max(c, k)
    if terms < 2:
        return other / n if terms else 0.0
    # A sum of logarithms and expm1 keep the digits of a probability near 0, which 1 - p would lose.
    return -math.expm1(math.fsum(math.log1p(-other / (n - j)) for j in range(terms)))


def mean_pass_at_k(n: int, prompts_by_correct: Mapping[int, int], k: int) -> float:
    """Mean pass@k over prompts with `n` responses each.

    `prompts_by_correct`: how many prompts have how many correct responses. Raises ValueError if there is no prompt, and
    in the cases of `pass_at_k`.
    """
    count = sum(prompts_by_correct.values())
    if count < 1:
        raise ValueError("a mean over no prompts is not defined")
    chances = []
    none, lost, summed = 0.0, 0.0, 0  # none: log probability that none of k is correct, for c = summed
    for c, times in sorted(prompts_by_correct.items()):
        if min(c, k) < _MANY or n - c < k:
            chances.append(times * pass_at_k(n, c, k))
            continue
        # The sum of `pass_at_k`, continued from the previous c: n steps in total for thousands of prompts. `lost`:
        # compensation of rounding (Neumaier summation).
        for j in range(summed, c):
            term = math.log1p(-k / (n - j))
            total = none + term
            lost += (none - total) + term if abs(none) >= abs(term) else (term - total) + none
            none = total
        summed = c
        chances.append(times * -math.expm1(none + lost))
    return math.fsum(chances) / count


def mean_correct(n: int, prompts_by_correct: Mapping[int, int]) -> float:
    """Share of correct responses with `n` responses per prompt (pass@1), with a single rounding.

    `prompts_by_correct`: as in `mean_pass_at_k`. Raises ValueError if there is no response.
    """
    count = sum(prompts_by_correct.values())
    if count < 1 or n < 1:
        raise ValueError("a mean over no responses is not defined")
    return sum(c * times for c, times in prompts_by_correct.items()) / (n * count)


PART_RESPONSES = 64
"""Maximum number of responses per part in small evaluations, so that several controllers share the work."""

MOST_PARTS = 256
"""Maximum number of parts of one evaluation, plus one per set. Larger evaluations have larger parts."""

WHY_CHARACTERS = 200
"""Maximum length in characters of a set's `why_unscored` in the evaluation's record."""


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part of an evaluation: number `number` of `parts`, with prompts `first` to `last` - 1 of set `source`."""

    number: int
    parts: int
    source: str
    first: int
    last: int

    @property
    def prompts(self) -> range:
        """Indexes of the part's prompts in the set."""
        return range(self.first, self.last)


def plan_parts(sizes: Sequence[tuple[str, int, int]]) -> tuple[PartPlan, ...]:
    """Split an evaluation into parts, in the order of the sets.

    `sizes`: name, prompts and responses per prompt of each set.
    """
    responses = sum(prompts * samples for _, prompts, samples in sizes)
    most = max(PART_RESPONSES, -(-responses // MOST_PARTS))
    pieces = []
    for name, prompts, samples in sizes:
        each = max(1, most // samples)
        pieces += [(name, first, min(first + each, prompts)) for first in range(0, prompts, each)]
    return tuple(PartPlan(number, len(pieces), *piece) for number, piece in enumerate(pieces))


def compose_evaluation(
    version: Version,
    plans: Sequence[PartPlan],
    parts: Mapping[int, EvalPart],
    sets: Mapping[str, EvalSampling],
    show: int,
) -> Evaluation:
    """Compose the evaluation of `version` from its stored parts.

    `plans`: result of `plan_parts`. `parts`: the stored parts, by number. `sets`: sampling parameters and metrics of
    each set, in the spec's order. `show`: maximum number of responses kept for display. Raises ValueError if a part is
    missing or does not match its plan.
    """
    for plan in plans:
        part = parts.get(plan.number)
        if part is None or (part.source, part.first, len(part.correct)) != (plan.source, plan.first, len(plan.prompts)):
            raise ValueError(f"part {plan.number} of the evaluation of {version} is missing or does not match its plan")
    ordered = [parts[plan.number] for plan in plans]
    scores, shown = {}, []
    for name, draws in sets.items():
        its = [part for part in ordered if part.source == name]
        if its:
            scores[name] = _score(draws, its)
            shown.append([sample for part in its for sample in part.shown])
    by: Counter[str] = Counter()
    for part in ordered:
        by[part.by] += len(part.correct) * part.samples
    count = sum(score.count for score in scores.values())
    made = Evaluation(
        version=version,
        accuracy=math.fsum(score.accuracy * score.count for score in scores.values()) / count,
        count=count,
        samples=interleave_samples(shown, show),
        by_source=scores,
        unscored=sum(score.unscored for score in scores.values()),
        responses_by=dict(sorted(by.items())),
    )
    return _storable(made)


def _storable(made: Evaluation) -> Evaluation:
    """Drop displayed samples until the record is at most `MOST_BYTES`: the scores of many sets need room too."""
    while made.samples and len(made.encode()) > MOST_BYTES:
        made = made.model_copy(update={"samples": made.samples[: len(made.samples) // 2]})
    return made


def _score(draws: EvalSampling, parts: Sequence[EvalPart]) -> SourceScore:
    by_correct = Counter(correct for part in parts for correct in part.correct)
    count, unscored = sum(by_correct.values()), sum(part.unscored for part in parts)
    scored = count * draws.samples - unscored
    metrics = {}
    if scored:
        metrics[f"mean@{draws.samples}"] = math.fsum(part.reward for part in parts) / scored
        for label in sorted({label for part in parts for label in part.rewards}):
            metrics[f"{OF_PART}{label}"] = math.fsum(part.rewards.get(label, 0.0) for part in parts) / scored
    for k in draws.ks:
        metrics[f"pass@{k}"] = mean_pass_at_k(draws.samples, by_correct, k)
    accuracy = mean_correct(draws.samples, by_correct)
    return SourceScore(
        accuracy=accuracy,
        count=count,
        samples=draws.samples,
        metrics=metrics | {"pass@1": accuracy},
        unscored=unscored,
        why_unscored=next((part.why_unscored for part in parts if part.why_unscored), "")[:WHY_CHARACTERS],
    )


def interleave_samples(by_source: Sequence[Sequence[EvalSample]], count: int) -> tuple[EvalSample, ...]:
    """Up to `count` responses for display, taken round-robin from the sets."""
    row = (one for row in itertools.zip_longest(*by_source) for one in row if one is not None)
    return tuple(itertools.islice(row, count))


def metric_value(evaluation: Evaluation, metric: str) -> float | None:
    """Value of a metric in an evaluation; None if it was not measured.

    `metric`: `accuracy`, `reward`, or one of a held-out set, such as `SET/accuracy` or `SET/pass@4`.
    """
    if metric == ACCURACY:
        return evaluation.accuracy
    if metric == REWARD:
        return evaluation.mean_reward
    name, _, of_set = metric.rpartition("/")
    score = evaluation.by_source.get(name)
    if score is None:
        return None
    return score.accuracy if of_set == ACCURACY else score.metrics.get(of_set)


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The evaluated policy version with the highest value of a metric on a chain."""

    version: Version
    metric: str
    value: float


def best_evaluation(head: Head, evaluations: Iterable[Evaluation], metric: str | None) -> BestEvaluation | None:
    """Find the scheduled evaluation on head's chain with the highest `metric`; of equal ones the earlier step.

    Evaluations that a person requested do not count. None if there is no metric, or no evaluation has it.
    """
    if metric is None:
        return None
    reached = [one for one in evaluations if not one.asked and is_ancestor(head, one.version)]
    metric = resolve_metric(metric, reached)
    found = [
        BestEvaluation(one.version, metric, value)
        for one in reached
        if (value := metric_value(one, metric)) is not None
    ]
    return min(found, key=lambda b: (-b.value, b.version.step, b.version.lineage), default=None)


def evaluations_with_pictures(head: Head, evaluations: Iterable[Evaluation], metric: str | None) -> list[Evaluation]:
    """Return the first, the best and the newest evaluation on head's chain that display generated pictures, by step.

    `metric`: as in `best_evaluation`.
    """
    every = list(evaluations)
    best = best_evaluation(head, every, metric)
    shown = (one for one in every if is_ancestor(head, one.version) and any(sample.picture for sample in one.samples))
    reached = sorted(shown, key=lambda one: one.version.step)
    ends = {one.version for one in (*reached[:1], *reached[-1:])}
    return [one for one in reached if one.version in ends or (best is not None and one.version == best.version)]


def resolve_metric(metric: str, evaluations: Iterable[Evaluation]) -> str:
    """Resolve `ACCURACY_OR_REWARD` to `reward` if any of these evaluations has graded rewards, else to `accuracy`.

    Any other metric is returned unchanged.
    """
    if metric != ACCURACY_OR_REWARD:
        return metric
    return REWARD if any(one.is_graded for one in evaluations) else ACCURACY


def ask(keys: JobKeys, head: Versioned[Head], known: Revisioned | None, asked: EvalAsked) -> Transaction:
    """Request an evaluation, out of schedule, of the step after head's.

    `known`: the previous request, which is replaced. Compares head, so that the request is visible before that step's
    commit. Raises ValueError if `asked` names another step.
    """
    if asked.step != head.record.step + 1:
        raise ValueError(f"step {asked.step} does not follow step {head.record.step}")
    compares = (Compare(keys.head, head.revision), Compare(keys.asked, known.revision if known else 0))
    return Transaction(TxnKind.ASK, compares, (Put(keys.asked, asked.encode()),))


def record_part(keys: JobKeys, part: EvalPart) -> Transaction:
    """Write one part of an evaluation, unless this part or the complete evaluation is already stored."""
    key, whole = keys.eval_part(str(part.version), part.number), keys.evaluation(str(part.version))
    return Transaction(TxnKind.EVAL_PART, (Compare(key, 0), Compare(whole, 0)), (Put(key, part.encode()),))


def record_evaluation(keys: JobKeys, head: Versioned[Head], evaluation: Evaluation) -> Transaction:
    """Write a version's evaluation and delete all parts, including those of discarded versions.

    Compares head: only head's version is evaluated, so no parts of other evaluations are in progress.
    """
    key = keys.evaluation(str(evaluation.version))
    return Transaction(
        TxnKind.EVALUATE,
        (Compare(key, 0), Compare(keys.head, head.revision)),
        (Put(key, evaluation.encode()), Delete(keys.eval_part_prefix, prefix=True)),
    )
