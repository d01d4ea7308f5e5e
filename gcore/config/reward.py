"""How responses are scored: the section `reward` of a job or of a source, and the section `scoring` of a job.

A composed reward lists its parts, each a reward with options of its own; what they come to together is said by `compose`.
A reward, or a part, is a function that is found by its name, or a judge of the section `judges`.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from gcore.config.base import Option, Section

DEFAULT_REWARD = "numeric"
NEEDS_NO_ANSWER = frozenset({"regex", "length"})
"""gcore's own rewards that look at nothing but the response. Of a plug-in it is not known."""
MAX_PARTS = 16
LARGEST = 3.4e38
"""Rewards travel as float32."""
ANSWER_HELP = "Field of the prompt's entry that holds the expected answer"
OPTIONS_HELP = "Settings of the reward's own, by name"
JUDGE_HELP = "The judge of `judges` that scores, in place of a reward's name"


class RewardPart(Section):
    """One of the rewards that a composed one is made of."""

    name: str | None = Field(None, description="Reward, by its entry-point name in `gcore.rewards`")
    judge: str | None = Field(None, description=JUDGE_HELP)
    label: Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_.-]+$")] | None = Field(
        None,
        description="Under which its value is kept and shown; default: its name or its judge's. No two parts have the same",
    )
    answer: str | None = Field(None, description=f"{ANSWER_HELP}; default: reward.answer")
    options: dict[str, Option] = Field({}, description=OPTIONS_HELP)
    weight: float = Field(1.0, description="What its value is multiplied with")

    @model_validator(mode="after")
    def _one_form(self) -> RewardPart:
        if (self.name is None) == (self.judge is None):
            raise ValueError(f"a part has a name or a judge; {'both' if self.name is not None else 'neither'} is given")
        if self.judge is not None and (self.options or self.answer is not None):
            raise ValueError(f"judge {self.judge!r} looks at what its template shows it; leave options and answer out")
        return self

    @property
    def shown_as(self) -> str:
        """Its label, or else its name, or its judge's."""
        return self.label or self.name or self.judge or ""


class RewardSpec(Section):
    """Scoring."""

    name: str = Field(
        DEFAULT_REWARD,
        description="Reward, by its entry-point name in `gcore.rewards`; a composed one has parts instead",
    )
    judge: str | None = Field(None, description=JUDGE_HELP)
    answer: str = Field("answer", description=ANSWER_HELP)
    options: dict[str, Option] = Field({}, description=OPTIONS_HELP)
    parts: tuple[RewardPart, ...] = Field((), description="Rewards that together make the response's")
    compose: Literal["sum", "gate", "min"] = Field(
        "sum",
        description="How parts make one reward. sum: weight times value, added up; gate: the first part only decides: "
        "unless it is positive the reward is 0, else the sum of the others; min: the smallest of weight times value",
    )
    timeout_s: PositiveFloat = Field(
        10.0, le=3600, description="Longest time one response may take to be scored, in seconds"
    )
    timeout_value: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = Field(
        None,
        description="What a response is worth whose scoring took longer or killed its process; default: its prompt fails",
    )

    @model_validator(mode="after")
    def _one_form(self) -> RewardSpec:
        if self.judge is not None and (self.name != DEFAULT_REWARD or self.options or self.parts):
            raise ValueError("give a judge, a name with options, or parts that have their own, only one of them")
        if not self.parts:
            if self.compose != "sum":
                raise ValueError("compose belongs to parts; there are none")
            return self
        if self.name != DEFAULT_REWARD or self.options:
            raise ValueError("give a name with options, or parts that have their own, not both")
        if len(self.parts) > MAX_PARTS:
            raise ValueError(f"{len(self.parts)} parts; at most {MAX_PARTS}")
        label, times = Counter(part.shown_as for part in self.parts).most_common(1)[0]
        if times > 1:
            raise ValueError(f"two parts are called {label!r}; give them labels that differ")
        labels = sorted(part.shown_as for part in self.parts)
        for one, other in permutations(labels, 2):
            if other.startswith(f"{one}."):
                raise ValueError(f"{other!r} is what a part of {one!r} would be called; give them labels that differ")
        if self.compose == "gate":
            if len(self.parts) < 2:
                raise ValueError("a gate needs a part behind it; list at least two")
            if self.parts[0].weight != 1.0:
                raise ValueError(f"part {self.parts[0].shown_as!r} is the gate and only decides; it has no weight")
        return self

    @property
    def answers(self) -> tuple[str, ...]:
        """The fields that an entry must have for it, each once. What a judge is shown, its template says."""
        if self.judge is not None:
            return ()
        wanted = [(part.name, part.answer or self.answer) for part in self.parts if part.judge is None]
        if not self.parts:
            wanted = [(self.name, self.answer)]
        return tuple(dict.fromkeys(answer for name, answer in wanted if name not in NEEDS_NO_ANSWER))

    @property
    def judges(self) -> tuple[str, ...]:
        """The judges that it names, each once."""
        named = [self.judge, *(part.judge for part in self.parts)]
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def shown_as(self) -> str:
        """Its name; for people."""
        inner = ", ".join(part.shown_as for part in self.parts)
        return f"{self.compose}({inner})" if self.parts else self.judge or self.name

    def of_part(self, part: RewardPart) -> RewardSpec:
        """What `part` is told: as if it were the only reward. Raises ValueError for a judge's, which is told nothing."""
        if part.name is None:
            raise ValueError(f"part {part.shown_as!r} is a judge's")
        return RewardSpec(
            name=part.name, answer=part.answer or self.answer, options=part.options, timeout_s=self.timeout_s
        )


class ScoringSpec(Section):
    """Where rewards run: in processes of their own on each controller's node."""

    workers: PositiveInt = Field(1, le=256, description="Processes on each node; each scores one response at a time")
    memory_mb: PositiveInt = Field(4096, ge=64, le=1 << 30, description="Most memory that one of them may take, in MiB")
    start_timeout_s: PositiveFloat = Field(
        120.0, le=3600, description="Longest time one of them may take to load the rewards, in seconds"
    )
