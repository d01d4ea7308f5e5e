"""How many GPUs this machine shows, without torch: by the driver's device files. For an early word, not for placement."""

from __future__ import annotations

import re
from pathlib import Path

from gcore.errors import UsageError

_GPU = re.compile(r"nvidia\d+")


def check_gpus(wanted: int, dev: Path = Path("/dev")) -> None:
    """Raises UsageError if `wanted` GPUs cannot be here."""
    there = gpus(dev)
    if there is not None and there < wanted:
        shows = "no GPU" if there == 0 else f"{there} GPU{'s' * (there > 1)}"
        raise UsageError(
            f"cuda:{wanted} asks for {wanted} GPU{'s' * (wanted > 1)}, and this machine shows {shows}",
            where="--slots",
            fix="Use --slots cpu:2; `gcore doctor` tells more" if there == 0 else f"Use --slots cuda:{there}",
        )


def gpus(dev: Path = Path("/dev")) -> int | None:
    """GPUs of the machine; None if that cannot be told so."""
    try:
        names = [entry.name for entry in dev.iterdir()]
    except OSError:
        return None
    if "dxg" in names:  # under WSL the driver has one file for all
        return None
    return sum(_GPU.fullmatch(name) is not None for name in names)
