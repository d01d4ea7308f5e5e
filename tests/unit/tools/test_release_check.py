"""The checks before a release: relevant files, repeated checks, and checks that never count as passed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools import release_check
from tools.problem import ROOT
from tools.release_check import (
    LOGS,
    RESULT,
    SEEDS,
    Part,
    ReleaseResults,
    chaos_files,
    main,
    release_parts,
    run_part,
    tree_digest,
)


def git(root: Path, *words: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *names, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-m", "a")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two parts, of which the second fails while there is no file `well`."""
    git(tmp_path, "init")
    commit(tmp_path, {"gcore/a.py": "1", "docs/a.md": "1", ".gitignore": ".cache/\nwell\n"})
    parts = [
        Part("sim-0", (sys.executable, "-c", "print('fine')")),
        Part("second", (sys.executable, "-c", "import pathlib; assert pathlib.Path('well').exists(), 'not well'")),
    ]
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    monkeypatch.setattr(release_check, "fault_names", list)
    monkeypatch.setattr(release_check, "release_parts", lambda *_: parts)
    return tmp_path


def test_words_and_results_do_not_count_and_everything_else_does(repository: Path) -> None:
    first = tree_digest(repository)
    commit(repository, {"docs/a.md": "2", "CHANGELOG.md": "2", "benchmarks/results/a.json": "2"})
    assert tree_digest(repository) == first
    commit(repository, {"gcore/a.py": "2"})
    second = tree_digest(repository)
    git(repository, "mv", "gcore/a.py", "gcore/b.py")
    git(repository, "commit", "-m", "a")
    assert len({first, second, tree_digest(repository)}) == 3


@pytest.mark.parametrize("name", ["gcore/a.py", "gcore/new.py"])
def test_files_that_are_in_no_commit_are_refused(repository: Path, name: str) -> None:
    (repository / "docs/a.md").write_text("words may differ")
    tree_digest(repository)
    (repository / name).write_text("3")
    with pytest.raises(SystemExit, match=f"{name} differ from the commit"):
        tree_digest(repository)


def test_failed_and_missing_parts_are_repeated_and_passed_ones_are_not(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 1
    found = json.loads((repository / RESULT).read_text())
    assert {name: part["result"] for name, part in found["parts"].items()} == {"second": "failed", "sim-0": "passed"}
    assert found["parts"]["second"]["said"] == "AssertionError: not well"
    (repository / LOGS / "sim-0.log").unlink()
    (repository / "well").touch()
    assert main([]) == 0
    assert not (repository / LOGS / "sim-0.log").exists()
    assert "2 of 2 parts have passed" in capsys.readouterr().out


def test_another_digest_has_no_results_and_other_seeds(repository: Path) -> None:
    (repository / "well").touch()
    assert main([]) == 0
    commit(repository, {"gcore/a.py": "2"})
    assert main(["--list"]) == 1
    anew = ReleaseResults.read(repository / RESULT, tree_digest(repository))
    assert (anew.parts, anew.seeds) == ({}, (SEEDS, SEEDS))
    assert json.loads((repository / RESULT).read_text())["seeds"] == [0, SEEDS], "a look changes nothing"


def test_no_part_is_begun_after_the_time(repository: Path) -> None:
    assert main(["--minutes", "0"]) == 1
    assert not (repository / RESULT).exists()


def test_an_interrupted_part_has_no_result_and_leaves_no_process(repository: Path) -> None:
    wait = "import time; print('up', flush=True)\nwhile True: time.sleep(0.1)"
    log = repository / LOGS / "waits.log"

    def interrupt() -> None:
        while not log.exists() or b"up" not in log.read_bytes():
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_part(Part("waits", (sys.executable, "-c", wait)), repository)
    assert "KeyboardInterrupt" in log.read_text()


def test_the_parts_are_all_long_targets_each_chaos_file_and_fault_and_all_seeds() -> None:
    parts = release_parts(ROOT, ["controller", "etcd"], 5_000)
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    assert {"test", "fuzz", "mutations", "bench-check", "fault-controller", "fault-etcd"} < set(names)
    assert {
        f"test-{name}" for name in ("sglang", "vllm", "trackers", "deploy", "docs", "notebook", "large", "upgrade")
    } < set(names)
    seeds = [int(name.removeprefix("sim-")) for name in names if name.startswith("sim-")]
    assert (seeds[0], seeds[-1], len(seeds)) == (5_000, 24_000, 20)
    files = chaos_files(ROOT)
    assert "tests/integration/cluster/test_cluster.py" in files
    assert sum(name.startswith("chaos-") for name in names) == len(files)
