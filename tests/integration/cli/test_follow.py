"""Following a job while controllers die: no line is lost, and none appears twice."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from fake_jobs import FakeJobs, Script

from controllers.cli.commands import run as creating
from gcore.api.v1 import jobs_pb2 as pb
from gcore.client import JobsClient, WaitPolicy
from gcore.errors import GcoreError, StoreUnavailable, Unreachable, UsageError
from gcore.observability.events import JobEvent
from gcore.system.clock import SystemClock

QUICK = WaitPolicy(quiet_s=0.1, probe_s=2.0, retry_s=0.02)


def steps(first: int, last: int) -> list[JobEvent]:
    return [JobEvent(n, float(n), "step", data={"step": n, "steps": 9}) for n in range(first, last + 1)]


def succeeded(sequence: int) -> JobEvent:
    return JobEvent(sequence, float(sequence), "state", data={"state": "SUCCEEDED"})


@pytest.fixture
def script():
    return Script(pb.Job(uid="u1", name="sums", state=pb.JOB_STATE_RUNNING, steps=9))


@pytest.fixture
async def servers(script):
    both = [await FakeJobs(script).start(), await FakeJobs(script).start()]
    yield both
    for server in both:
        await server.kill()


def client(*servers: FakeJobs, patience: WaitPolicy = QUICK) -> JobsClient:
    return JobsClient([s.address for s in servers], clock=SystemClock(), patience=patience)


class SlowJobs(FakeJobs):
    """Creates a job only when it is let, as a controller that reads large data does."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def CreateJob(self, request, context):
        self.asked.set()
        await self.let.wait()
        return await super().CreateJob(request, context)


IMPATIENT = WaitPolicy(call_s=0.05, probe_s=5.0)


async def test_a_creation_that_takes_longer_than_other_calls_is_waited_for(script):
    slow = await SlowJobs(script).start()
    async with JobsClient([slow.address], clock=SystemClock(), patience=IMPATIENT) as jobs:
        waiting = asyncio.create_task(jobs.create_job("{}", request_id="r", mode=pb.START_MODE_UNSPECIFIED))
        await slow.asked.wait()
        await asyncio.sleep(0.5)  # ten times what another call is given
        slow.let.set()
        assert (await waiting).uid == "u1"
    await slow.kill()


async def test_slow_job_creation_prints_what_it_waits_for(script, monkeypatch, capsys):
    slow = await SlowJobs(script).start()
    async with JobsClient([slow.address], clock=SystemClock()) as jobs:
        slow.let.set()
        job = await creating.create_job(jobs, "{}", request_id="r", new=False)
        assert (job.uid, capsys.readouterr().err) == ("u1", "")
        slow.let.clear()
        monkeypatch.setattr(creating, "QUIET_S", 0.01)
        told = asyncio.Event()
        monkeypatch.setattr(creating.typer, "echo", lambda text, err: (told.set(), print(text, err)))
        waiting = asyncio.create_task(creating.create_job(jobs, "{}", request_id="r", new=False))
        await told.wait()
        slow.let.set()
        assert (await waiting).uid == "u1"
    assert capsys.readouterr().out == f"{creating.NOTICE} True\n"
    await slow.kill()


async def test_a_creation_goes_to_another_controller_when_the_first_says_nothing_more(script):
    slow, other = await SlowJobs(script).start(), await FakeJobs(script).start()
    patience = WaitPolicy(call_s=0.05, probe_s=0.1)
    async with JobsClient([slow.address, other.address], clock=SystemClock(), patience=patience) as jobs:
        waiting = asyncio.create_task(jobs.create_job("{}", request_id="r", mode=pb.START_MODE_UNSPECIFIED))
        await slow.asked.wait()
        slow.hush()
        assert (await waiting).uid == "u1"
    for server in (slow, other):
        await server.kill()


async def test_following_goes_on_from_another_controller_when_the_first_is_killed(script, servers):
    script.play(steps(1, 3))
    seen = []
    async with client(*servers) as jobs, aclosing(jobs.follow("sums")) as events:
        async for event in events:
            seen.append(event.sequence)
            if event.sequence == 3:
                await servers[0].kill()
                script.play([*steps(4, 6), succeeded(7)])
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert servers[1].watches[0] == 3


async def test_following_leaves_a_controller_that_says_nothing_more(script, servers):
    script.play(steps(1, 2))
    seen = []
    async with client(*servers) as jobs, aclosing(jobs.follow("sums")) as events:
        async for event in events:
            seen.append(event.sequence)
            if event.sequence == 2:
                servers[0].hush()
                script.play([*steps(3, 4), succeeded(5)])
    assert seen == [1, 2, 3, 4, 5]


async def test_a_quiet_stream_of_a_living_controller_is_kept(script, servers):
    script.play(steps(1, 1))

    async def later() -> None:
        await asyncio.sleep(0.5)  # several probes
        script.play([succeeded(2)])

    task = asyncio.create_task(later())
    async with client(*servers) as jobs, aclosing(jobs.follow("sums")) as events:
        seen = [event.sequence async for event in events]
    await task
    assert seen == [1, 2]
    assert servers[1].watches == []


async def test_following_waits_for_a_controller_that_comes_back(script):
    first = await FakeJobs(script).start()
    port = int(first.address.rsplit(":", 1)[1])
    script.play(steps(1, 2))
    seen = []
    async with client(first) as jobs, aclosing(jobs.follow("sums")) as events:
        async for event in events:
            seen.append(event.sequence)
            if event.sequence == 2:
                await first.kill()
                script.play([succeeded(3)])
                second = await FakeJobs(script).start(port)
    await second.kill()
    assert seen == [1, 2, 3]


async def test_following_gives_up_when_nobody_answers_for_long(script, servers):
    script.play(steps(1, 1))
    impatient = replace(QUICK, lost_s=0.4)
    async with client(*servers, patience=impatient) as jobs, aclosing(jobs.follow("sums")) as events:
        assert (await anext(events)).sequence == 1
        for server in servers:
            await server.kill()
        with pytest.raises(Unreachable, match="no controller has answered"):
            await anext(events)


async def test_following_starts_after_the_event_that_is_named(script, servers):
    script.play([*steps(1, 4), succeeded(5)])
    async with client(*servers) as jobs, aclosing(jobs.follow("sums", after=3)) as events:
        assert [event.sequence async for event in events] == [4, 5]


async def test_a_job_that_is_not_there_cannot_be_followed(servers):
    async with client(*servers) as jobs, aclosing(jobs.follow("other")) as events:
        with pytest.raises(UsageError, match="no job is called 'other'"):
            await anext(events)


async def test_a_call_goes_to_the_next_controller_when_one_is_dead(script, servers):
    await servers[0].kill()
    async with client(*servers) as jobs:
        assert (await jobs.get_job("u1")).name == "sums"


async def test_a_call_that_nobody_answers_says_so_in_one_sentence(servers):
    for server in servers:
        await server.kill()
    async with client(*servers) as jobs:
        with pytest.raises(Unreachable) as caught:
            await jobs.list_jobs()
    assert "nothing listens there" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_controller_whose_store_is_away_is_not_taken_for_a_cluster_that_is_not_up(script, servers):
    script.refusal = (grpc.StatusCode.UNAVAILABLE, "etcd at x: the store cannot be reached. Check that etcd runs there")
    async with client(*servers) as jobs:
        for dead in (None, servers[1]):  # what one of them says counts more than that another is dead
            if dead is not None:
                await dead.kill()
            with pytest.raises(StoreUnavailable) as caught:
                await jobs.get_job("sums")
            assert str(caught.value).endswith(
                "cannot look up the job: etcd at x: the store cannot be reached. Check that etcd runs there"
            )


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [
        pytest.param(grpc.StatusCode.INVALID_ARGUMENT, UsageError, 2, id="a wrong request"),
        pytest.param(grpc.StatusCode.INTERNAL, GcoreError, 1, id="a controller's failure"),
        pytest.param(grpc.StatusCode.UNAVAILABLE, StoreUnavailable, 3, id="a store that is away"),
        pytest.param(grpc.StatusCode.UNIMPLEMENTED, UsageError, 2, id="another program"),
    ],
)
async def test_a_refusal_becomes_an_error_of_its_kind(script, servers, code, kind, exit_code):
    script.refusal = (code, "the reason")
    async with client(*servers) as jobs:
        with pytest.raises(kind) as caught:
            await jobs.list_jobs()
    assert type(caught.value) is kind
    assert caught.value.exit_code == exit_code


class StorelessJobs(FakeJobs):
    """A controller that is there, whose store is away for the first calls."""

    def __init__(self, script: Script, times: int) -> None:
        super().__init__(script)
        self.times = times

    async def WatchJob(self, request, context):
        if self.times:
            self.times -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store did not answer")
        async for event in super().WatchJob(request, context):
            yield event


async def test_a_follower_outlasts_a_store_that_is_away_as_long_as_a_controller_answers(script) -> None:
    server = await StorelessJobs(script, times=80).start()
    script.events = [*steps(1, 2), succeeded(3)]
    script.job.state = pb.JOB_STATE_SUCCEEDED
    try:
        async with client(server) as jobs:
            got = [event.sequence async for event in jobs.follow("sums")]
        assert (got, server.times) == ([1, 2, 3], 0)
    finally:
        await server.kill()
