"""How far a store is known to be, by which one that was put back to an older state is found, from a backup, by who lived through it.

A read that asks the whole cluster never tells of an older revision than was told before, nor another cluster's number. If it does, what
stands there is not what was read: revisions that were compared with mean something else, a watch from a newer one waits in silence, and
the own lease may be there still, for a backup has leases too. Whoever finds that begins anew, as after the loss of its lease.

Found late, it does no harm that the compares of transactions do not prevent but this: a revision that was given out twice. So a
store is put back with everything ended (docs/operations.md); this is for who was forgotten. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Heard:
    """The newest of what a store's answers have said of it; zeros: nothing yet."""

    cluster: int = 0
    revision: int = 0

    @classmethod
    def of(cls, header: Any) -> Self:
        """From the header of one answer."""
        return cls(int(header.cluster_id), int(header.revision))

    def and_now(self, header: Any) -> Self:
        """With one answer more. An older one, which was long under way or is a lagging member's, changes nothing."""
        now = type(self).of(header)
        return now if self.cluster == 0 or (now.cluster == self.cluster and now.revision > self.revision) else self

    def contradicts(self, header: Any) -> bool:
        """Whether an answer cannot be of the store that was heard, if it is of the whole cluster and was asked for afterwards."""
        now = type(self).of(header)
        return self.cluster != 0 and (now.cluster != self.cluster or now.revision < self.revision)
