"""Find what detects a mutation: seeds of both simulations first, then the unit test that the mutation names."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mutations import MUTATIONS, Broken
from simulated_cluster import tell_story
from simulated_story import Story
from step_simulation import RULES, Simulation

ROOT = Path(__file__).parents[2]
MOST_CPU_S = 40
"""Of one story. One that takes longer goes round in circles."""


@dataclass(frozen=True)
class Caught:
    """By which seed or test, and what it said."""

    mutation: str
    rule: str
    by: str
    """Empty: nothing has noticed."""
    said: str = ""


class InCircles(Exception):
    """A story does not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises InCircles in what takes too long, by the processor's time."""

    def over(*_: object) -> None:
        raise InCircles(f"it does not end: {MOST_CPU_S} s of the processor were not enough")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def bare(seed: int) -> str:
    """What is wrong with the bare protocol's story of that seed, or nothing."""

    async def story() -> None:
        simulation = Simulation(seed, replace(RULES, part=1) if seed % 3 == 2 else RULES)
        simulation.start()
        await simulation.faulty(250)
        head = simulation.fresh().head
        assert head is not None
        await simulation.calm(head.record.step + 3)

    try:
        asyncio.run(story())
    except Exception as error:  # whatever a mutation breaks, in whatever way
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[-1] if text else ''}"
    return ""


def whole(seed: int) -> str:
    """What is wrong with the whole cluster's story of that seed, or nothing."""
    try:
        wrong = tell_story(Story.of(seed)).wrong.strip()
    except Exception as error:  # likewise
        return f"{type(error).__name__}: {error}"
    return wrong.splitlines()[-1] if wrong else ""


def clusters(count: int, of_pictures: bool) -> Iterable[int]:
    """The first seeds of whole clusters; only those whose prompts have pictures, or all."""
    return itertools.islice((seed for seed in itertools.count() if Story.of(seed).pictures or not of_pictures), count)


def caught(name: str, *, bare_seeds: int, whole_seeds: int) -> Caught:
    """The first test or seed that detects it. Raises Broken for a mutation that raises unrelated errors, or whose tests cannot run."""
    mutation = MUTATIONS[name]
    of_pictures = mutation.rule == "blobs"
    bare_ones = () if of_pictures else range(bare_seeds)  # the bare protocol has no pictures
    for kind, play, seeds in (
        ("bare protocol", bare, bare_ones),
        ("whole cluster", whole, clusters(whole_seeds, of_pictures)),
    ):
        for seed in seeds:
            with mutation.applied():
                try:
                    with limited():
                        said = play(seed)
                except InCircles as error:
                    said = str(error)
            if said:
                return Caught(name, mutation.rule, f"{kind}, seed {seed}", said[:200])
    environment = {**os.environ, "GCORE_MUTATION": name, "PYTHONPATH": str(ROOT / "tests" / "support")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "mutated", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, mutation.caught_by], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ran.returncode not in (0, 1):
        raise Broken(
            f"the tests of {name!r} ended with {ran.returncode}: {ran.stdout.strip()[-600:]} {ran.stderr[-600:]}"
        )
    if ran.returncode == 1:
        failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
        by = failed[0].removeprefix("FAILED ").partition(" - ")[0] if failed else mutation.caught_by
        return Caught(name, mutation.rule, by)
    return Caught(name, mutation.rule, "")
