"""The ranks' receipts as the audit reads them: what each rank of a world trained on under a token.

Ranks write them (`gcore.train.receipts`), one file a rank and a world, one line a token. There may be very many, so a folder is
gone through once, and each line is read again when it is asked for. A line that is none is told, and the others count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gcore.ledger.line_index import Place, lines_of
from gcore.types import PromptRef, Token

FOLDER = "receipts"
_NAMED = re.compile(rb'"token":"(\d+\.\d+\.\d+)","world":"([^"\\]*)","rank":(\d+)')
"""How a line begins, but for its schema version."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One rank's word on one token: the samples it trained on, by group, and what the groups were."""

    token: Token
    world: str
    rank: int
    samples: Mapping[PromptRef, frozenset[int]]
    digests: Mapping[PromptRef, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> Receipt:
        """From a receipt's JSON object. Raises KeyError, TypeError or ValueError on anything else."""
        samples: dict[PromptRef, frozenset[int]] = {}
        digests: dict[PromptRef, str] = {}
        for name, digest, indexes in line["groups"]:
            ref = PromptRef.parse(name)
            if ref in samples or len(set(indexes)) != len(indexes):
                raise ValueError(f"prompt {ref} or a sample of it stands in it twice")
            samples[ref] = frozenset(int(i) for i in indexes)
            digests[ref] = str(digest)
        return cls(Token.parse(line["token"]), str(line["world"]), int(line["rank"]), samples, digests)


class Receipts(Protocol):
    """All receipts of a run."""

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """The worlds and tokens of which there are any."""
        ...

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """Those of a token, in no order."""
        ...


class HeldReceipts:
    """Receipts at hand."""

    def __init__(self, receipts: Iterable[Receipt]) -> None:
        self._found: dict[tuple[str, Token], list[Receipt]] = {}
        for receipt in receipts:
            self._found.setdefault((receipt.world, receipt.token), []).append(receipt)

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """See `Receipts`."""
        return self._found

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """See `Receipts`."""
        return self._found.get((world, token), ())


class ReceiptFolder:
    """Receipts in a run's folder. `problems`: lines that are none, a sentence each."""

    def __init__(self, run_dir: Path) -> None:
        """Goes through all lines, without taking them apart. Raises OSError."""
        self.problems: list[str] = []
        self._found: dict[tuple[str, Token], list[Place]] = {}
        for place, line in lines_of(run_dir / FOLDER):
            named = _NAMED.search(line, 0, 256)
            if named is None or not line.endswith(b"}"):
                self.problems.append(f"{place} is no receipt")
                continue
            where = (named[2].decode(errors="replace"), Token.parse(named[1].decode()))
            self._found.setdefault(where, []).append(place)

    def tokens(self) -> Iterable[tuple[str, Token]]:
        """See `Receipts`."""
        return self._found

    def of(self, world: str, token: Token) -> Sequence[Receipt]:
        """See `Receipts`; a line that cannot be read is a problem. Raises OSError."""
        return tuple(self._read(world, token))

    def _read(self, world: str, token: Token) -> Iterator[Receipt]:
        for place in self._found.get((world, token), ()):
            try:
                receipt = Receipt.parse(json.loads(place.read()))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self.problems.append(f"{place} is no receipt: {error}")
                continue
            yield receipt
