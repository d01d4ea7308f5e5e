"""What can be said of the devices that somebody asks for before anything is started: how many GPUs this machine shows, without torch, by
the driver's device files; whether emulated ones are given a law. For an early word, not for placement."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from gcore.emulated.launch import LAW_FILE
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


def check_law(environment: MutableMapping[str, str]) -> None:
    """The law of emulated devices that is named there is named by its whole path from now on: workers do not stand where it was written.

    Raises UsageError for a file that holds none, which would else be found out by engine after engine.
    """
    name = environment.get(LAW_FILE)
    if not name:
        return
    whole = environment[LAW_FILE] = str(Path(name).absolute())
    command = [sys.executable, "-P", "-m", "gcore.emulated.law_file", whole]
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UsageError(asked.stdout.strip() or asked.stderr.strip()[-300:], where=LAW_FILE)
