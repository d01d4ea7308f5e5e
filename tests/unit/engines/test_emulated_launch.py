"""The start of emulated engines: names, the launch document, its receiver, and the judges that may be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controllers.api.submission.nodes import check_served_judges
from controllers.workers.launch_documents import emulated_engine, emulated_host
from gcore.config import JobSpec, NodeConfig, parse_spec
from gcore.engines.emulated.launch import HostLaunch, LaunchQueue
from gcore.errors import SpecError
from gcore.ledger.records.job import EnginePlace, NodeRecord
from gcore.schema import UnreadableRecord
from gcore.store.reference import StoreRef

EMULATED = NodeRecord(name="e", incarnation="e.1", address="h:1", slots=("emulated:0",), pid=1)
CONFIG = NodeConfig(node="n", home="/h", etcd=StoreRef(endpoints=("h:1",)), slots=("emulated:0",), run_root="/h")


def spec(**judge: Any) -> JobSpec:
    tutor = {"name": "tutor", "model": {"path": "j"}, "template": "{{ response }}"} | judge
    return parse_spec(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 1},
            "rollout": {"max_new_tokens": 7},
            "judges": [tutor],
            "reward": {"judge": "tutor"},
        }
    )


def launched(job: JobSpec, name: str, *places: EnginePlace) -> HostLaunch:
    return emulated_host(job, CONFIG, "uid", name, tuple(emulated_engine(place, name) for place in places))


def test_a_judges_engine_is_told_what_its_job_says_of_it() -> None:
    job = spec(max_new_tokens=9, serving={"batch_slots": 5}, verdict={"most": 10})
    places = (EnginePlace(node="n", slot="emulated:3"), EnginePlace(node="n", slot="emulated:3", judge="tutor"))
    launch = HostLaunch.decode(launched(job, "host", *places).encode())
    assert [(e.instance, e.slot, e.judge) for e in launch.engines] == [
        ("rollout-host-3", "emulated:3", ""),
        ("reward-host-tutor-3", "emulated:3", "tutor"),
    ]
    (judge,) = launch.judges
    assert (judge.model, judge.rows, judge.longest, judge.verdict["most"]) == ("j", 5, 9, 10.0)
    assert launch.longest == 7
    assert launched(job, "host", places[0]).judges == ()


def test_emulated_slots_serve_judges_that_write_and_no_classifiers() -> None:
    check_served_judges(spec(), [EMULATED])
    with pytest.raises(
        SpecError, match="judge 'tutor' is a classifier, and the emulated slots of e serve only generative judges"
    ):
        check_served_judges(spec(kind="classifier"), [EMULATED])


def test_a_document_is_taken_once_by_the_one_process_that_has_the_claim(tmp_path: Path) -> None:
    first, second = LaunchQueue(tmp_path / "inbox"), LaunchQueue(tmp_path / "inbox")
    launches = [launched(spec(), name, EnginePlace(node="n", slot="emulated:0")) for name in ("a", "b")]
    files = [inbox.put(launch) for inbox, launch in zip((first, second), launches, strict=True)]
    assert (first.claim(), second.claim(), first.claim()) == (True, False, True)
    assert first.take() == launches
    assert not any(file.exists() for file in files)
    assert first.take() == []


def test_invalid_launch_document_is_named(tmp_path: Path) -> None:
    inbox = LaunchQueue(tmp_path / "inbox")
    (tmp_path / "inbox" / "x.json").write_text("{}")
    with pytest.raises(UnreadableRecord, match=r"x\.json"):
        inbox.take()
