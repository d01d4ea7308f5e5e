#!/usr/bin/env python3
"""Makes a node's configuration from a template: render.py TEMPLATE OUT.

One template serves all nodes: `${NAME}` in it is replaced by the environment variable of that name, `${NAME:-words}` by `words`
where there is none. `${SLOTS}` is found out where it is not set: the GPUs that `nvidia-smi` lists, else one set of cores for all that
this process may run on. `$$` is a dollar. What stands in comments is left as it is.

It needs Python's own library only and knows nothing of what the keys mean: the daemon says what is wrong with them.
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
    """The template or the environment does not do; the sentence says why and what to do."""


def filled(template: str, environment: Mapping[str, str]) -> str:
    """The template with its places filled. Raises Unfit."""
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
            raise Unfit(f"line {number}: a $ that begins no ${{NAME}}. Write $$ for a dollar")
        found = environment.get(name) or otherwise
        if found is None:
            raise Unfit(f"line {number}: ${{{name}}} has no value. Set {name} in the environment")
        if any(ord(sign) < 32 for sign in found):
            raise Unfit(f"line {number}: the value of {name} has a line break or another control character")
        return found

    return PLACE.sub(value, line)


def slots_of(listed: str, cores: frozenset[int]) -> str:
    """As a YAML list: the GPUs of `nvidia-smi --list-gpus`, else the cores as one set."""
    gpus = [f"cuda:{number}" for number in re.findall(r"^GPU (\d+):", listed, re.MULTILINE)]
    return json.dumps(gpus or [f"cpu:{ranges(cores)}"])


def ranges(cores: frozenset[int]) -> str:
    """`0-3,8-11`: the first part is a range even of one core, for that is how a set is told from a core."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(f"{first}-{last}" for first, last in parts)


def _listed_gpus() -> str:
    """What `nvidia-smi` lists; nothing where there is none, or no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=LISTING_S, check=False
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfit(f"nvidia-smi does not answer ({error}): set SLOTS, or look after the driver") from error
    return done.stdout if done.returncode == 0 else ""


def main(arguments: list[str]) -> int:
    """The exit code."""
    if len(arguments) != 2:
        print("usage: render.py TEMPLATE OUT", file=sys.stderr)  # noqa: T201 - the command line's own voice
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
