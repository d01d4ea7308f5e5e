"""The arithmetic example: sums to learn from, sums held out, and a model that is right less than half of the time.

`prepare` makes one folder, with the promises of `gcore.prepare.folder`:

    train.jsonl, eval.jsonl    prompts and answers (`gcore.prepare.sums`); no pair of operands is in both
    model/                     a qwen3 of 1.0M parameters with a tokenizer of its own (`gcore.prepare.teaching`)
    manifest.json              the recipe it was made by, and size and hash of every other file

The same recipe, seed and number of updates give the same bytes on the same machine and torch; across machines the data is
the same, and the model differs by rounding. It knows nothing of jobs: the spec that uses the folder is
examples/arithmetic/grpo.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore.errors import DataError
from gcore.quickstart.folder import PreparedManifest, Recipe, Reporter, make_or_find
from gcore.quickstart.lessons import Lesson, hashed_numbers, shuffle_exercises, to_jsonl

# -------------------- sums
# The sums of the arithmetic example: which there are, which are held out, and how a careless hand answers them.
#
# A sum is a two-digit number (10 to 99) and a one-digit number (2 to 9), in either order: "47+8=" and "8+47=". A *pair* of
# operands is held out in both orders together, so that a held-out sum is new to the model in every sense. One pair in
# seven is held out, of those with a carry and of those without alike; which ones is decided by a keyed hash, so that it is
# the same on every machine and for ever.
#
# The warm start also sees *wide* sums, of a three-digit and a one-digit number: from two-digit ones alone the model learns
# many by heart, and what reinforcement learning then teaches it does not carry over to sums it never saw. A wide sum whose
# last two digits make a held-out sum ("147+8=" where "47+8=" is held out) is left out too.
#
# The *careless hand* (`gcore.prepare.lesson`) knows its sums, but mostly drops the carry ("47+8=45").
#
# Pure; the randomness of the careless hand is the caller's.

SUMS_CHARACTERS = "0123456789+="

CARELESS_SHARE = 0.7
"""How often a demonstration drops its carry. Well above one half, or the model's preference would be a matter of luck."""

SUMS_BAND = (0.38, 0.48)
"""The share of held-out sums that the model is right on, greedily, when it is handed to RL."""

HELD_OUT_SHARE = 7
"""One pair in so many is held out."""


@dataclass(frozen=True, slots=True)
class Sum:
    """`left + right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model is shown: five characters, six for a wide sum."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.left + self.right)

    @property
    def has_carry(self) -> bool:
        """Whether the units make ten or more."""
        return self.left % 10 + self.right % 10 >= 10

    @property
    def careless_answer(self) -> str:
        """The answer with the carry dropped; the right one where there is none."""
        return str(self.left + self.right - (10 if self.has_carry else 0))

    @property
    def pair(self) -> tuple[int, int]:
        """The operands, the larger first: equal for both orders."""
        return max(self.left, self.right), min(self.left, self.right)


@dataclass(frozen=True, slots=True)
class SumSplit:
    """The sums to learn from, and those held out; no pair is in both. `wide` is for the warm start alone."""

    train: tuple[Sum, ...]
    held_out: tuple[Sum, ...]
    wide: tuple[Sum, ...]

    @property
    def lesson(self) -> Lesson:
        """What the warm start is given: half of it wide."""
        return Lesson(SUMS_CHARACTERS, (self.train, self.wide), (32, 32), self.held_out, CARELESS_SHARE, SUMS_BAND)


def split_sums(seed: int) -> SumSplit:
    """All sums, split by pair. `seed` decides which pairs are held out, and the order of the lists."""
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
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

WARM_UPDATES = 500
"""Updates of the warm start."""


class ArithmeticManifest(PreparedManifest):
    """`greedy_accuracy`: share of held-out sums right, greedily, before any RL."""

    example: Literal["arithmetic"] = "arithmetic"
    warm_updates: int
    greedy_accuracy: float
    pass_at_8: float


@dataclass(frozen=True, slots=True)
class PreparedExample:
    """A prepared folder. `cached`: it was there already."""

    folder: Path
    model: Path
    train: Path
    eval: Path
    greedy_accuracy: float
    pass_at_8: float
    cached: bool


def prepare_arithmetic(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedExample:
    """Make the example in the folder `to`, or find it there.

    `warm_updates` is how long the warm start trains; `must_fit` asks that the model then is right on 38 % to 48 % of the
    held-out sums. Raises DataError if it is not, if `to` is something else than a prepared example, or cannot be written.
    """

    def fill(draft: Path) -> ArithmeticManifest:
        return _fill_arithmetic(
            draft, seed, warm_updates, Reporter.for_terminal(progress, "warm start"), must_fit=must_fit
        )

    asked = {"recipe": ARITHMETIC_RECIPE, "seed": seed, "warm_updates": warm_updates}
    made = make_or_find(to, Recipe("arithmetic", ArithmeticManifest, asked, fill))
    return PreparedExample(
        folder=made.folder,
        model=made.folder / "model",
        train=made.folder / "train.jsonl",
        eval=made.folder / "eval.jsonl",
        greedy_accuracy=made.manifest.greedy_accuracy,
        pass_at_8=made.manifest.pass_at_8,
        cached=made.cached,
    )


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
    (draft / "train.jsonl").write_text(to_jsonl(split.train), encoding="utf-8")
    (draft / "eval.jsonl").write_text(to_jsonl(split.held_out), encoding="utf-8")
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


# -------------------- verdicts
# What the judge of the arithmetic example learns: the right sum, and whether somebody's answer is it.
#
# The judge is shown a prompt with the response to it and a question mark, "12+7=20?". It writes the right sum and then its
# verdict, "19:N": a model so small compares with what it has written far better than with what it only might know. A response
# is right if it is the sum's digits and nothing else, which is what the reward `exact` says. Whatever a policy may write with
# its alphabet in four tokens is taught, by kinds:
#
#     right        the sum
#     tens         the sum with ten more or less: what a careless hand writes
#     near misses  one digit another, one or ten off, two digits swapped
#     numbers      any other number of up to four digits
#     malformed    nothing at all; the sum without its end, or with something before or behind it (a zero, a sign, the sum's
#                  own digits); any other text of the alphabet
#
# Right answers and tens are told apart with the most trouble, so they are asked often; but not alone, or the judge would learn
# to copy the answer, or all of it but a digit, for the sum. All pairs of operands are taught, those too that the example holds
# out: held out they are from the policy, which is what is evaluated. A judge is the one who knows, and all that the policy ever
# learns about a sum is what the judge says of it.
#
# Pure: what would be drawn is drawn by a keyed hash. Nothing is trained here (`gcore.prepare.arithmetic_judge`).

JUDGE_CHARACTERS = SUMS_CHARACTERS + "?:YN"

RESPONSE_TOKENS = 4
"""The longest right answer and the end of sequence: as many as the example lets a policy write."""

JUDGE_BAND = (0.9, 1.0)
"""The share of the questions looked at while it learns to which sum and verdict are right in the end. How good it has to be
is said for verdicts, on many more questions (`gcore.prepare.arithmetic_judge`)."""

ROWS = (11, 3, 12, 3, 3)
"""How many of each kind are in a batch, in the order in which they are listed above."""

MEASURED = (1, 2, 3, 1, 1)
"""How many of each kind a judge is measured by, on each held-out sum: mostly what it is likely to be wrong on."""

_OFF = (1, 2, 9, 10, 11, 20, 100)


@dataclass(frozen=True, slots=True)
class AnsweredSum:
    """A sum with somebody's response to it: an exercise for the judge."""

    sum: Sum
    response: str

    @property
    def is_right(self) -> bool:
        """Whether the response is the sum and nothing else."""
        return self.response == self.sum.answer

    @property
    def prompt(self) -> str:
        """What the judge is shown."""
        return f"{self.sum.prompt}{self.response}?"

    @property
    def answer(self) -> str:
        """What the judge is to write."""
        return f"{self.sum.answer}:{'Y' if self.is_right else 'N'}"

    @property
    def careless_answer(self) -> str:
        """Nobody teaches a judge to be careless."""
        return self.answer


@dataclass(frozen=True, slots=True)
class VerdictAccuracy:
    """What a judge's verdicts are worth. `accuracy`: share that is right. `false_yes`: share of wrong answers called right."""

    accuracy: float
    false_yes: float


def answer_kinds(one: Sum, key: str) -> tuple[list[str], ...]:
    """Responses to a sum: the right one, then wrong ones, a list for each kind. `key` decides what is drawn."""
    return [one.answer], carry_mistakes(one), near_misses(one), random_numbers(one, key), malformed_answers(one, key)


def carry_mistakes(one: Sum) -> list[str]:
    """Wrong only in the tens, and what hangs on them: a carry was dropped or made up."""
    return _wrong(one, [str(value) for value in _around(one, (10,))])


def near_misses(one: Sum) -> list[str]:
    """Wrong numbers that are nearly right."""
    answer = one.answer
    one_digit = [answer[:place] + digit + answer[place + 1 :] for place in range(len(answer)) for digit in "0123456789"]
    return _wrong(one, [*(str(value) for value in _around(one, _OFF)), *one_digit, answer[::-1]])


def random_numbers(one: Sum, key: str) -> list[str]:
    """Any other numbers, half of them of the size that sums have."""
    drawn = hashed_numbers(f"numbers {one.prompt} {key}")
    limits = (110, 110, 110, 110, 10, 1000, 1000, 10_000)
    return _wrong(one, [str(next(drawn) % limit) for limit in limits for _ in range(3)])


def malformed_answers(one: Sum, key: str) -> list[str]:
    """Nothing, parts of the sum, the sum and something besides, an operand, any text."""
    answer = one.answer
    parts = [answer[:length] for length in range(len(answer))] + [answer[begin:] for begin in range(1, len(answer))]
    around = [text for extra in SUMS_CHARACTERS for text in (extra + answer, answer + extra)]
    doubled = [answer[: place + 1] + answer[place:] for place in range(len(answer))]
    drawn = hashed_numbers(f"malformed {one.prompt} {key}")
    behind = [answer + _text(next(drawn), RESPONSE_TOKENS - len(answer)) for _ in range(3)]
    anything = [_text(next(drawn), length) for length in range(1, RESPONSE_TOKENS + 1) for _ in range(4)]
    return _wrong(one, [*parts, *around, *doubled, *behind, str(one.left), str(one.right), *anything])


def judge_lesson(split: SumSplit) -> Lesson:
    """What the judge is taught. While it learns it is looked at with one question on each held-out sum."""
    every = [*split.train, *split.held_out]
    taught = zip(*(answer_kinds(one, "taught") for one in every), strict=True)
    sources = tuple(
        tuple(AnsweredSum(one, response) for one, given in zip(every, kind, strict=True) for response in given)
        for kind in taught
    )
    looked_at = held_out_answers(split)[
        :: sum(MEASURED) + 1
    ]  # one sum after the other, and its next question each time
    return Lesson(JUDGE_CHARACTERS, sources, ROWS, looked_at, careless_share=0.0, band=JUDGE_BAND)


def held_out_answers(split: SumSplit) -> tuple[AnsweredSum, ...]:
    """The questions by which a judge is measured: some of every kind on every held-out sum."""
    return tuple(
        AnsweredSum(one, response)
        for one in split.held_out
        for given, count in zip(answer_kinds(one, "measured"), MEASURED, strict=True)
        for response in _some(given, count, one.prompt)
    )


def score_verdicts(asked: Sequence[AnsweredSum], written: Sequence[str]) -> VerdictAccuracy:
    """How good the verdicts are in what a judge wrote. One that cannot be read is wrong, but is no false yes."""
    verdicts = [text.rpartition(":")[2] for text in written]
    right = [verdict == one.answer[-1] for one, verdict in zip(asked, verdicts, strict=True)]
    passed = [verdict == "Y" for one, verdict in zip(asked, verdicts, strict=True) if not one.is_right]
    return VerdictAccuracy(sum(right) / len(right), sum(passed) / len(passed))


def _some(given: Sequence[str], count: int, key: str) -> Sequence[str]:
    """`count` of them that follow each other, from a place that is drawn."""
    begin = next(hashed_numbers(f"some {key}")) % len(given)
    return [given[(begin + place) % len(given)] for place in range(count)]


def _around(one: Sum, off: Iterable[int]) -> list[int]:
    value = one.left + one.right
    return [near for by in off for near in (value - by, value + by) if near >= 0]


def _text(number: int, length: int) -> str:
    """`length` characters of the policy's alphabet, by the digits of `number`."""
    text = ""
    for _ in range(length):
        number, character = divmod(number, len(SUMS_CHARACTERS))
        text += SUMS_CHARACTERS[character]
    return text


def _wrong(one: Sum, given: Iterable[str]) -> list[str]:
    """Each once, without the right answer."""
    return [response for response in dict.fromkeys(given) if response != one.answer]


# -------------------- arithmetic_judge
# The judge of the arithmetic example: it is shown a sum with somebody's answer, and writes the sum and its verdict.
#
# `prepare` makes one folder, with the promises of `gcore.prepare.folder`:
#
#     model/           a qwen3 of 1.0M parameters with a tokenizer of its own (`gcore.prepare.teaching`)
#     manifest.json    the recipe it was made by, and size and hash of every other file
#
# What it is shown, what it writes and what it is taught is in `gcore.prepare.verdicts`. It stands beside the example itself
# (`gcore.prepare.arithmetic`), not in it: who only wants to see a model learn need not wait for a judge. The same recipe, seed
# and number of updates give the same bytes on the same machine and torch; across machines the model differs by rounding.

JUDGE_RECIPE = 1
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

UPDATES = 1600
LEAST_ACCURACY = 0.97

MOST_FALSE_YES = 0.02
"""Share of wrong answers that may be called right. What a judge lets pass is what a policy learns."""


class JudgeManifest(PreparedManifest):
    """`judge_accuracy`: share of right verdicts, on every kind of answer to the held-out sums. `judge_false_yes`: share of
    the wrong ones among these answers that are called right."""

    example: Literal["arithmetic-judge"] = "arithmetic-judge"
    updates: int
    judge_accuracy: float
    judge_false_yes: float


@dataclass(frozen=True, slots=True)
class PreparedJudge:
    """A prepared folder. `cached`: it was there already."""

    folder: Path
    model: Path
    judge_accuracy: float
    judge_false_yes: float
    cached: bool


def prepare_arithmetic_judge(
    to: Path, *, seed: int = 0, progress: bool = True, updates: int = UPDATES, must_fit: bool = True
) -> PreparedJudge:
    """Make the judge in the folder `to`, or find it there.

    `updates` is how long it learns; `must_fit` asks that 97 % of its verdicts then are right, and that it calls at most 2 %
    of wrong answers right. Raises DataError if not, if `to` is something else than a prepared judge, or cannot be written.
    """

    def fill(draft: Path) -> JudgeManifest:
        return _fill_judge(draft, seed, updates, Reporter.for_terminal(progress, "judge"), must_fit=must_fit)

    asked = {"recipe": JUDGE_RECIPE, "seed": seed, "updates": updates}
    made = make_or_find(to, Recipe("arithmetic-judge", JudgeManifest, asked, fill))
    return PreparedJudge(
        folder=made.folder,
        model=made.folder / "model",
        judge_accuracy=made.manifest.judge_accuracy,
        judge_false_yes=made.manifest.judge_false_yes,
        cached=made.cached,
    )


def _fill_judge(draft: Path, seed: int, updates: int, reporter: Reporter, *, must_fit: bool) -> JudgeManifest:
    from gcore.quickstart.pretraining import (
        THREADS,
        deterministic_torch,
        generate_responses,
        save_model,
        teach_model,
        torch_version,
    )  # imports torch

    split = split_sums(seed)
    lesson = judge_lesson(split)
    with reporter:
        taught = teach_model(lesson, seed=seed, updates=updates, report=reporter.report, must_fit=must_fit)
    asked = held_out_answers(split)
    with deterministic_torch(seed):
        marks = score_verdicts(
            asked, generate_responses(taught.model, [one.prompt for one in asked], lesson.longest_answer, None)
        )
    if must_fit and (marks.accuracy < LEAST_ACCURACY or marks.false_yes > MOST_FALSE_YES):
        raise DataError(
            f"after {updates} updates {marks.accuracy:.1%} of the judge's verdicts are right, and {marks.false_yes:.1%} of "
            f"wrong answers are called right; it needs {LEAST_ACCURACY:.0%}, and at most {MOST_FALSE_YES:.0%}",
            where=f"seed {seed}",
            fix="Use another seed",
        )
    save_model(taught.model, draft / "model")
    return JudgeManifest(
        recipe=JUDGE_RECIPE,
        seed=seed,
        updates=updates,
        threads=THREADS,
        torch=torch_version(),
        judge_accuracy=marks.accuracy,
        judge_false_yes=marks.false_yes,
    )
