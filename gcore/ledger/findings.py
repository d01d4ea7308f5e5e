"""What an audit finds: each violation with its kind, a sentence, and the prompt refs it is about. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gcore.types import PromptRef

Kind = Literal[
    "record",  # a line or a record that cannot be read, or is there in two forms
    "chain",  # entries, their numbers, parents, lineages and digests
    "step",  # steps without a gap
    "outcome",  # exactly one outcome for each prompt
    "version",  # the versions that made a group
    "receipt",  # what the ranks trained on
    "cursors",  # what head, or an entry, says has ended
    "tally",  # what head, or an entry, has counted
    "checkpoint",  # what a job could go back to
    "open",  # seals and offers as they stand
    "balance",  # issued = trained + filtered + failed + in flight
    "end",  # a job that has succeeded has done all it was to do
]
MOST_FOUND = 500
"""Violations that are told one by one."""
MOST_REFS = 100
"""Refs that one violation names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation. `refs`: the prompts it is about, as far as it is about prompts."""

    kind: Kind
    sentence: str
    refs: tuple[PromptRef, ...] = ()


@dataclass(frozen=True)
class Audit:
    """What was found, and what was counted along the final lineage. `findings` is empty if all adds up."""

    findings: tuple[Finding, ...] = ()
    more: int = 0
    """Violations beyond `MOST_FOUND`."""
    steps: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    in_flight: int = 0
    """Prompts that an open seal or a live offer names, and that have no outcome."""
    issued: int = 0
    """Prompts that no controller would issue again: ended by head's cursors, or named by an open seal or a live offer."""
    epochs: int = 0
    """Data epochs of which every prompt has its outcome."""
    lineages: int = 0
    groups_by_holder: Mapping[str, int] = field(default_factory=dict)

    @property
    def violations(self) -> tuple[str, ...]:
        """The sentences."""
        more = (f"and {self.more} violation{'s' * (self.more != 1)} more",) if self.more else ()
        return tuple(finding.sentence for finding in self.findings) + more

    def with_problems(self, problems: Sequence[str]) -> Audit:
        """With lines that could not be read, or do not agree, as violations too."""
        unread = tuple(Finding("record", problem) for problem in problems[:MOST_FOUND])
        return replace(self, findings=unread + self.findings, more=self.more + len(problems) - len(unread))

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


class Found:
    """Violations as they are found; the first of them are kept, the others counted."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.more = 0

    def add(self, kind: Kind, sentence: str, refs: Iterable[PromptRef] = ()) -> None:
        """One violation."""
        if len(self.findings) >= MOST_FOUND:
            self.more += 1
        else:
            self.findings.append(Finding(kind, sentence, tuple(refs)[:MOST_REFS]))


def few(refs: Sequence[PromptRef], count: int | None = None) -> str:
    """The first of `refs`, for a sentence; `count`: how many there are in all."""
    total = len(refs) if count is None else count
    named = ", ".join(map(str, refs[:5]))
    return named if total <= 5 else f"{named} and {total - min(len(refs), 5)} more"
