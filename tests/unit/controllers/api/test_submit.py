"""A sweep over the same files is checked once; whatever changes is checked anew."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controllers.api.submission.submit import KEPT_S, MOST, CheckCache, CheckFindings, spec_key
from gcore.config import JobSpec, parse_spec
from gcore.data.stream import identify_data
from gcore.errors import SpecError
from gcore.testing import FakeClock

FOUND = CheckFindings(1, "d", "", "", (), {}, 1, None)


class Checks:
    """Counts them; `wrong` is what the next finds."""

    def __init__(self) -> None:
        self.made = 0
        self.wrong: SpecError | None = None
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def __call__(self) -> CheckFindings:
        self.made += 1
        await self.goes_on.wait()
        if self.wrong is not None:
            raise self.wrong
        return FOUND


def spec(folder: Path, **more: Any) -> JobSpec:
    (folder / "model").mkdir(exist_ok=True)
    config, data = folder / "model" / "config.json", folder / "d.jsonl"
    if not config.exists():
        config.write_text("{}")
        data.write_text("{}\n")
    tree = {
        "name": "a",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(data)},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
    }
    return parse_spec(tree | more)


@pytest.fixture
def checks() -> Checks:
    return Checks()


async def test_many_jobs_over_the_same_files_are_checked_once_also_at_the_same_time(
    tmp_path: Path, checks: Checks
) -> None:
    lately = CheckCache(FakeClock())
    specs = [spec(tmp_path, name=f"job-{n}", scheduling={"priority": n}) for n in range(20)]
    assert await asyncio.gather(*(lately.found(one, checks) for one in specs)) == [FOUND] * 20
    await lately.found(spec(tmp_path, name="later", namespace="research"), checks)
    assert checks.made == 1


async def test_another_spec_or_another_file_is_checked_anew(tmp_path: Path, checks: Checks) -> None:
    lately = CheckCache(FakeClock())
    await lately.found(spec(tmp_path), checks)
    await lately.found(spec(tmp_path, flow={"steps": 8}), checks)
    assert checks.made == 2
    change(tmp_path / "d.jsonl", "{}\n{}\n")
    await lately.found(spec(tmp_path), checks)
    assert checks.made == 3
    change(tmp_path / "model" / "tokenizer.json", "{}")
    await lately.found(spec(tmp_path), checks)
    assert checks.made == 4


def change(file: Path, text: str) -> None:
    file.write_text(text)


def with_every_file(folder: Path) -> JobSpec:
    """A spec that names files wherever it can."""
    for name in ("critic", "judge"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    for name in ("template", "tools", "words", "their-template", "their-tools", "held-out", "question"):
        (folder / name).write_text("as it was")
    own = {"template": str(folder / "their-template"), "tools": str(folder / "their-tools")}
    sources = [{"name": "words", "path": str(folder / "words"), **own}]
    judge = {"name": "j", "model": {"path": str(folder / "judge")}, "template_file": str(folder / "question")}
    return spec(
        folder,
        data={"sources": sources, "template": str(folder / "template"), "tools": str(folder / "tools")},
        eval={"path": str(folder / "held-out"), "every": 1},
        judges=[judge],
        reward={"judge": "j"},
        flow={"name": "ppo", "steps": 9},
        train={"advantage": "gae", "critic": {"path": str(folder / "critic")}},
    )


FILES = (
    "model/config.json",
    "critic/config.json",
    "judge/config.json",
    "template",
    "tools",
    "words",
    "their-template",
    "their-tools",
    "held-out",
    "question",
)


@pytest.mark.parametrize("name", FILES)
def test_whichever_file_of_a_spec_changes_it_is_checked_anew(tmp_path: Path, name: str) -> None:
    full = with_every_file(tmp_path)
    before = spec_key(full)
    assert before is not None
    change(tmp_path / name, "as it is now")
    assert spec_key(full) != before


async def test_what_is_recorded_of_the_data_is_what_every_node_finds(tmp_path: Path) -> None:
    """A template that is edited between two submissions: the second one's digest is that of the new one."""
    (tmp_path / "template").write_text("{{ messages }}")
    full = spec(tmp_path, data={"path": str(tmp_path / "d.jsonl"), "template": str(tmp_path / "template")})
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    lately = CheckCache(FakeClock())

    async def check() -> CheckFindings:
        return replace(FOUND, data_digest=identify_data(full, tmp_path).digest)

    for text in ("{{ messages }}", "{{ messages }} and more"):
        change(tmp_path / "template", text)
        assert (await lately.found(full, check)).data_digest == identify_data(full, tmp_path).digest


def test_a_folder_that_jobs_write_to_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    full = spec(tmp_path, storage={"root": str(tmp_path / "runs")})
    before = spec_key(full)
    (tmp_path / "runs" / "another-job").mkdir()
    assert spec_key(full) == before


async def test_after_a_while_it_is_checked_anew_for_plug_ins_may_have_changed(tmp_path: Path, checks: Checks) -> None:
    clock = FakeClock()
    lately = CheckCache(clock)
    await lately.found(spec(tmp_path), checks)
    await clock.advance(KEPT_S + 1)
    await lately.found(spec(tmp_path), checks)
    assert checks.made == 2


async def test_what_was_wrong_is_never_remembered(tmp_path: Path, checks: Checks) -> None:
    lately = CheckCache(FakeClock())
    checks.wrong = SpecError("it is wrong")
    for _ in range(2):
        with pytest.raises(SpecError):
            await lately.found(spec(tmp_path), checks)
    checks.wrong = None
    assert await lately.found(spec(tmp_path), checks) == FOUND
    assert checks.made == 3


async def test_only_a_few_findings_are_kept(tmp_path: Path, checks: Checks) -> None:
    lately = CheckCache(FakeClock())
    for steps in range(1, MOST + 5):
        await lately.found(spec(tmp_path, flow={"steps": steps}), checks)
    assert len(lately._known) == MOST


async def test_who_gives_up_asking_takes_it_from_nobody(tmp_path: Path, checks: Checks) -> None:
    lately = CheckCache(FakeClock())
    checks.goes_on.clear()
    one, other = (asyncio.ensure_future(lately.found(spec(tmp_path), checks)) for _ in range(2))
    for _ in range(200):
        await asyncio.sleep(0.001)
        if checks.made:
            break
    one.cancel()
    await asyncio.wait({one})
    checks.goes_on.set()
    assert await other == FOUND
    assert checks.made == 1


def test_models_of_hubs_and_files_that_are_not_there_are_looked_up_each_time(tmp_path: Path) -> None:
    assert spec_key(spec(tmp_path)) is not None
    assert spec_key(spec(tmp_path, model={"path": "hf://a/b"})) is None
    assert spec_key(spec(tmp_path, data={"path": str(tmp_path / "nowhere")})) is None
    assert json.loads(spec_key(spec(tmp_path)) or "")[0].get("name") is None
