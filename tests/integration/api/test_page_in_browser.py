"""The web page in a real browser: its content, escaping of hostile text, no requests to third parties, dark and light mode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser

from controllers.api.edge.errors import NotFound
from controllers.web.app import PageApp
from controllers.web.content import ServedPicture
from gcore.errors import StoreUnavailable
from gcore.media.pictures import encode_png
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


LARGE = encode_png(np.full((200, 300, 3), 90, np.uint8))


def shown(sha256: str, url: str, height: int = 1, reward: float | None = None) -> dict[str, Any]:
    return {"sha256": sha256, "url": url, "height": height, "reward": reward}


def generated(step: int) -> dict[str, Any]:
    """The pictures of a job that generates pictures: a tiny one, a large one, and one that was deleted."""
    large = f"pictures/0-{step}/{'ab' * 32}"
    pictures = [shown("t", PIXEL, reward=1.0), shown("l", large, 200, 0.25), shown("gone", "", 200, 0.0)]
    prompt = {"prompt": HOSTILE, "mean_reward": 0.5, "pictures": [], "of_tools": [], "generated": pictures}
    before, after = shown("b", PIXEL, reward=0.0), shown("a", f"pictures/evaluation-0-17/{'cd' * 32}", 200, 1.0)
    cards = [
        {"prompt": HOSTILE, "pictures": [before, after], "right": [False, True]},
        {"prompt": "blue", "pictures": [None, before], "right": [None, None]},
    ]
    held_out = {"steps": [0, 17], "prompts": cards}
    return {"step": step, "steps": [3, 9, 17], "prompts": [prompt], "held_out": held_out}


class Told:
    """Stands for what is shown."""

    def __init__(self) -> None:
        self.away = False
        self.generates = False
        self.after: list[int] = []
        self.steps: list[int | None] = []
        self.served: list[str] = []

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
        events = [one for one in EVENTS if int(str(one["sequence"])) > after]
        if not self.generates:
            return {**WHOLE, "events": events}
        curves = WHOLE["curves"]
        points = curves["points"] | {"pictures_per_second": [[1, 30.0], [2, 31.0]]}
        return {**WHOLE, "events": events, "curves": curves | {"points": points}}

    async def slots(self, uid: str) -> dict[str, Any]:
        return SLOTS

    async def pictures(self, uid: str, step: int | None) -> dict[str, Any]:
        self.steps.append(step)
        if self.generates:
            return generated(step or 17)
        prompt = {"prompt": HOSTILE, "mean_reward": 0.5, "generated": []}
        pictures = {"pictures": [shown("ab", PIXEL)], "of_tools": [shown("cd", "")]}
        held_out: dict[str, Any] = {"steps": [], "prompts": []}
        return {"step": 17, "steps": [17], "prompts": [prompt | pictures], "held_out": held_out}

    async def picture(self, uid: str, folder: str, sha256: str) -> ServedPicture:
        self.served.append(f"{folder} {sha256[:2]}")
        return ServedPicture("image/png", LARGE)


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def address(told: Told) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    shown: Any = told
    server = serve_metrics(Metrics(), others=PageApp(lambda: shown, loop))
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


@pytest.fixture
def generates(told: Told, browser: Browser) -> Iterator[Told]:
    """Jobs generate pictures, and the browser has forgotten those that it fetched."""
    browser.open("about:blank")
    told.generates = True
    told.steps.clear()
    told.served.clear()
    yield told
    told.generates = False
    browser.open("about:blank")


def test_curves_of_generated_pictures_are_per_denoising_step_and_omit_the_entropy(
    browser: Browser, address: str, generates: Told
) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    browser.until("document.querySelector('.curves') !== null")
    shown = browser.value("document.querySelector('.curves').innerText")
    for said in ("KL", "nats/denoising step", "pictures/s"):
        assert said in shown
    for left_out in ("entropy", "token"):
        assert left_out not in shown


def test_generated_pictures_have_rewards_and_tiny_ones_keep_their_pixels(
    browser: Browser, address: str, generates: Told
) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    browser.until("document.querySelectorAll('#pictures img')[1]?.naturalWidth === 300")
    words_are_only_words(browser, pictures=5)
    assert browser.value("document.querySelector('#pictures h2').textContent") == "Generated pictures, step 17"
    rendering = "[...document.querySelectorAll('#pictures img')].map(one => getComputedStyle(one).imageRendering)"
    assert browser.value(rendering) == ["pixelated", "auto"]
    labels = "[...document.querySelectorAll('#pictures .side > div > div')].map(one => one.textContent)"
    assert browser.value(labels) == ["1", "0.25", "0"]
    assert browser.value("document.querySelector('#pictures p').textContent") == "sha256:gone"
    assert browser.told("Runtime.exceptionThrown") == []


def test_held_out_pictures_are_side_by_side_with_a_border_for_right_and_wrong(
    browser: Browser, address: str, generates: Told
) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    browser.until("document.querySelectorAll('#held-out img')[1]?.naturalWidth === 300")
    title = "Held-out pictures after steps 0, 17, with rewards"
    assert browser.value("document.querySelector('#held-out h2').textContent") == title
    sides = (
        "[...document.querySelectorAll('#held-out .side > div')].map(one => [one.className, one.lastChild.textContent])"
    )
    assert browser.value(sides) == [["wrong", "step 0: 0"], ["right", "step 17: 1"], ["", "step 0"], ["", "step 17: 0"]]
    alt = "[...document.querySelectorAll('#held-out img')].map(one => one.alt)"
    assert browser.value(alt) == ["step 0: 0, wrong", "step 17: 1, right", "step 17: 0"]
    borders = "[...document.querySelectorAll('#held-out img')].map(one => getComputedStyle(one).outlineStyle)"
    assert browser.value(borders) == ["solid", "solid", "none"]
    assert browser.value("document.querySelector('#held-out p').textContent") == "no picture"


def test_a_step_is_chosen_with_the_keyboard_and_a_picture_is_fetched_once(
    browser: Browser, address: str, generates: Told
) -> None:
    browser.open(f"{address}/#{JOB['uid']}")
    step = "document.querySelector('#pictures h2')?.textContent"
    browser.until(f"{step} === 'Generated pictures, step 17'")
    assert browser.value("document.getElementById('later').disabled")
    assert browser.value("document.getElementById('newest').disabled")
    for expected in (9, 3):
        browser.value("document.getElementById('earlier').focus()")
        browser.value("document.activeElement.click()")
        browser.until(f"{step} === 'Generated pictures, step {expected}'")
        assert browser.value("document.activeElement.id") == ("earlier" if expected == 9 else "")
    assert browser.value("document.getElementById('earlier').disabled")
    browser.value("document.getElementById('newest').click()")
    browser.until(f"{step} === 'Generated pictures, step 17'")
    assert generates.steps == [None, 9, 3, None]
    browser.until("performance.getEntriesByType('resource').filter(one => one.name.includes('slots')).length > 3")
    assert sorted(generates.served) == ["0-17 ab", "0-3 ab", "0-9 ab", "evaluation-0-17 cd"]


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
    assert {url for url in asked if not url.startswith((address, "data:", f"blob:{address}/"))} == set()
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
