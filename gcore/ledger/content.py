"""What a step trains on, as one digest: by it a rank's word on what it has trained is compared with a seal. Pure."""

from __future__ import annotations

import hashlib

from gcore.ledger.records import Seal


def content_sha256(seal: Seal) -> bytes:
    """SHA-256 over the seal's group digests, sorted, each followed by a newline."""
    h = hashlib.sha256()
    for digest in sorted(group.digest for group in seal.groups):
        h.update(f"{digest}\n".encode())
    return h.digest()
