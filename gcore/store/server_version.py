"""Which etcd answers, and whether it is one that is known to lose data.

etcd 3.5.0 to 3.5.2 can lose consistency between members, or what it had acknowledged, when it is killed under load. Laptops
get such a one with `gcore[local]`, and may; on a cluster a daemon says so when it connects, once, and goes on: it is for
people to decide. A store that cannot be asked (no permission, no answer) is not doubted. Nothing here refuses anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_UNSAFE = (3, 5, 0)
FIRST_SAFE = (3, 5, 3)


def is_unsafe(version: str) -> bool:
    """Whether this version ("3.5.1") can lose data in a crash. What is no version is not."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and FIRST_UNSAFE <= tuple(int(part) for part in found.groups()) < FIRST_SAFE


def doubt(versions: Mapping[str, str]) -> str:
    """A sentence about members (by host:port) of such a version; empty if there is none."""
    unsafe = [f"{endpoint} ({version})" for endpoint, version in sorted(versions.items()) if is_unsafe(version)]
    if not unsafe:
        return ""
    return (
        f"etcd at {', '.join(unsafe)} can lose consistency when it is killed under load (3.5.0 to 3.5.2); "
        "upgrade to 3.5.3 or newer, member by member"
    )
