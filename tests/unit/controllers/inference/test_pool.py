"""Routing to engines: conditions for a valid answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from engine_workers import ServingEngine, engines_at

from controllers.changes import ChangeSignal
from controllers.inference.pool import EnginePool
from controllers.inference.requests import MOST_FRUITLESS
from controllers.inference.rules import HealthLimits
from gcore.errors import EngineError, EngineUnreachable
from gcore.observability.metrics import Metrics
from gcore.rollout.api import RequestPictures
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.system.clock import retry_delay
from gcore.testing import FakeClock
from gcore.types import Medium, Sample, Version, VersionSpan

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


class OldEngine(ServingEngine):
    """Says that it serves one version, and answers with another."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(Version(0, 2))
        self.resumed = 0

    async def resume(self) -> None:
        self.resumed += 1

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        return tuple(Sample((1,), (0.0,), "a", "stop", (VersionSpan(Version(0, 1), 0, 1),)) for _ in seeds)


async def test_an_answer_made_with_other_weights_is_refused_and_its_engine_distrusted(tmp_path: Any) -> None:
    engines = EnginePool(ChangeSignal(), timeout_s=1.0, connect=OldEngine)  # type: ignore[arg-type]
    await engines.aim(engines_at(e="h:1"))
    await engines.publish("e", Version(0, 2), tmp_path)
    assert engines.serves(Version(0, 2))
    with pytest.raises(EngineError, match=r"weights 0\.1, not 0\.2"):
        await engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r")
    assert not engines.serves(Version(0, 2))


async def test_an_engine_that_has_the_version_already_is_let_go_on_for_its_publisher_may_have_died(
    tmp_path: Any,
) -> None:
    made: list[OldEngine] = []

    def connect(*_: Any, **__: Any) -> Any:
        made.append(OldEngine())
        return made[-1]

    engines = EnginePool(ChangeSignal(), timeout_s=1.0, connect=connect)
    await engines.aim(engines_at(e="h:1"))
    await engines.publish("e", Version(0, 2), tmp_path)
    assert [engine.resumed for engine in made] == [1]


class AskedEngine:
    """Takes whatever it is brought, notes what it was asked, and can be had by several books at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.serves = "0.1"
        self.refuses = self.is_away = self.is_paused = False
        self.updating = asyncio.Event()
        self.may_update = asyncio.Event()
        self.may_update.set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if self.is_away:
            raise httpx.ConnectError("no server")
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
        if path == "/update_weights_from_disk":
            self.updating.set()
            await self.may_update.wait()
            if self.refuses:
                return httpx.Response(400, json={"error": "no"})
            self.serves = json.loads(request.content)["weight_version"]
        return httpx.Response(200, json={"weight_version": self.serves, "success": True})

    def client(self, url: str, *, timeout_s: float, instance: str) -> EngineClient:
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(self.answer))

    def told(self) -> list[str]:
        """The requests since the last call."""
        told, self.asked = self.asked, []
        return told


async def book_of(engine: AskedEngine, **more: Any) -> EnginePool:
    book = EnginePool(ChangeSignal(), timeout_s=1.0, connect=engine.client, **more)
    await book.aim(engines_at(e="h:1"))
    return book


CHANGE = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


async def test_a_publication_asks_no_more_than_it_takes(tmp_path: Path) -> None:
    """The client asks an engine for its model only after a first contact, a failure or a refusal."""
    engine = AskedEngine()
    book = await book_of(engine)
    await book.publish("e", Version(0, 2), tmp_path)
    assert engine.told() == ["/model_info", *CHANGE]
    await book.publish("e", Version(0, 3), tmp_path)
    assert engine.told() == CHANGE
    assert book.serves(Version(0, 3))

    engine.refuses = True
    with pytest.raises(EngineError):
        await book.publish("e", Version(0, 4), tmp_path)
    assert not book.serves(Version(0, 3)), "it may hold a mixture"
    assert "refused" in book.views["e"].trouble
    engine.refuses = False
    engine.told()
    await book.publish("e", Version(0, 4), tmp_path)
    assert not book.views["e"].trouble
    assert engine.told() == ["/model_info", *CHANGE]

    book.distrust("e")
    await book.publish("e", Version(0, 5), tmp_path)
    assert engine.told() == ["/model_info", *CHANGE]
    await book.close()


async def test_an_engine_that_a_peer_left_paused_goes_on_with_the_next_publication(tmp_path: Path) -> None:
    """A controller is stopped before its pause. The owner publishes. The stopped one wakes up, pauses, and ends."""
    engine, late, woken = AskedEngine(), asyncio.Event(), asyncio.Event()

    async def answer_late(request: httpx.Request) -> httpx.Response:
        response = await engine.answer(request)
        if request.url.path == "/model_info":
            late.set()
            await woken.wait()
        return response

    def stopped_client(url: str, *, timeout_s: float, instance: str) -> EngineClient:
        return EngineClient(url, timeout_s=timeout_s, transport=httpx.MockTransport(answer_late))

    stopped = EnginePool(ChangeSignal(), timeout_s=1.0, connect=stopped_client)
    await stopped.aim(engines_at(e="h:1"))
    publication = asyncio.create_task(stopped.publish("e", Version(0, 2), tmp_path))
    await late.wait()
    owner = await book_of(engine)
    await owner.publish("e", Version(0, 2), tmp_path)
    engine.is_paused = True
    await owner.publish("e", Version(0, 3), tmp_path)
    assert not engine.is_paused
    woken.set()
    publication.cancel()
    await asyncio.gather(publication, return_exceptions=True)
    await owner.close()
    await stopped.close()


@pytest.mark.parametrize("given_up", ["lost", "closed and cancelled", "cancelled"])
async def test_abandoned_publication_resumes_the_engine(tmp_path: Path, given_up: str) -> None:
    engine = AskedEngine()
    engine.may_update.clear()
    book = await book_of(engine)
    publication = asyncio.create_task(book.publish("e", Version(0, 2), tmp_path))
    await engine.updating.wait()
    assert engine.is_paused
    if given_up == "lost":
        await book.aim({})  # it is a peer's from now on
        engine.may_update.set()
    elif given_up == "cancelled":
        publication.cancel()
    else:
        await book.close()
        publication.cancel()
    await asyncio.gather(publication, return_exceptions=True)
    assert not engine.is_paused
    await book.close()


async def test_engine_that_fails_its_weight_update_is_silent_at_the_next_check(tmp_path: Path) -> None:
    """Or it would be tried again at once, each time for as long as a request may take."""
    engine = AskedEngine()
    book = await book_of(engine, clock=FakeClock(), patience=HealthLimits())
    await book.publish("e", Version(0, 2), tmp_path)
    book.look_after()
    engine.is_away = True
    with pytest.raises(EngineUnreachable):
        await book.publish("e", Version(0, 3), tmp_path)
    book.look_after()
    assert book.views["e"].silent


class TellingEngine(OldEngine):
    """Tells of a response as it grows, and dies; what it tells last has tokens of other weights in it."""

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        asked, new = Version(0, 2), Version(0, 3)
        growing.tell(0, Sample((5, 6), (0.0, 0.0), "ab", "abort", (VersionSpan(asked, 0, 2),)))
        spans = (VersionSpan(asked, 0, 2), VersionSpan(new, 2, 3))
        growing.tell(0, Sample((5, 6, 7), (0.0, 0.0, 0.0), "abc", "abort", spans))
        raise EngineUnreachable("it is gone")


class LastEngine(OldEngine):
    """Notes what it is asked, and answers."""

    def __init__(self, asked: list[Any]) -> None:
        super().__init__()
        self.asked = asked

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.asked += prompts
        return (Sample((8,), (0.0,), "d", "stop", (VersionSpan(Version(0, 2), 0, 1),)),)


async def test_tokens_of_weights_that_were_not_asked_for_are_not_kept_when_their_engine_is_lost(tmp_path: Path) -> None:
    """A peer that also believed it to be its own had published to it; no step could train on such a response."""
    asked: list[Any] = []
    clients: list[Any] = [TellingEngine(), LastEngine(asked)]
    changes = ChangeSignal()
    book = EnginePool(changes, timeout_s=1.0, connect=lambda *_, **__: clients.pop(0), told_every=1)
    await book.aim(engines_at(e="h:1"))
    await book.publish("e", Version(0, 2), tmp_path)

    def decode(tokens: Any) -> str:
        return "".join(map(chr, tokens))

    generated = asyncio.create_task(book.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r", None, decode))
    while book.serves(Version(0, 2)):
        await changes.wait()
    await book.aim(engines_at(other="h:2"))
    await book.publish("other", Version(0, 2), tmp_path)
    (sample,) = await generated
    assert asked == [(1, 5, 6)]
    assert sample.token_ids == (5, 6, 8)
    assert {span.version for span in sample.spans} == {Version(0, 2)}


class GoneEngine(OldEngine):
    """Notes what it is asked, and does not answer: it was on the node of the one that told."""

    def __init__(self, asked: list[Any]) -> None:
        super().__init__()
        self.asked = asked

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.asked += prompts
        raise EngineUnreachable("the engine is gone")


class Node:
    """One engine that tells of two tokens and dies, so many that are gone, and a last one that answers."""

    def __init__(self, gone: int) -> None:
        self.asked: list[Any] = []
        self.clock = FakeClock()
        self.metrics = Metrics()
        clients: list[Any] = [TellingEngine(), *(GoneEngine(self.asked) for _ in range(gone)), LastEngine(self.asked)]
        self.names = [f"e{number:02}" for number in range(len(clients))]
        self.book = EnginePool(
            ChangeSignal(),
            timeout_s=1.0,
            connect=lambda *_, **__: clients.pop(0),
            clock=self.clock,
            metrics=self.metrics,
            told_every=1,
        )

    async def generate(self, folder: Path) -> tuple[Sample, ...]:
        await self.book.aim(engines_at(**{name: f"{name}:1" for name in self.names}))
        for name in self.names:
            await self.book.publish(name, Version(0, 2), folder)

        def decode(tokens: Any) -> str:
            return "".join(map(chr, tokens))

        return await self.book.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r", None, decode)

    @property
    def kept(self) -> float:
        return self.metrics.kept_tokens._value.get()


async def test_streamed_tokens_outlive_the_other_engines_of_the_node(tmp_path: Path) -> None:
    node = Node(gone=MOST_FRUITLESS - 1)
    begun = node.clock.monotonic()
    (sample,) = await node.clock.run(node.generate(tmp_path))
    assert node.asked == [(1, 5, 6)] * MOST_FRUITLESS
    assert sample.token_ids == (5, 6, 8)
    assert node.kept == 2, "and each token once"
    pauses = sum(retry_delay(tries) for tries in range(1, MOST_FRUITLESS))
    assert node.clock.monotonic() - begun == pytest.approx(pauses), "later and later, as with what is issued again"


async def test_streamed_tokens_are_dropped_after_several_fruitless_engines(tmp_path: Path) -> None:
    """It may be the prompt that kills them."""
    node = Node(gone=MOST_FRUITLESS)
    with pytest.raises(EngineUnreachable, match="the engine is gone"):
        await node.clock.run(node.generate(tmp_path))
    assert len(node.asked) == MOST_FRUITLESS
    assert node.kept == 0, "nobody got them"


async def test_a_request_that_is_given_up_between_two_engines_asks_no_more(tmp_path: Path) -> None:
    """Its step is over, say: no engine serves its weights any more."""
    node = Node(gone=2)
    generated = asyncio.create_task(node.generate(tmp_path))
    await node.clock.settle()
    assert len(node.asked) == 1
    generated.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generated
    await node.clock.advance(60.0)
    assert len(node.asked) == 1


class NamedEngine(OldEngine):
    """Notes what its requests are called and which it is to give up, and answers none of them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.called: asyncio.Queue[str] = asyncio.Queue()
        self.given_up: asyncio.Queue[str] = asyncio.Queue()

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.called.put_nowait(rid)
        await asyncio.Event().wait()
        return ()

    async def abort(self, rid: str, count: int) -> None:
        self.given_up.put_nowait(rid)


async def test_the_abort_of_a_request_that_was_given_up_cannot_end_the_one_that_repeats_it(tmp_path: Any) -> None:
    engine = NamedEngine()
    engines = EnginePool(ChangeSignal(), timeout_s=1.0, connect=lambda *_, **__: engine)  # type: ignore[arg-type]
    await engines.aim(engines_at(e="h:1"))
    await engines.publish("e", Version(0, 2), tmp_path)
    first = asyncio.create_task(engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r"))
    name = await engine.called.get()
    first.cancel()
    again = asyncio.create_task(engines.generate(Version(0, 2), [(1,)], PARAMS, (0,), "r"))
    assert await engine.given_up.get() == name
    assert await engine.called.get() != name
    again.cancel()


class SlowEngine(OldEngine):
    """Takes its weights, and answers, when it is let."""

    def __init__(self, address: str, **_: Any) -> None:
        super().__init__()
        self.address = address
        self.weights: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers = asyncio.Event()
        self.asked = 0
        self.version = Version(0, 1)

    async def update_weights(self, folder: str, version: Version) -> None:
        await self.weights
        await super().update_weights(folder, version)

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.asked += 1
        await self.answers.wait()
        return tuple(Sample((1,), (0.0,), "a", "stop", (VersionSpan(self.version, 0, 1),)) for _ in seeds)


class Two:
    """A quick engine that serves version 0.2 and a slow one on its way there, and four requests for that version."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.made: dict[str, SlowEngine] = {}
        self.book = EnginePool(ChangeSignal(), timeout_s=1.0, connect=self._connect)  # type: ignore[arg-type]
        self.requests: list[asyncio.Task[tuple[Sample, ...]]] = []
        self.publication: asyncio.Task[None]

    def _connect(self, address: str, **_: Any) -> SlowEngine:
        self.made[address] = SlowEngine(address)
        return self.made[address]

    async def begin(self) -> tuple[SlowEngine, SlowEngine]:
        await self.book.aim({name: SimpleNamespace(address=name, node="n") for name in ("quick", "slow")})  # type: ignore[arg-type]
        quick, slow = self.made["http://quick"], self.made["http://slow"]
        quick.weights.set_result(None)
        self.publication = asyncio.create_task(self.book.publish("slow", Version(0, 2), self.folder))
        await asyncio.sleep(0)
        await self.book.publish("quick", Version(0, 2), self.folder)
        self.requests = [
            asyncio.create_task(self.book.generate(Version(0, 2), [(1,)] * 8, PARAMS, (0,) * 8, str(n)))
            for n in range(4)
        ]
        await settle()
        return quick, slow


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_step_is_dealt_to_all_engines_though_one_is_ready_first(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    assert (quick.asked, slow.asked) == (2, 0)
    slow.weights.set_result(None)
    await settle()
    assert (quick.asked, slow.asked) == (2, 2)
    quick.answers.set()
    slow.answers.set()
    assert [len(samples) for samples in await asyncio.gather(*two.requests)] == [8] * 4
    await two.publication


async def test_requests_for_an_engine_that_does_not_come_up_move_to_a_free_one(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    quick.answers.set()
    await asyncio.gather(*two.requests)
    assert (quick.asked, slow.asked) == (4, 0)
    two.publication.cancel()


async def test_requests_for_an_engine_whose_weights_fail_move_at_once(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    slow.weights.set_exception(EngineError("no such weights"))
    await settle()
    assert (quick.asked, slow.asked) == (4, 0)
    with pytest.raises(EngineError, match="no such weights"):
        await two.publication
    quick.answers.set()
    await asyncio.gather(*two.requests)


async def test_a_request_that_is_given_up_while_it_waits_leaves_its_place(tmp_path: Any) -> None:
    two = Two(tmp_path)
    quick, slow = await two.begin()
    for request in two.requests:
        request.cancel()
    await asyncio.gather(*two.requests, return_exceptions=True)
    slow.weights.set_result(None)
    await two.publication
    again = [asyncio.create_task(two.book.generate(Version(0, 2), [(1,)], PARAMS, (0,), str(n))) for n in range(2)]
    await settle()
    assert (quick.asked, slow.asked) == (3, 1)
    quick.answers.set()
    slow.answers.set()
    await asyncio.gather(*again)


class GrowingEngine(OldEngine):
    """Tells of its first response when that is finished, and answers with both when it is let."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.every: list[int] = []
        """After how many tokens it was to tell; 0: not at all."""

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.every.append(0 if growing is None else growing.every)
        made = [Sample((n,), (0.0,), str(n), "stop", (VersionSpan(Version(0, 2), 0, 1),)) for n in range(len(seeds))]
        if growing is not None:
            growing.tell(1, replace(made[1], finish_reason="abort"))
            growing.tell(0, made[0])
        await self.may_end.wait()
        return tuple(made)


@pytest.mark.parametrize("longest", [64, 65])
async def test_finished_responses_are_reported_early_unless_all_are_short(tmp_path: Path, longest: int) -> None:
    engine, told = GrowingEngine(), list[tuple[int, str]]()
    book = EnginePool(ChangeSignal(), timeout_s=1.0, connect=lambda *_, **__: engine, told_every=0)  # type: ignore[arg-type]
    await book.aim(engines_at(e="h:1"))
    await book.publish("e", Version(0, 2), tmp_path)
    asked = asyncio.create_task(
        book.generate(
            Version(0, 2),
            [(1,), (1,)],
            SamplingParams(temperature=1.0, max_new_tokens=longest),
            (0, 1),
            "r",
            None,
            lambda ids: "",
            lambda number, sample: told.append((number, sample.text)),
        )
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert (told, engine.every) == (([], [0]) if longest == 64 else ([(0, "0")], [65]))
    engine.may_end.set()
    assert [sample.text for sample in await asked] == ["0", "1"]
    await book.close()


class SeeingEngine(OldEngine):
    """Keeps the parameters of its requests."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.asked: list[Any] = []

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.asked.append(params)
        return tuple(Sample((1,), (0.0,), "a", "stop", (VersionSpan(Version(0, 2), 0, 1),)) for _ in seeds)


async def test_a_request_names_its_pictures_where_the_store_of_the_engines_node_has_them(tmp_path: Path) -> None:
    made: list[SeeingEngine] = []

    def connect(*_: Any, **__: Any) -> Any:
        made.append(SeeingEngine())
        return made[-1]

    asked: list[str] = []

    async def provide(node: str) -> str:
        asked.append(node)
        return f"/blobs/{node}"

    engines = EnginePool(ChangeSignal(), timeout_s=1.0, connect=connect)
    workers = engines_at(e="h:1")
    await engines.aim(workers)
    await engines.publish("e", Version(0, 2), tmp_path)
    medium = Medium("picture", "cd" * 32, 100, (32, 48, 3), "uint8")
    params = replace(PARAMS, pictures=RequestPictures((medium,), 1, (1,), provide))
    await engines.generate(Version(0, 2), [(1,), (1,)], params, (0, 1), "r")
    node = workers["e"].node
    assert asked == [node], "once for all samples of a prompt"
    assert [one.pictures.paths for one in made[0].asked[0]] == [[f"/blobs/{node}/cd/{medium.sha256}"]] * 2


async def test_requests_with_pictures_stay_on_the_controllers_node_until_its_engine_is_full(tmp_path: Path) -> None:
    class Busy(SeeingEngine):
        async def generate_each(self, *args: Any, **named: Any) -> tuple[Sample, ...]:
            made = await super().generate_each(*args, **named)
            await finish.wait()
            return made

    made: dict[str, Busy] = {}

    def connect(url: str, **_: Any) -> Any:
        return made.setdefault(url.removeprefix("http://"), Busy())

    async def provide(node: str) -> str:
        return f"/blobs/{node}"

    finish = asyncio.Event()
    engines = EnginePool(ChangeSignal(), timeout_s=1.0, connect=connect, rows=4)
    workers = {
        name: worker.model_copy(update={"node": node})
        for node, (name, worker) in zip(("here", "away"), engines_at(b="h:1", a="h:2").items(), strict=True)
    }
    await engines.aim(workers)
    for name in workers:
        await engines.publish(name, Version(0, 2), tmp_path)
    medium = Medium("picture", "cd" * 32, 100, (32, 48, 3), "uint8")
    seen = replace(PARAMS, pictures=RequestPictures((medium,), 1, (1,), provide, lambda: {"here"}))
    asked = []
    for params, counts in ((seen, [1, 0]), (seen, [2, 0]), (seen, [2, 1]), (seen, [2, 2]), (PARAMS, [3, 2])):
        asked.append(asyncio.create_task(engines.generate(Version(0, 2), [(1,), (1,)], params, (0, 1), "r")))
        await asyncio.sleep(0.01)
        expected = counts if params is seen else None
        found = [len(made[address].asked) for address in ("h:1", "h:2")]
        assert expected is None or found == expected
    assert sorted(found) == [2, 3], "a request without pictures goes to either"
    finish.set()
    await asyncio.gather(*asked)
    await engines.close()
