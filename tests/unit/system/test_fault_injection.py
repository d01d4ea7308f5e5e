"""Fault points: no effect unless armed; once in a cluster; at the requested pass."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.errors import StoreUnavailable, UsageError
from gcore.ledger import chain
from gcore.ledger.transactions import Transaction, TransactionExecutor, TxnKind, TxnOutcome
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put
from gcore.system import fault_injection as fault_points
from gcore.system.fault_injection import VARIABLE, FaultPoint, MoveFaultPoint, fault_folder, fault_point
from gcore.testing.clock import FakeClock
from gcore.testing.store import MemoryCluster, MemoryStore

ROOT = Path(__file__).parents[3]
Arm = Callable[[str, str], None]
PROGRAM = "from gcore.system.fault_injection import fault_point; [fault_point('commit', 'before') for _ in range(3)]; print('alive')"


@pytest.fixture
def arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arm:
    monkeypatch.setattr(fault_points, "_FOLDER", tmp_path)
    monkeypatch.setattr(fault_points, "_passes", {})

    def put(name: str, words: str) -> None:
        (tmp_path / name).write_text(words)

    return put


def program(folder: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if folder is not None:
        environment[VARIABLE] = str(folder)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_without_the_variable_there_is_no_point_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_folder({}) is None
    assert fault_folder({VARIABLE: ""}) is None
    (tmp_path / "commit.before").write_text("kill")
    monkeypatch.chdir(tmp_path)
    assert program(None).stdout == "alive\n"


def test_a_process_is_killed_at_its_pass_and_only_one_is(tmp_path: Path) -> None:
    (tmp_path / "commit.before").write_text("kill 2")
    first = program(tmp_path)
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, "")
    assert [path.name.rsplit(".", 1)[0] for path in tmp_path.iterdir()] == ["commit.before.fired"]
    assert program(tmp_path).stdout == "alive\n"


def test_fault_claimed_by_another_process_does_not_fire_here(arm: Arm, tmp_path: Path) -> None:
    arm("commit.before", "lose")
    with pytest.raises(StoreUnavailable):
        fault_point("commit", "before")
    fault_point("commit", "before")
    fault_point("commit", "after")
    assert [path.name for path in tmp_path.iterdir()] == [f"commit.before.fired.{os.getpid()}"]


@given(words=st.text(max_size=20).filter(lambda text: text.split()[:1] not in (["kill"], ["stop"], ["lose"])))
def test_a_point_that_is_armed_wrongly_says_so(words: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("points")
    (folder / "seal.after").write_text(words, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_points, "_FOLDER", folder)
        with pytest.raises(UsageError, match="armed with"):
            fault_point("seal", "after")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_answer_that_is_lost_is_resolved_by_reading_head(arm: Arm, when: str) -> None:
    """Lost after: it was executed, and head's nonce shows it. Lost before: it was not executed."""
    store, keys = MemoryStore(MemoryCluster(FakeClock())), JobKeys("j")
    advance = chain.base_entry(1, "w", chain.ChainWriter("me", "n"))
    writes = (Put(keys.head, advance.head.encode()), Put(keys.log(0), advance.entry.encode()))
    txn = Transaction(TxnKind.COMMIT, (Compare(keys.head, 0),), writes, nonce="n")
    arm(f"commit.{when}", "lose")
    report = await TransactionExecutor(store, keys).run(txn)
    assert report.outcome is (TxnOutcome.WON if when == "after" else TxnOutcome.UNKNOWN)
    assert (await store.get(keys.head) is not None) == (when == "after")


def test_every_point_has_a_before_and_an_after_in_the_code() -> None:
    """A name that no code carries would be armed in vain."""
    found: dict[str, set[str]] = {}
    for file in (*ROOT.glob("gcore/**/*.py"), *ROOT.glob("controllers/**/*.py")):
        text = file.read_text(encoding="utf-8")
        if "fault_point(FaultPoint." in text or "fault_point(MoveFaultPoint." in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault_point":
                    what, when = node.args
                    assert isinstance(when, ast.Constant)
                    found.setdefault(ast.unparse(what), set()).add(when.value)
    names = [f"{type(one).__name__}.{one.name}" for one in (*FaultPoint, *MoveFaultPoint)]
    assert found == {name: {"before", "after"} for name in names}


FOR_PEOPLE = {
    "controllers/accounting/collector.py",
    "controllers/telemetry/notices.py",
    "controllers/job/preparation.py",
    "controllers/telemetry/run_recorder.py",
    "controllers/storage/run_folder.py",
    "controllers/api/edge/access.py",
    "gcore/engines/emulated/host.py",
}
"""Records that are written again if lost, or that only users or tests read."""


def test_every_transaction_stands_between_two_points() -> None:
    """The ledger's transactions all pass one place; a transaction elsewhere needs fault points, or a reason here for having none."""
    bare = set()
    for file in (*ROOT.glob("gcore/**/*.py"), *ROOT.glob("controllers/**/*.py")):
        text = file.read_text(encoding="utf-8")
        if "_store.transact(" in text and "fault_point(" not in text and "gcore/testing" not in str(file):
            bare.add(str(file.relative_to(ROOT)))
    assert bare - FOR_PEOPLE == set()
