"""Names of log entries by their content, so that each can name the one before it, and head the newest.

A digest is of what an entry says, not of the bytes it stands in: whichever schema version wrote it down, and whether it was
read from the store or from the run's folder, it is the same. A field that a later version adds must have a default; one that
is renamed or means something else must be turned back here. Pure.
"""

from __future__ import annotations

import hashlib
import json

from gcore.ledger.records import LogEntry


def digest_of(entry: LogEntry) -> str:
    """BLAKE2b of the entry's content; 32 hex digits."""
    text = _text(entry)
    if "\\ud" in text:  # half a surrogate pair is stored in other characters than it was written with
        text = _text(LogEntry.decode(entry.encode()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(entry: LogEntry) -> str:
    fields = entry.model_dump(mode="json", exclude={"schema_version"}, exclude_defaults=True)
    return json.dumps(fields, separators=(",", ":"), sort_keys=True)
