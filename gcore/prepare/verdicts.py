"""What the judge of the arithmetic example learns: the right sum, and whether somebody's answer is it.

The judge is shown a prompt with the response to it and a question mark, "12+7=20?". It writes the right sum and then its
verdict, "19:N": a model so small compares with what it has written far better than with what it only might know. A response
is right if it is the sum's digits and nothing else, which is what the reward `exact` says. Whatever a policy may write with
its alphabet in four tokens is taught, by kinds:

    right        the sum
    tens         the sum with ten more or less: what a careless hand writes
    near misses  one digit another, one or ten off, two digits swapped
    numbers      any other number of up to four digits
    malformed    nothing at all; the sum without its end, or with something before or behind it (a zero, a sign, the sum's
                 own digits); any other text of the alphabet

Right answers and tens are told apart with the most trouble, so they are asked often; but not alone, or the judge would learn
to copy the answer, or all of it but a digit, for the sum. All pairs of operands are taught, those too that the example holds
out: held out they are from the policy, which is what is evaluated. A judge is the one who knows, and all that the policy ever
learns about a sum is what the judge says of it.

Pure: what would be drawn is drawn by a keyed hash. Nothing is trained here (`gcore.prepare.arithmetic_judge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gcore.prepare import sums
from gcore.prepare.lesson import Lesson, hashed_numbers
from gcore.prepare.sums import Sum, SumSplit

CHARACTERS = sums.CHARACTERS + "?:YN"
RESPONSE_TOKENS = 4
"""The longest right answer and the end of sequence: as many as the example lets a policy write."""

BAND = (0.9, 1.0)
"""The share of the questions looked at while it learns to which sum and verdict are right in the end. How good it has to be
is said for verdicts, on many more questions (`gcore.prepare.arithmetic_judge`)."""

ROWS = (11, 3, 12, 3, 3)
"""How many of each kind are in a batch, in the order in which they are listed above."""

MEASURED = (1, 2, 3, 1, 1)
"""How many of each kind a judge is measured by, on each held-out sum: mostly what it is likely to be wrong on."""

_OFF = (1, 2, 9, 10, 11, 20, 100)


@dataclass(frozen=True, slots=True)
class Answered:
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
class Marks:
    """What a judge's verdicts are worth. `accuracy`: share that is right. `false_yes`: share of wrong answers called right."""

    accuracy: float
    false_yes: float


def kinds_of(one: Sum, key: str) -> tuple[list[str], ...]:
    """Responses to a sum: the right one, then wrong ones, a list for each kind. `key` decides what is drawn."""
    return [one.answer], tens(one), near_misses(one), numbers(one, key), malformed(one, key)


def tens(one: Sum) -> list[str]:
    """Wrong only in the tens, and what hangs on them: a carry was dropped or made up."""
    return _wrong(one, [str(value) for value in _around(one, (10,))])


def near_misses(one: Sum) -> list[str]:
    """Wrong numbers that are nearly right."""
    answer = one.answer
    one_digit = [answer[:place] + digit + answer[place + 1 :] for place in range(len(answer)) for digit in "0123456789"]
    return _wrong(one, [*(str(value) for value in _around(one, _OFF)), *one_digit, answer[::-1]])


def numbers(one: Sum, key: str) -> list[str]:
    """Any other numbers, half of them of the size that sums have."""
    drawn = hashed_numbers(f"numbers {one.prompt} {key}")
    limits = (110, 110, 110, 110, 10, 1000, 1000, 10_000)
    return _wrong(one, [str(next(drawn) % limit) for limit in limits for _ in range(3)])


def malformed(one: Sum, key: str) -> list[str]:
    """Nothing, parts of the sum, the sum and something besides, an operand, any text."""
    answer = one.answer
    parts = [answer[:length] for length in range(len(answer))] + [answer[begin:] for begin in range(1, len(answer))]
    around = [text for extra in sums.CHARACTERS for text in (extra + answer, answer + extra)]
    doubled = [answer[: place + 1] + answer[place:] for place in range(len(answer))]
    drawn = hashed_numbers(f"malformed {one.prompt} {key}")
    behind = [answer + _text(next(drawn), RESPONSE_TOKENS - len(answer)) for _ in range(3)]
    anything = [_text(next(drawn), length) for length in range(1, RESPONSE_TOKENS + 1) for _ in range(4)]
    return _wrong(one, [*parts, *around, *doubled, *behind, str(one.left), str(one.right), *anything])


def judges_lesson(split: SumSplit) -> Lesson:
    """What the judge is taught. While it learns it is looked at with one question on each held-out sum."""
    every = [*split.train, *split.held_out]
    taught = zip(*(kinds_of(one, "taught") for one in every), strict=True)
    sources = tuple(
        tuple(Answered(one, response) for one, given in zip(every, kind, strict=True) for response in given)
        for kind in taught
    )
    looked_at = measured(split)[:: sum(MEASURED) + 1]  # one sum after the other, and its next question each time
    return Lesson(CHARACTERS, sources, ROWS, looked_at, careless_share=0.0, band=BAND)


def measured(split: SumSplit) -> tuple[Answered, ...]:
    """The questions by which a judge is measured: some of every kind on every held-out sum."""
    return tuple(
        Answered(one, response)
        for one in split.held_out
        for given, count in zip(kinds_of(one, "measured"), MEASURED, strict=True)
        for response in _some(given, count, one.prompt)
    )


def marked(asked: Sequence[Answered], written: Sequence[str]) -> Marks:
    """How good the verdicts are in what a judge wrote. One that cannot be read is wrong, but is no false yes."""
    verdicts = [text.rpartition(":")[2] for text in written]
    right = [verdict == one.answer[-1] for one, verdict in zip(asked, verdicts, strict=True)]
    passed = [verdict == "Y" for one, verdict in zip(asked, verdicts, strict=True) if not one.is_right]
    return Marks(sum(right) / len(right), sum(passed) / len(passed))


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
        number, character = divmod(number, len(sums.CHARACTERS))
        text += sums.CHARACTERS[character]
    return text


def _wrong(one: Sum, given: Iterable[str]) -> list[str]:
    """Each once, without the right answer."""
    return [response for response in dict.fromkeys(given) if response != one.answer]
