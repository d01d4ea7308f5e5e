"""Simulated stories for `reference.py`: one function for each kind, from a seed to the history that must not change.

Imports product code only through `tests/support`, whose modules keep their names.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "tests" / "support", ROOT):
    sys.path.insert(0, str(folder))

import pytest
from invariants import Invariants
from race_simulation import Race
from simulated_cluster import tell_story
from simulated_stories import moving, planning, propose_moves
from simulated_story import Story
from step_simulation import RULES, SMALL, Simulation

from tools.own_package import put_on_path

put_on_path()

ON_LIMIT: tuple[Any, ...] = ("train_smaller", "pad_masked", "fail")
EVENTS = 250
"""Random events of a bare protocol before its calm."""
_MODULE = re.compile(r"\b(?:gcore|placement|controllers)(?:\.[A-Za-z_]\w*)+")
_DRAWN = re.compile(r"/\S*/gcore-sim-\w+")
_OWN = re.compile(r'"pid":\d+,?|"host_memory_gib":[\d.]+,?')
"""Of the recording process and its machine, in nodes' records."""


@dataclass(frozen=True)
class Played:
    """A story: its digest, and its history (compressed, for the first difference)."""

    digest: str
    history: str


def played(lines: list[str], stored: bytes = b"") -> Played:
    """`stored`: what was written to the store; it is part of the digest only."""
    text = without_modules("\n".join(map(without_trace, lines))).encode()
    digest = hashlib.sha256(text + b"\0" + stored).hexdigest()
    return Played(digest, base64.b64encode(zlib.compress(text, 9)).decode())


def text_of(history: str) -> list[str]:
    """The lines of a compressed history."""
    return zlib.decompress(base64.b64decode(history)).decode().splitlines()


def without_trace(line: str) -> str:
    """An error in a history without its traceback: that names functions and shows source. Its message stays."""
    if "Traceback (most recent call last)" not in line:
        return line
    last = next(said for one in reversed(line.splitlines()) if (said := one.strip(" |+-")))
    return f"{line.partition('raised:')[0]}raised: {last.partition(': ')[2] or last}"


def without_modules(text: str) -> str:
    """Module paths change when modules move, and the folder of a simulation is another one each time; behaviour does not change."""
    return _DRAWN.sub("RUN", _MODULE.sub("MODULE", text))


def of_cluster(story: Story) -> Played:
    """A whole cluster: its history, how it ended, and every record that was written, byte by byte."""
    stored = hashlib.sha256()
    revision = Invariants.revision

    def noted(invariants: Invariants, events: Any) -> None:
        run_dir = str(invariants._floor.run_dir).encode()
        for event in events:
            value = _OWN.sub("", without_modules(event.kv.value.replace(run_dir, b"RUN_DIR").decode()))
            stored.update(repr((event.kind, event.kv.key, value, event.kv.mod_revision)).encode())
        revision(invariants, events)

    with mock.patch.object(Invariants, "revision", noted):
        ended = tell_story(story)
    how = f"{ended.steps} steps, {ended.lineages} lineages, {ended.revisions} revisions, {ended.seconds:.6f} s"
    return played([*ended.history, f"{how}, {ended.faults} faults, wrong: {ended.wrong}"], stored.digest())


def of_moving_cluster(seed: int) -> Played:
    """Its slots move at each step."""
    with pytest.MonkeyPatch.context() as patch:
        propose_moves(patch)
        return of_cluster(moving(seed))


def of_protocol(simulation: Simulation, steps: int | None, events: int = EVENTS) -> Played:
    """The bare step protocol: what everybody did, and the store in the end. `steps`: after the faults; None: until the job is over."""

    async def story() -> None:
        simulation.start()
        await simulation.faulty(events)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(None if steps is None else head.record.step + steps)

    try:
        asyncio.run(story())
    except AssertionError as error:
        simulation.history.append(f"WRONG: {error}")
    listing = simulation.cluster.listing("")
    stored = repr([(kv.key, kv.value, kv.mod_revision) for kv in listing.kvs]).encode()
    return played(simulation.history, stored)


def of_race(race: Race) -> Played:
    """Long answers and short ones: which prompt ended how, and when."""
    race.run(30)
    ended = [f"{ref} {one.kind} {one.reason} {one.versions}" for ref, one in race.ended.items()]
    return played([*ended, f"{race.issued}", f"{race.trained}", f"{race.now} {race.losses}"])


def _apart(seed: int) -> Played:
    return of_cluster(replace(Story.of(seed), copies=2 + seed % 2))


def _turns(seed: int) -> Played:
    return of_cluster(replace(Story.of(seed), staleness=0, part=None, turns=True, copies=(None, None, 2)[seed % 3]))


def _protocol(seed: int) -> Played:
    part = 1 if seed % 4 == 1 else None
    return of_protocol(Simulation(seed, replace(RULES, staleness=(0, 0, 1, 2)[seed % 4], part=part)), 3)


def _parts(seed: int) -> Played:
    limit = (None, 11)[seed // 4 % 2]
    rules = replace(RULES, quota=(3, 5)[seed % 2], part=1 + seed // 2 % 2, issue_cap=3.0, limit=limit)
    return of_protocol(Simulation(seed, rules, filter_rate=(0.0, 0.2, 0.7)[seed % 3]), 3)


def _curriculum(seed: int) -> Played:
    return of_protocol(Simulation(seed, SMALL, curriculum=True), 6)


def _filtered(seed: int) -> Played:
    rules = replace(RULES, epochs=2, issue_cap=4.0, limit=(None, 6, 11)[seed % 3], on_limit=ON_LIMIT[seed // 3 % 3])
    return of_protocol(Simulation(seed, rules, filter_rate=(0.3, 0.7, 0.9)[seed // 9 % 3]), None, 150)


def _race(seed: int) -> Played:
    rules = replace(RULES, staleness=seed % 3, issue_cap=4.0, over_provision=(None, 1.5)[seed // 3 % 2])
    return of_race(Race(seed, rules, filtered=(0.0, 0.4)[seed // 2 % 2], kill_every=(None, 1000.0)[seed % 2]))


STORIES: dict[str, Callable[[int], Played]] = {
    "cluster": lambda seed: of_cluster(Story.of(seed)),
    "cluster, nodes share no folder": _apart,
    "cluster, slots take turns": _turns,
    "cluster, slots move": of_moving_cluster,
    "cluster, planned": lambda seed: of_cluster(planning(seed)),
    "protocol": _protocol,
    "protocol, steps in parts": _parts,
    "protocol, curriculum": _curriculum,
    "protocol, filtered": _filtered,
    "race": _race,
}


def play(seeds: list[int]) -> dict[int, dict[str, Played]]:
    """Every kind of story for each seed. Runs in a process of its own."""
    logging.disable(logging.CRITICAL)
    return {seed: {kind: story(seed) for kind, story in STORIES.items()} for seed in seeds}


def play_one(kind: str, seed: int) -> Played:
    """One story. Runs in a process of its own."""
    logging.disable(logging.CRITICAL)
    return STORIES[kind](seed)


def long_job(steps: int) -> Played:
    """One job for many steps: all that is in its store in the end."""
    from long_job import LongJob

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gcore-reference-") as folder:
        job = LongJob(Path(folder))
        asyncio.run(job.run(steps))
        kvs = job.cluster.listing("").kvs
        lines = [f"{kv.mod_revision} {kv.key} {kv.value.decode()}".replace(folder, "RUN_DIR") for kv in kvs]
    return played(lines)
