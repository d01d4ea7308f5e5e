#!/usr/bin/env python3
"""Renders a node's configuration from a template: render.py TEMPLATE OUT.

All nodes use one template. `${NAME}` is replaced by that environment variable, `${NAME:-words}` by `words` if it is not set.
If SLOTS is not set, `${SLOTS}` becomes the GPUs that `nvidia-smi` lists, or without GPUs one set of the cores that this process
may use. `$$` is a dollar sign. Comment lines are not changed.

It needs only the standard library and does not check keys; the daemon reports wrong ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PLACE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|)")
LISTING_S = 30


class Unfit(Exception):
    """The template or the environment is invalid. The message says why and what to do."""


def filled(template: str, environment: Mapping[str, str]) -> str:
    """Return the template with its placeholders replaced. Raise Unfit."""
    return "".join(
        line if line.lstrip().startswith("#") else _line(line, number, environment)
        for number, line in enumerate(template.splitlines(keepends=True), 1)
    )


def _line(line: str, number: int, environment: Mapping[str, str]) -> str:
    def value(place: re.Match[str]) -> str:
        name, otherwise = place.groups()
        if place[0] == "$$":
            return "$"
        if name is None:
            raise Unfit(f"line {number}: a $ without {{NAME}} after it. Write $$ for a dollar sign")
        found = environment.get(name) or otherwise
        if found is None:
            raise Unfit(f"line {number}: ${{{name}}} has no value. Set {name} in the environment")
        if any(ord(sign) < 32 for sign in found):
            raise Unfit(f"line {number}: the value of {name} has a line break or another control character")
        return found

    return PLACE.sub(value, line)


def slots_of(listed: str, cores: frozenset[int]) -> str:
    """Return the slots as a YAML list: the GPUs of `nvidia-smi --list-gpus`, else the cores as one set."""
    gpus = [f"cuda:{number}" for number in re.findall(r"^GPU (\d+):", listed, re.MULTILINE)]
    return json.dumps(gpus or [f"cpu:{ranges(cores)}"])


def ranges(cores: frozenset[int]) -> str:
    """Return the cores as `0-3,8-11`. A single core is written as a range, which marks a set of cores."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(f"{first}-{last}" for first, last in parts)


def _listed_gpus() -> str:
    """Return the output of `nvidia-smi --list-gpus`; empty without the program or a driver. Raise Unfit if it hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=LISTING_S, check=False
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfit(f"nvidia-smi does not answer ({error}). Set SLOTS, or check the driver") from error
    return done.stdout if done.returncode == 0 else ""


def main(arguments: list[str]) -> int:
    """Render the template and return the exit code."""
    if len(arguments) != 2:
        print("usage: render.py TEMPLATE OUT", file=sys.stderr)  # noqa: T201 - output of the command
        return 2
    template, out = map(Path, arguments)
    try:
        text = template.read_text(encoding="utf-8")
        environment = dict(os.environ)
        if "${SLOTS}" in text and not environment.get("SLOTS"):
            environment["SLOTS"] = slots_of(_listed_gpus(), frozenset(os.sched_getaffinity(0)))
        whole = filled(text, environment)
        part = out.with_name(f".{out.name}.part")
        part.write_text(whole, encoding="utf-8")
        part.replace(out)
    except (OSError, UnicodeDecodeError, Unfit) as error:
        print(f"render.py: {template}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
