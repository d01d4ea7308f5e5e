"""The web page in a real browser: its content, escaping of hostile text, no requests to third parties, dark and light mode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

from controllers.api.edge.errors import NotFound
from controllers.web.app import PageApp
from gcore.errors import StoreUnavailable
from gcore.observability.http import serve_metrics
from gcore.observability.metrics import Metrics

pytestmark = pytest.mark.needs("chromium")

HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script>\"'`${window.hurt=1}"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
JOB = {
    "uid": "3d214e67104a",
    "name": HOSTILE,
    "state": "RUNNING",
    "reason": HOSTILE,
    "created": 1000.0,
    "ended": 0.0,
    "step": 17,
    "steps": 40,
    "lineage": 2,
    "slots": 3,
    "place": 0,
    "accuracy": 0.75,
    "shares": {HOSTILE: 16, "node-1": 16},
}
WHOLE: dict[str, Any] = {
    **JOB,
    "node": "node-0",
    "time": 1100.0,
    "waiting": [{"what": HOSTILE, "seconds": 12.5}],
    "warnings": [{"sentence": HOSTILE, "node": HOSTILE, "time": 1090.0}],
    "curves": {
        "points": {
            "reward": [[step, step / 20] for step in range(1, 18)],
            "kl": [[1, 0.0]],
            "entropy": [[1, 2.0], [2, 2.0]],
            "collect_s": [[1, 2.0], [2, 3.0]],
            "train_s": [[1, 1.0], [2, 1.0]],
        },
        "newest": 17,
        "partial": True,
    },
    "split": {"rollout": 3, HOSTILE: 1},
    "moves": [
        {
            "time": 1004.0,
            "step": 3,
            "state": "done",
            "said": f"went, because {HOSTILE}",
            "expected": HOSTILE,
            "outcome": "it took 2 s",
        }
    ],
}
EVENTS = [
    {
        "sequence": number,
        "time": 1000.0 + number,
        "kind": "warning" if number % 2 else "step",
        "message": f"{number} {HOSTILE}",
    }
    for number in range(5)
]
SLOTS = {
    "rows": [
        {
            "node": "node-0",
            "slot": HOSTILE,
            "spans": [[1000.0, 1006.0, "busy rollout"], [1006.0, 1010.0, HOSTILE], [1010.0, 1011.0, ""]],
        },
        {
            "node": "node-1",
            "slot": "cpu:1",
            "spans": [[1000.0, 1005.0, "idle rollout tail"], [1005.0, 1010.0, "busy train"]],
        },
    ],
    "steps": [[1000.0, 1010.0, 17]],
    "more": 3,
}


class Told:
    """Stands for what is shown."""

    def __init__(self) -> None:
        self.away = False
        self.after: list[int] = []

    async def cluster(self) -> dict[str, Any]:
        if self.away:
            raise StoreUnavailable("the store does not answer", fix="Wait")
        nodes = [{"name": "node-0", "slots": 1}, {"name": HOSTILE, "slots": 4}]
        return {
            "node": HOSTILE,
            "time": 1100.0,
            "nodes": nodes,
            "jobs": [JOB, {**JOB, "uid": "other", "name": "", "state": "QUEUED", "slots": 0, "place": 2}],
            "more": True,
        }

    async def job(self, uid: str, after: int) -> dict[str, Any]:
        if uid != JOB["uid"]:
            raise NotFound(f"there is no job {uid!r}", fix="Look at the list")
        self.after.append(after)
        return {**WHOLE, "events": [one for one in EVENTS if int(str(one["sequence"])) > after]}

    async def slots(self, uid: str) -> dict[str, Any]:
        return SLOTS

    async def pictures(self, uid: str) -> dict[str, Any]:
        return {
            "step": 17,
            "prompts": [{"prompt": HOSTILE, "mean_reward": 0.5, "pictures": [["ab", PIXEL]], "of_tools": [["cd", ""]]}],
        }


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def address(told: Told) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    shown: Any = told
    server = serve_metrics(Metrics(), others=PageApp(shown, loop))
    yield f"http://{server.address}"
    server.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def words_are_only_words(browser: Browser, pictures: int = 0) -> None:
    """`pictures`: number of pictures that the page itself shows."""
    assert browser.value("typeof window.hurt") == "undefined"
    assert browser.value("document.querySelectorAll('img').length") == pictures
    assert browser.value("document.scripts.length") == 1
    assert HOSTILE in browser.value("document.body.textContent")


def test_the_list_shows_jobs_and_nodes_and_names_are_only_words(browser: Browser, address: str) -> None:
    browser.open(f"{address}/")
    browser.until("document.querySelectorAll('tbody tr').length === 2")
    words_are_only_words(browser)
    shown = browser.value("document.body.innerText")
    for said in ("17 / 40", "0.75", "running", "node-0 (1 slot)", "Older jobs are not shown", "queued", "queue: 2"):
        assert said in shown
    assert browser.value("document.querySelectorAll('td a')[1].textContent") == "other", (
        "a job without a name has its uid"
    )
    browser.value("document.querySelector('td a').click()")
    browser.until("document.querySelector('#slots') !== null")


def test_a_job_shows_curves_slots_moves_with_reasons_and_events(browser: Browser, address: str, told: Told) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    browser.until("document.querySelectorAll('#slots rect title').length === 5")
    browser.until("document.querySelector('#pictures img')?.naturalWidth")
    words_are_only_words(browser, pictures=1)
    shown = browser.value("document.body.innerText")
    for said in (
        "step 17 of 40, lineage 2, on 3 slots",
        "Learning curves",
        "waiting: ",
        "for 13 s",
        "reward",
        "0.85",
        "went, because",
        "it took 2 s",
    ):
        assert said in shown
    # Reward, entropy, and of KL one point; beside them the phases.
    assert browser.value("document.querySelectorAll('.curve path').length") == 3
    assert browser.value("document.querySelectorAll('.curve rect.f-train').length") >= 2
    assert browser.value("document.querySelectorAll('#slots line.mark').length") == 1
    assert browser.value(
        "[...document.querySelectorAll('#slots rect.f-rollout title')].map(one => one.textContent)[0]"
    ).endswith("busy rollout, 6 s")
    assert browser.value("document.querySelector('#pictures img').naturalWidth") == 1
    assert browser.value("document.querySelector('#pictures p').textContent") == "sha256:cd"
    assert browser.value("document.querySelectorAll('#events li').length") == 5
    assert browser.value("document.querySelector('#events li').textContent").startswith(
        browser.value("new Date(1004000).toLocaleTimeString()")
    )


def test_it_looks_again_for_what_is_new_only(browser: Browser, address: str, told: Told) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    browser.until("document.querySelectorAll('#events li').length === 5")
    told.after.clear()
    browser.until(
        f"{len(EVENTS)} === document.querySelectorAll('#events li').length && performance.getEntriesByType('resource').length > 4"
    )
    assert told.after
    assert set(told.after) == {4}
    assert browser.value("document.querySelectorAll('#events li').length") == 5


def test_page_contacts_no_third_party_and_raises_no_error(browser: Browser, address: str) -> None:
    asked = {one["request"]["url"] for one in browser.told("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith((address, "data:"))} == set()
    assert browser.told("Runtime.exceptionThrown") == []
    assert [one["entry"] for one in browser.told("Log.entryAdded")] == []


def test_a_script_that_got_into_the_page_would_not_run(browser: Browser, address: str) -> None:
    browser.value(
        "(() => { const one = document.createElement('script'); one.textContent = 'window.hurt = 1'; document.body.append(one);"
        " const two = document.createElement('div'); two.innerHTML = `<img src=x onerror='window.hurt=1'>`; document.body.append(two); })()"
    )
    assert browser.value("typeof window.hurt") == "undefined"
    blocked = [one["entry"]["text"] for one in browser.told("Log.entryAdded")]
    assert any("Content Security Policy" in text for text in blocked)


def test_a_store_that_is_away_is_said_and_what_was_seen_stays(browser: Browser, address: str, told: Told) -> None:
    browser.open(f"{address}/#")
    browser.until("document.querySelectorAll('tbody tr').length === 2")
    told.away = True
    try:
        said = browser.until("document.querySelector('#state.trouble')?.textContent")
        assert "the store does not answer. Wait" in said
        assert browser.value("document.querySelectorAll('tbody tr').length") == 2
    finally:
        told.away = False
    browser.until("document.querySelector('#state.trouble') === null")


def test_a_job_that_is_not_there_is_said(browser: Browser, address: str) -> None:
    browser.open(f"{address}/#nobody")
    assert "there is no job 'nobody'" in browser.until("document.querySelector('#state.trouble')?.textContent")
    browser.open(f"{address}/#%E0%A4%A")
    browser.until("document.querySelectorAll('tbody tr').length === 2")


def test_an_address_with_a_name_and_a_token_in_it_shows_the_jobs(browser: Browser, address: str) -> None:
    browser.open(address.replace("http://", "http://you:token@") + "/#")
    browser.until("document.querySelectorAll('tbody tr').length === 2")


@pytest.mark.parametrize("width", [1280, 380])
def test_content_fits_into_wide_and_narrow_windows(browser: Browser, address: str, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(f"{address}/#{JOB['uid']}")
        browser.until("document.querySelectorAll('.curve').length === 4")
        too_wide = "[...document.querySelectorAll('.curve, body')].filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"
        assert browser.value(too_wide) == []
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_it_is_dark_where_the_browser_is_and_light_elsewhere(browser: Browser, address: str, tmp_path: Path) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    browser.until("document.querySelector('#slots') !== null")
    seen = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        back, text = (browser.value(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
        seen[scheme] = [sum(map(int, one[4:-1].split(","))) for one in (back, text)]
        browser.picture(tmp_path / f"{scheme}.png")
        assert (tmp_path / f"{scheme}.png").stat().st_size > 10_000
    assert seen["light"][0] > 600 > 300 > seen["light"][1]
    assert seen["dark"][1] > 600 > 300 > seen["dark"][0]
