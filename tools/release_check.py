"""`make release-check`: everything that is checked before a release, in parts, over as many hours and sittings as it takes.

    python -m tools.release_check [PART ...] [--minutes 90] [--list]

A part is a command; it has passed if the command ends with 0. Results stand in `benchmarks/results/release.json`, written after each part,
and belong to one digest of the repository's files. The digest leaves out documents, the change log and results, so that words and figures
can be written afterwards. What has passed at the present digest is not run again; with another digest everything is, and the simulation
plays seeds that it never played. Output of a part goes to `.cache/release/PART.log`.

Ends with 0 only if every part has passed at the present digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.problem import ROOT

RESULT = Path("benchmarks/results/release.json")
LOGS = Path(".cache/release")
LEFT_OUT = ("docs/", "benchmarks/results/")
LEFT_OUT_FILES = ("CHANGELOG.md",)

SEEDS, SEEDS_OF_A_PART = 20_000, 1_000
FUZZ_S = 1_200
"""Seconds that the two fuzzers have together."""
MOMENTS = 5
"""Of each fault of the chaos table."""
SAID = 200
"""Characters of a part's last line that are kept."""


@dataclass(frozen=True)
class Part:
    """One command, and what it sets in the environment."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def release_parts(root: Path, faults: Iterable[str], first_seed: int) -> list[Part]:
    """All parts, the quick ones first. `faults`: names in the chaos table; `first_seed`: of the simulation."""
    python = (sys.executable, "-m")
    parts = [Part("test", ("make", "test"))]
    quick = ("bench-check", "test-docs", "test-deploy", "test-notebook", "test-trackers", "test-upgrade")
    parts += [Part(name, ("make", name)) for name in quick]
    fuzz = {"FUZZ_FLAGS": f"-max_total_time={FUZZ_S // 2}"}
    parts += [Part("fuzz", ("make", "fuzz", *(f"{name}={value}" for name, value in fuzz.items())))]
    parts += [Part(name, ("make", name)) for name in ("test-sglang", "test-vllm", "test-hf", "test-large", "mutations")]
    for file in chaos_files(root):
        name = f"chaos-{Path(file).stem.removeprefix('test_')}"
        parts.append(Part(name, (*python, "pytest", "-q", "-m", "chaos", file), {"OMP_NUM_THREADS": "1"}))
    for fault in faults:
        where = ("--results", str(LOGS / f"fault-{fault}.json"), "--fresh")
        table = (sys.executable, "tests/chaos/table.py", "--only", fault, "--moments", str(MOMENTS), *where)
        parts.append(Part(f"fault-{fault}", table))
    for first in range(first_seed, first_seed + SEEDS, SEEDS_OF_A_PART):
        seeds = ("--seeds", str(SEEDS_OF_A_PART), "--first", str(first), "--out", str(LOGS / f"sim-{first}.json"))
        parts.append(Part(f"sim-{first}", (*python, "benchmarks", "run", "sim", *seeds)))
    return parts


def chaos_files(root: Path) -> list[str]:
    """Test files with tests of whole clusters in which things are killed, but for those of the upgrade, a part of their own."""
    found = [file for file in sorted((root / "tests").rglob("test_*.py")) if "mark.chaos" in file.read_text()]
    upgrade = {"test_upgrade.py", "test_store_restored.py"}
    return [file.relative_to(root).as_posix() for file in found if file.name not in upgrade]


def fault_names() -> list[str]:
    """Of the chaos table."""
    listed = subprocess.run(
        [sys.executable, "tests/chaos/table.py", "--only", "list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line.split()[0] for line in listed.stdout.splitlines() if line]


def counts(path: str) -> bool:
    """Whether a file is part of what is checked."""
    return not path.startswith(LEFT_OUT) and path not in LEFT_OUT_FILES


def tree_digest(root: Path) -> str:
    """Of the committed files that count: modes, contents and paths. Raises SystemExit if files differ from the commit."""
    differing = _git(root, "diff", "--name-only", "HEAD") + _git(root, "ls-files", "--others", "--exclude-standard")
    if changed := [path for path in differing.splitlines() if counts(path)]:
        raise SystemExit(f"{', '.join(changed[:3])} differ from the commit: commit or put them away")
    rows = (row.partition("\t") for row in _git(root, "ls-tree", "-r", "HEAD").splitlines())
    text = "".join(f"{what}\t{path}\n" for what, _, path in rows if counts(path))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class ReleaseResults:
    """The results at one digest. `seeds`: the first seed of the simulation, and how many from there."""

    digest: str
    seeds: tuple[int, int] = (0, SEEDS)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, digest: str) -> ReleaseResults:
        """What stands in the file, or nothing if that is of another digest; then the seeds begin behind those."""
        if not file.exists():
            return cls(digest)
        tree = json.loads(file.read_text())
        first, count = tree["seeds"]
        if tree["digest"] == digest:
            return cls(digest, (first, count), tree["parts"])
        played = any(name.startswith("sim-") for name in tree["parts"])
        return cls(digest, (first + count if played else first, SEEDS))

    def write(self, file: Path) -> None:
        """Replace the file."""
        tree = {"digest": self.digest, "seeds": list(self.seeds), "parts": dict(sorted(self.parts.items()))}
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(tree, indent=1) + "\n")
        draft.replace(file)

    def state(self, name: str) -> str:
        """passed, failed or missing."""
        return str(self.parts.get(name, {}).get("result", "missing"))


def run_part(part: Part, root: Path) -> dict[str, Any]:
    """Its result. An interrupt ends its processes, and there is none."""
    log = root / LOGS / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            cwd=root,
            env={**os.environ, **part.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait()
    return {
        "result": "passed" if code == 0 else "failed",
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git(root, "rev-parse", "--short=8", "HEAD").strip(),
        "command": _shown(part.command),
        "said": last_line(log),
    }


def last_line(log: Path) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    text = next((line for line in reversed(lines) if line), "")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)[:SAID]


def _shown(command: Sequence[str]) -> str:
    return " ".join("python" if word == sys.executable else word for word in command)


def _git(root: Path, *words: str) -> str:
    command = ["git", "-c", "core.quotePath=off", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these (default: all that have not passed)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no part after that")
    parser.add_argument("--list", action="store_true", help="only show the parts and their results")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = ReleaseResults.read(ROOT / RESULT, tree_digest(ROOT))
    parts = release_parts(ROOT, fault_names(), results.seeds[0])
    if unknown := set(given.parts) - {part.name for part in parts}:
        parser.error(f"no part is called {min(unknown)}; --list shows them")
    end = time.monotonic() + given.minutes * 60
    if not given.list:
        for part in parts:
            wanted = part.name in given.parts if given.parts else results.state(part.name) != "passed"
            if wanted and time.monotonic() < end:
                print(f"{part.name:32} ...", end="\r", flush=True)
                results.parts[part.name] = run_part(part, ROOT)
                results.write(ROOT / RESULT)
                _show(part, results)
    else:
        for part in parts:
            _show(part, results)
    left = [part.name for part in parts if results.state(part.name) != "passed"]
    print(f"{len(parts) - len(left)} of {len(parts)} parts have passed at {results.digest}; {RESULT}")
    return 1 if left else 0


def _show(part: Part, results: ReleaseResults) -> None:
    found = results.parts.get(part.name)
    said = "" if found is None else f"{found['seconds']:8.1f} s  {found['said']}"
    print(f"{part.name:32} {results.state(part.name):8}{said}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on behind the last part that ended")
