"""Which etcd is warned of, where, and how often."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from controllers.daemon.daemon import Daemon
from gcore.config.node import NodeConfig
from gcore.store.client import EtcdStore
from gcore.store.etcd import LocalEtcd, is_unsafe, version_warning
from gcore.store.reference import StoreRef
from gcore.system.clock import SystemClock
from gcore.testing.clock import FakeClock


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
