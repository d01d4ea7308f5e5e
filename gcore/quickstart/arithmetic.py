"""The arithmetic example and its judge: sums, held-out sums, and small models that are warm-started on them.

`prepare_arithmetic`, `prepare_arithmetic_judge` and `prepare_judge_adapter` make one folder each (`gcore.quickstart.folder`):

    train.jsonl, eval.jsonl    prompts and answers; no pair of operands is in both (not in the judge's folder)
    model/                     a qwen3 of 1.0M parameters with its own tokenizer (`gcore.quickstart.pretraining`)
    adapter/                   the judge as a low-rank adapter of this model (only `prepare_judge_adapter`)
    manifest.json              the recipe, and size and hash of every other file

The same recipe, seed and number of updates give the same bytes on the same machine and torch version. Across machines the data is
equal, and the model differs by rounding.

A sum is a two-digit number (10 to 99) and a one-digit number (2 to 9), in either order: "47+8=" and "8+47=". A *pair* of operands
is held out in both orders. A keyed hash holds out one pair in seven, separately for sums with and without a carry. The warm start
also has *wide* sums of a three-digit and a one-digit number: with two-digit sums alone the model memorizes many of them, and
reinforcement learning does not generalize to held-out sums. Wide sums that end in a held-out sum ("147+8=") are left out too. The
careless answer (`gcore.quickstart.lessons`) drops the carry ("47+8=45").

The judge's input is a prompt with a response and a question mark, "12+7=20?". It outputs the correct sum and its verdict, "19:N", because so
small a model compares best with its own output. A response is right if it equals the sum's digits exactly, as for the reward `exact`. The
lesson covers what a policy may write in four tokens, by kind:

    right        the sum
    tens         the sum plus or minus ten, as in careless demonstrations
    near misses  another digit, off by one or ten, swapped digits
    numbers      any other number of up to four digits
    malformed    an empty response; the sum without its end, or with something before or after it (a zero, a sign, its own
                 digits); any other text of the alphabet

Right answers and tens are the hardest to tell apart, so they are frequent, but not alone, or the judge would learn to copy the answer.
The judge's lesson has all pairs, including those held out from the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gcore.quickstart.folder import JudgeManifest, PreparedFolder, PreparedManifest, Recipe, Reporter, make_or_find
from gcore.quickstart.lessons import Lesson, VerdictAccuracy, hashed_numbers, shuffle_exercises, to_jsonl

if TYPE_CHECKING:
    from gcore.quickstart.pretraining import SmallModel

SUMS_CHARACTERS = "0123456789+="

CARELESS_SHARE = 0.7
"""Share of demonstrations that drop the carry. Well above one half, so that the model reliably prefers the careless answer."""

SUMS_BAND = (0.38, 0.48)
"""Range of the model's greedy accuracy on held-out sums before RL."""

HELD_OUT_SHARE = 7
"""One pair in this many is held out."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum `left + right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The model's input: five characters, six for a wide sum."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The correct answer."""
        return str(self.left + self.right)

    @property
    def has_carry(self) -> bool:
        """Whether the units add up to ten or more."""
        return self.left % 10 + self.right % 10 >= 10

    @property
    def careless_answer(self) -> str:
        """The answer without the carry; the correct answer if there is no carry."""
        return str(self.left + self.right - (10 if self.has_carry else 0))

    @property
    def pair(self) -> tuple[int, int]:
        """The operands, larger first; equal for both orders."""
        return max(self.left, self.right), min(self.left, self.right)


@dataclass(frozen=True, slots=True)
class SumSplit:
    """Sums for training and held-out sums; no pair is in both. `wide` is only for the warm start."""

    train: tuple[Sum, ...]
    held_out: tuple[Sum, ...]
    wide: tuple[Sum, ...]

    @property
    def lesson(self) -> Lesson:
        """The training data of the warm start; half of each batch are wide sums."""
        return Lesson(SUMS_CHARACTERS, (self.train, self.wide), (32, 32), self.held_out, CARELESS_SHARE, SUMS_BAND)


def split_sums(seed: int) -> SumSplit:
    """Return all sums, split by pair. `seed` decides which pairs are held out and the order of the lists."""
    everything = [Sum(left, right) for left in range(10, 100) for right in range(2, 10)]
    held_out: list[Sum] = []
    train: list[Sum] = []
    for has_carry in (True, False):
        kind = shuffle_exercises((s for s in everything if s.has_carry == has_carry), f"pairs {seed}")
        cut = round(len(kind) / HELD_OUT_SHARE)
        held_out += kind[:cut]
        train += kind[cut:]
    hidden = {s.pair for s in held_out}
    wide = [Sum(left, right) for left in range(100, 1000) for right in range(2, 10)]
    return SumSplit(
        train=tuple(shuffle_exercises(_both_orders(train), f"order {seed}")),
        held_out=tuple(shuffle_exercises(_both_orders(held_out), f"order {seed}")),
        wide=tuple(_both_orders(s for s in wide if (s.left % 100, s.right) not in hidden)),
    )


def _both_orders(sums: Iterable[Sum]) -> list[Sum]:
    return [ordered for s in sums for ordered in (s, Sum(s.right, s.left))]


ARITHMETIC_RECIPE = 1
"""Increase it with every change of the prepared content, so that folders of an older recipe are prepared again."""

WARM_UPDATES = 500
"""Updates of the warm start."""


class ArithmeticManifest(PreparedManifest):
    """The manifest of the arithmetic example. `greedy_accuracy`: share of held-out sums that the warm-started model
    answers correctly with greedy decoding; `pass_at_8`: share for which at least one of eight samples is correct. Both
    before RL."""

    example: Literal["arithmetic"] = "arithmetic"
    warm_updates: int
    greedy_accuracy: float
    pass_at_8: float


def prepare_arithmetic(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedFolder[ArithmeticManifest]:
    """Prepare the example in the folder `to`, or reuse it if it is there.

    `warm_updates`: optimizer updates of the warm start. `must_fit`: require a greedy accuracy of 38 % to 48 % on
    held-out sums. Raises DataError if it is outside, if `to` is something other than a prepared example, or if it
    cannot be written.
    """

    def fill(draft: Path) -> ArithmeticManifest:
        return _fill_arithmetic(
            draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit
        )

    asked = {"recipe": ARITHMETIC_RECIPE, "seed": seed, "warm_updates": warm_updates}
    return make_or_find(to, Recipe("arithmetic", ArithmeticManifest, asked, fill))


def _fill_arithmetic(
    draft: Path, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool
) -> ArithmeticManifest:
    from gcore.quickstart.pretraining import (  # imports torch
        THREADS,
        any_sample_accuracy,
        save_model,
        teach_model,
        torch_version,
    )

    split = split_sums(seed)
    _write_sums(split, draft)
    with reporter:
        taught = teach_model(split.lesson, seed=seed, updates=warm_updates, report=reporter.report, must_fit=must_fit)
    save_model(taught.model, draft / "model")
    return ArithmeticManifest(
        recipe=ARITHMETIC_RECIPE,
        seed=seed,
        warm_updates=warm_updates,
        threads=THREADS,
        torch=torch_version(),
        greedy_accuracy=taught.greedy_accuracy,
        pass_at_8=any_sample_accuracy(taught.model, split.lesson, seed=seed, samples=8),
    )


def _write_sums(split: SumSplit, folder: Path) -> None:
    (folder / "train.jsonl").write_text(to_jsonl(split.train), encoding="utf-8")
    (folder / "eval.jsonl").write_text(to_jsonl(split.held_out), encoding="utf-8")


JUDGE_CHARACTERS = SUMS_CHARACTERS + "?:YN"

RESPONSE_TOKENS = 4
"""Tokens of the longest correct answer with the end of sequence; the example's limit for responses."""

JUDGE_BAND = (0.9, 1.0)
"""Range of the greedy accuracy (sum and verdict both correct) that the trained judge shall have on the questions that
are measured during training. `prepare_arithmetic_judge` checks the verdicts on many more questions."""

ROWS = (11, 3, 12, 3, 3)
"""Rows of each kind of answer in a training batch, in the order of `answer_kinds`."""

MEASURED = (1, 2, 3, 1, 1)
"""Questions of each kind per held-out sum when a judge is measured: mostly kinds that are easy to get wrong."""

_OFF = (1, 2, 9, 10, 11, 20, 100)
"""Differences between a near miss and the right sum."""


@dataclass(frozen=True, slots=True)
class AnsweredSum:
    """A sum with a response: an exercise for the judge."""

    sum: Sum
    response: str

    @property
    def is_right(self) -> bool:
        """Whether the response equals the digits of the sum exactly."""
        return self.response == self.sum.answer

    @property
    def prompt(self) -> str:
        """The judge's input."""
        return f"{self.sum.prompt}{self.response}?"

    @property
    def answer(self) -> str:
        """The judge's expected output."""
        return f"{self.sum.answer}:{'Y' if self.is_right else 'N'}"

    @property
    def careless_answer(self) -> str:
        """The right output, because the judge's lesson has no careless demonstrations."""
        return self.answer


def answer_kinds(one: Sum, key: str) -> tuple[list[str], ...]:
    """Return responses to a sum, one list per kind: the right one, carry mistakes, near misses, random numbers,
    malformed ones. `key`: random seed."""
    return [one.answer], carry_mistakes(one), near_misses(one), random_numbers(one, key), malformed_answers(one, key)


def carry_mistakes(one: Sum) -> list[str]:
    """Return answers off by ten: a carry was dropped or added."""
    return _wrong(one, [str(value) for value in _around(one, (10,))])


def near_misses(one: Sum) -> list[str]:
    """Return wrong numbers that are close to the right one."""
    answer = one.answer
    one_digit = [answer[:place] + digit + answer[place + 1 :] for place in range(len(answer)) for digit in "0123456789"]
    return _wrong(one, [*(str(value) for value in _around(one, _OFF)), *one_digit, answer[::-1]])


def random_numbers(one: Sum, key: str) -> list[str]:
    """Return random wrong numbers, half of them as large as sums are."""
    drawn = hashed_numbers(f"numbers {one.prompt} {key}")
    limits = (110, 110, 110, 110, 10, 1000, 1000, 10_000)
    return _wrong(one, [str(next(drawn) % limit) for limit in limits for _ in range(3)])


def malformed_answers(one: Sum, key: str) -> list[str]:
    """Return malformed responses: empty, parts of the sum, the sum with extra text, an operand, random text."""
    answer = one.answer
    parts = [answer[:length] for length in range(len(answer))] + [answer[begin:] for begin in range(1, len(answer))]
    around = [text for extra in SUMS_CHARACTERS for text in (extra + answer, answer + extra)]
    doubled = [answer[: place + 1] + answer[place:] for place in range(len(answer))]
    drawn = hashed_numbers(f"malformed {one.prompt} {key}")
    behind = [answer + _text(next(drawn), RESPONSE_TOKENS - len(answer)) for _ in range(3)]
    anything = [_text(next(drawn), length) for length in range(1, RESPONSE_TOKENS + 1) for _ in range(4)]
    return _wrong(one, [*parts, *around, *doubled, *behind, str(one.left), str(one.right), *anything])


def judge_lesson(split: SumSplit) -> Lesson:
    """Return the training data of the judge. During training its accuracy is measured with one question per held-out
    sum."""
    every = [*split.train, *split.held_out]
    taught = zip(*(answer_kinds(one, "taught") for one in every), strict=True)
    sources = tuple(
        tuple(AnsweredSum(one, response) for one, given in zip(every, kind, strict=True) for response in given)
        for kind in taught
    )
    looked_at = held_out_answers(split)[:: sum(MEASURED) + 1]  # one question per sum, of a different kind each time
    return Lesson(JUDGE_CHARACTERS, sources, ROWS, looked_at, careless_share=0.0, band=JUDGE_BAND)


def held_out_answers(split: SumSplit) -> tuple[AnsweredSum, ...]:
    """Return the questions that measure a judge: some of each kind for every held-out sum."""
    return tuple(
        AnsweredSum(one, response)
        for one in split.held_out
        for given, count in zip(answer_kinds(one, "measured"), MEASURED, strict=True)
        for response in _some(given, count, one.prompt)
    )


def score_verdicts(asked: Sequence[AnsweredSum], written: Sequence[str]) -> VerdictAccuracy:
    """Score the verdicts in a judge's outputs. An unreadable verdict counts as wrong, but not as a false yes.

    `asked`: the questions; `written`: the judge's output for each.
    """
    verdicts = [text.rpartition(":")[2] for text in written]
    right = [verdict == one.answer[-1] for one, verdict in zip(asked, verdicts, strict=True)]
    passed = [verdict == "Y" for one, verdict in zip(asked, verdicts, strict=True) if not one.is_right]
    return VerdictAccuracy(sum(right) / len(right), sum(passed) / len(passed))


def _some(given: Sequence[str], count: int, key: str) -> Sequence[str]:
    """Return `count` consecutive items of `given`, cyclically, from a start that the hash of `key` decides."""
    begin = next(hashed_numbers(f"some {key}")) % len(given)
    return [given[(begin + place) % len(given)] for place in range(count)]


def _around(one: Sum, off: Iterable[int]) -> list[int]:
    """The non-negative numbers that differ from the sum by a number in `off`."""
    value = one.left + one.right
    return [near for by in off for near in (value - by, value + by) if near >= 0]


def _text(number: int, length: int) -> str:
    """Return `length` characters of the policy's alphabet, from the digits of `number`."""
    text = ""
    for _ in range(length):
        number, character = divmod(number, len(SUMS_CHARACTERS))
        text += SUMS_CHARACTERS[character]
    return text


def _wrong(one: Sum, given: Iterable[str]) -> list[str]:
    """Return the responses in `given` without duplicates and without the right answer."""
    return [response for response in dict.fromkeys(given) if response != one.answer]


JUDGE_RECIPE = 1
"""Increase it with every change of the prepared content, so that folders of an older recipe are prepared again."""

UPDATES = 1600
NEEDED = VerdictAccuracy(accuracy=0.97, false_yes=0.02)
"""What a judge needs on all kinds of answers to held-out sums."""


class ArithmeticJudgeManifest(JudgeManifest):
    """The manifest of the judge, measured on all kinds of answers to held-out sums."""

    example: Literal["arithmetic-judge"] = "arithmetic-judge"


def prepare_arithmetic_judge(
    to: Path, *, seed: int = 0, progress: bool = True, updates: int = UPDATES, must_fit: bool = True
) -> PreparedFolder[ArithmeticJudgeManifest]:
    """Prepare the judge in the folder `to`, or reuse it if it is there.

    `updates`: optimizer updates of the training. `must_fit`: require `NEEDED`. Raises DataError if the judge does
    not reach it, if `to` is something other than a prepared judge, or if it cannot be written.
    """

    def fill(draft: Path) -> ArithmeticJudgeManifest:
        return _fill_judge(draft, seed, updates, Reporter.for_terminal(progress, "judge"), must_fit=must_fit)

    asked = {"recipe": JUDGE_RECIPE, "seed": seed, "updates": updates}
    return make_or_find(to, Recipe("arithmetic-judge", ArithmeticJudgeManifest, asked, fill))


def _fill_judge(draft: Path, seed: int, updates: int, reporter: Reporter, *, must_fit: bool) -> ArithmeticJudgeManifest:
    from gcore.quickstart.pretraining import THREADS, save_model, teach_model, torch_version  # imports torch

    split = split_sums(seed)
    lesson = judge_lesson(split)
    with reporter:
        taught = teach_model(lesson, seed=seed, updates=updates, report=reporter.report, must_fit=must_fit)
    marks = _measure_judge(taught.model, lesson, split, seed)
    if must_fit:
        marks.require(NEEDED, "answers", updates, seed)
    save_model(taught.model, draft / "model")
    return ArithmeticJudgeManifest(
        recipe=JUDGE_RECIPE,
        seed=seed,
        updates=updates,
        threads=THREADS,
        torch=torch_version(),
        judge_accuracy=marks.accuracy,
        judge_false_yes=marks.false_yes,
    )


def _measure_judge(judge: SmallModel, lesson: Lesson, split: SumSplit, seed: int) -> VerdictAccuracy:
    """Measure the verdicts of a judge."""
    from gcore.quickstart.pretraining import deterministic_torch, generate_responses  # imports torch

    asked = held_out_answers(split)
    with deterministic_torch(seed):
        return score_verdicts(
            asked, generate_responses(judge, [one.prompt for one in asked], lesson.longest_answer, None)
        )


ADAPTER_RECIPE = 1
"""Increase it with every change of the prepared content, so that folders of an older recipe are prepared again."""

ADAPTER_RANK = 32


class JudgeAdapterManifest(JudgeManifest):
    """The manifest of the judge as an adapter. `rank`: of the adapter. `greedy_accuracy`: accuracy on held-out sums of the
    model that both the policy and the judge start from."""

    example: Literal["arithmetic-judge-adapter"] = "arithmetic-judge-adapter"
    warm_updates: int
    rank: int
    greedy_accuracy: float


def prepare_judge_adapter(
    to: Path,
    *,
    seed: int = 0,
    progress: bool = True,
    warm_updates: int = WARM_UPDATES,
    updates: int = UPDATES,
    must_fit: bool = True,
) -> PreparedFolder[JudgeAdapterManifest]:
    """Prepare data, a warm-started model, and the judge as an adapter of this model in the folder `to`, or reuse them.

    `warm_updates`, `updates`: optimizer updates of the model and of the adapter. `must_fit`: require of the model what
    `prepare_arithmetic` requires, and of the judge what `prepare_arithmetic_judge` does. Raises DataError if they miss
    it, if `to` is something other than this example, or if it cannot be written.
    """

    def fill(draft: Path) -> JudgeAdapterManifest:
        reporters = [Reporter.for_terminal(progress, what) for what in ("warm start", "judge")]
        return _fill_judge_adapter(draft, seed, warm_updates, updates, *reporters, must_fit=must_fit)

    asked = {"recipe": ADAPTER_RECIPE, "seed": seed, "warm_updates": warm_updates, "updates": updates}
    return make_or_find(to, Recipe("arithmetic-judge-adapter", JudgeAdapterManifest, asked, fill))


def _fill_judge_adapter(
    draft: Path, seed: int, warm_updates: int, updates: int, warming: Reporter, judging: Reporter, *, must_fit: bool
) -> JudgeAdapterManifest:
    from gcore.quickstart.pretraining import (  # imports torch
        ADAPTER_ROUNDS,
        THREADS,
        save_adapter,
        save_model,
        teach_adapter,
        teach_model,
        torch_version,
    )

    split = split_sums(seed)
    _write_sums(split, draft)
    sums = replace(split.lesson, characters=JUDGE_CHARACTERS)  # the judge has the policy's tokenizer
    with warming:
        base = teach_model(sums, seed=seed, updates=warm_updates, report=warming.report, must_fit=must_fit)
    save_model(base.model, draft / "model")
    lesson = judge_lesson(split)
    with judging:
        judge = teach_adapter(
            base.model,
            lesson,
            rank=ADAPTER_RANK,
            seed=seed,
            updates=updates,
            report=judging.report,
            fits=lambda made: not must_fit or _measure_judge(made, lesson, split, seed).reaches(NEEDED),
        )
    marks = _measure_judge(judge.model, lesson, split, seed)
    if must_fit:
        marks.require(NEEDED, "answers", ADAPTER_ROUNDS * updates, seed)
    save_adapter(judge.model, ADAPTER_RANK, draft / "model", draft / "adapter")
    return JudgeAdapterManifest(
        recipe=ADAPTER_RECIPE,
        seed=seed,
        warm_updates=warm_updates,
        updates=updates,
        rank=ADAPTER_RANK,
        threads=THREADS,
        torch=torch_version(),
        greedy_accuracy=base.greedy_accuracy,
        judge_accuracy=marks.accuracy,
        judge_false_yes=marks.false_yes,
    )
