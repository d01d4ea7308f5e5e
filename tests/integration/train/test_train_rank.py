"""Real train ranks: processes with torch, DeepSpeed and gRPC, as a supervisor would start them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from builders import samples_by_group
from ready_seals import ready_seal
from safetensors.numpy import load_file
from warm_programs import RANKS

from gcore.api.v1 import train_pb2 as pb
from gcore.api.v1 import train_pb2_grpc
from gcore.config.spec import JobSpec
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import Seal, SealedGroup, SealState
from gcore.models.layout import checkpoint_folder, manifest_digest, receipts_file, verify_checkpoint, weights_folder
from gcore.schema import SCHEMA_VERSION
from gcore.system.control_line import CONTROL_FD
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan

VOCABULARY = 64
JOB = "job-1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    made = RANKS.run("train_rank_program", "model", str(folder), env=here)
    assert made.returncode == 0, made.stderr
    return folder / "model"


def make_spec(model: Path, **train: Any) -> dict[str, Any]:
    spec = {
        "name": "tiny",
        "model": {"path": str(model)},
        "data": {"path": "none.jsonl"},
        "flow": {"steps": 3, "groups_per_step": 3, "samples_per_prompt": 3},
        "rollout": {"max_new_tokens": 12},
        "train": {"learning_rate": 1e-3, "micro_batch_tokens": 40, "mini_batches": 2} | train,
        "checkpoint": {"every": 2},
    }
    return JobSpec.model_validate(spec).model_dump(mode="json")


def make_groups(step: int, count: int = 3, samples: int = 3) -> list[Group]:
    """Groups of very different lengths; the same for the same step."""
    rng = np.random.default_rng(step)
    groups = []
    for number in range(count):
        prompt = tuple(int(t) for t in rng.integers(0, VOCABULARY, rng.integers(1, 9)))
        made = []
        for index in range(samples):
            n = int(rng.integers(1, 13))
            logprobs = np.float32(-rng.random(n) * 5)
            ids = tuple(int(t) for t in rng.integers(0, VOCABULARY, n))
            span = (VersionSpan(Version(0, step - 1), 0, n),)
            reward = float(np.float32(index == number))
            made.append(Sample(ids, tuple(float(p) for p in logprobs), "", "stop", span, reward))
        groups.append(Group(PromptRef(0, number, step), prompt, tuple(made), temperature=(0.5, 0.75, 1.0)[number % 3]))
    return groups


def make_seal(groups: list[Group], step: int, *, world: str, lineage: int, ranks: int, mini_batches: int) -> Seal:
    return ready_seal(
        (
            SealedGroup(
                ref=group.ref,
                digest=group.digest(),
                prompt_tokens=len(group.prompt_ids),
                response_tokens=tuple(len(s.token_ids) for s in group.samples),
                versions=group.versions,
                holder="holder",
            )
            for group in groups
        ),
        lineage=lineage,
        step=step,
        world=world,
        ranks=ranks,
        mini_batches=mini_batches,
    )


@dataclass
class RankProcess:
    process: subprocess.Popen[bytes]
    line: socket.socket
    events: list[dict[str, Any]]
    heard: threading.Condition

    def wait(self, event: str) -> dict[str, Any]:
        """The first event of that name; fails if the process ends before."""
        with self.heard:
            while True:
                for message in self.events:
                    if message["event"] == event:
                        return message
                if self.events and self.events[-1]["event"] == "closed":
                    raise AssertionError(f"ended before {event!r}: {self.events}")
                assert self.heard.wait(120), f"no {event!r}: {self.events}"

    def say(self, **message: Any) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        self.line.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def start_rank(launch: dict[str, Any], log: Path, env: dict[str, str]) -> RankProcess:
    ours, theirs = socket.socketpair()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        CONTROL_FD: str(theirs.fileno()),
    }
    with log.open("ab") as out:
        options: dict[str, Any] = {
            "pass_fds": (theirs.fileno(),),
            "env": environment | env,
            "stdout": out,
            "stderr": out,
        }
        if "PYTHONPATH" in env:  # for a module that Python imports at its start
            process = subprocess.Popen([sys.executable, "-m", "gcore.train"], **options)
        else:
            process = RANKS.popen("gcore.train", **options)
    theirs.close()
    rank = RankProcess(process, ours, [], threading.Condition())
    rank.say(**launch)

    def listen() -> None:
        with contextlib.suppress(OSError):
            for line in ours.makefile("r"):
                with rank.heard:
                    rank.events.append(json.loads(line))
                    rank.heard.notify_all()
        with rank.heard:
            rank.events.append({"event": "closed"})
            rank.heard.notify_all()

    threading.Thread(target=listen, daemon=True).start()
    return rank


@dataclass
class World:
    """A whole train world, and the controller's part towards it."""

    ranks: list[RankProcess]
    world: str
    lineage: int
    mini_batches: int

    @property
    def id(self) -> pb.WorldId:
        return pb.WorldId(job_uid=JOB, world=self.world, lineage=self.lineage)

    @contextlib.asynccontextmanager
    async def stub(self, rank: int) -> AsyncIterator[train_pb2_grpc.TrainRankStub]:
        async with grpc.aio.insecure_channel(self.ranks[rank].wait("serving")["address"]) as channel:
            yield train_pb2_grpc.TrainRankStub(channel)

    def seal(self, groups: list[Group], step: int) -> Seal:
        return make_seal(
            groups, step, world=self.world, lineage=self.lineage, ranks=len(self.ranks), mini_batches=self.mini_batches
        )

    async def feed(self, rank: int, seal: Seal, groups: list[Group]) -> pb.FeedReply:
        async with self.stub(rank) as stub:
            return await stub.Feed(self.chunks(rank, seal, groups))

    async def chunks(self, rank: int, seal: Seal, groups: list[Group]) -> AsyncIterator[pb.FeedChunk]:
        layout = balance_samples(seal)
        payload = pb.FeedPayload(
            groups=[part(groups[g], samples) for g, samples in samples_by_group(layout, rank).items()]
        ).SerializeToString()
        header = pb.FeedHeader(
            schema_version=SCHEMA_VERSION,
            world=self.id,
            token=pb.StepToken(lineage=seal.lineage, step=seal.step, attempt=seal.attempt),
            sender="test",
            total_bytes=len(payload),
            sha256=hashlib.sha256(payload).digest(),
        )
        middle = len(payload) // 2
        yield pb.FeedChunk(header=header, data=payload[:middle])
        yield pb.FeedChunk(data=payload[middle:])

    async def apply(self, rank: int, seal: Seal) -> None:
        token = pb.StepToken(lineage=seal.lineage, step=seal.step, attempt=seal.attempt)
        async with self.stub(rank) as stub:
            await stub.Apply(
                pb.ApplyRequest(schema_version=SCHEMA_VERSION, world=self.id, token=token, seal=seal.encode())
            )

    async def applied(self, rank: int, step: int) -> pb.RankState:
        """The state in which the rank reports the step applied."""
        async with self.stub(rank) as stub:
            async for state in stub.Watch(pb.WatchRequest(world=self.id)):
                assert not state.error, state.error
                if state.applied.step == step:
                    return state
        raise AssertionError("the stream ended")

    async def saved(self, step: int) -> pb.RankState:
        """The state in which rank 0 shows the step's checkpoint on the disk; it is written beside the next steps."""
        async with self.stub(0) as stub:
            async for state in stub.Watch(pb.WatchRequest(world=self.id)):
                assert not state.error, state.error
                if state.saved.step >= step:
                    return state
        raise AssertionError("the stream ended")

    async def step(self, step: int, groups: list[Group] | None = None) -> list[pb.RankState]:
        """Feed, apply and wait on all ranks."""
        groups = groups or make_groups(step)
        seal = self.seal(groups, step)
        every = range(len(self.ranks))
        await asyncio.gather(*(self.feed(rank, seal, groups) for rank in every))
        await asyncio.gather(*(self.apply(rank, seal) for rank in every))
        return list(await asyncio.gather(*(self.applied(rank, step) for rank in every)))


def part(group: Group, samples: tuple[int, ...]) -> pb.GroupPart:
    return pb.GroupPart(
        ref=pb.PromptRef(data_epoch=group.ref.data_epoch, shard=group.ref.shard, seq=group.ref.seq),
        digest=group.digest(),
        prompt_ids=np.asarray(group.prompt_ids, dtype="<i4").tobytes(),
        sample_digests=[sample.digest() for sample in group.samples],
        temperature=group.temperature,
        samples=[
            pb.SamplePart(
                index=index,
                token_ids=np.asarray(group.samples[index].token_ids, dtype="<i4").tobytes(),
                logprobs=np.asarray(group.samples[index].logprobs, dtype="<f4").tobytes(),
                reward=group.samples[index].reward,
                finish_reason="stop",
            )
            for index in samples
        ],
    )


@contextlib.contextmanager
def train_world(
    run_dir: Path,
    spec: dict[str, Any],
    *,
    ranks: int,
    lineage: int = 0,
    step: int = 0,
    checkpoint: str = "",
    env: dict[str, str] | None = None,
) -> Iterator[World]:
    world = f"world{lineage}"
    started = []
    try:
        for rank in range(ranks):
            launch = {
                "kind": "rank",
                "job_uid": JOB,
                "world": world,
                "lineage": lineage,
                "rank": rank,
                "world_size": ranks,
                "spec": spec,
                "run_dir": str(run_dir),
                "start": {"step": step, "checkpoint": checkpoint},
                "host": "127.0.0.1",
                "threads": 1,
            }
            started.append(start_rank(launch, run_dir / f"{world}-{rank}.log", env or {}))
        for rank in started[1:]:
            rank.say(command="rendezvous", address=started[0].wait("store")["address"])
        for rank in started:
            rank.wait("serving")
        yield World(started, world, lineage, spec["train"]["mini_batches"])
    except BaseException:
        for log in sorted(run_dir.glob("*.log")):
            print(f"--- {log.name}", log.read_text(errors="replace")[-4000:], sep="\n")
        raise
    finally:
        for rank in started:
            rank.end()


def logged(run_dir: Path, world: World, step: int) -> list[dict[str, Any]]:
    """The receipts of a step, of all ranks."""
    found = []
    for rank in range(len(world.ranks)):
        lines = receipts_file(run_dir, world.world, rank).read_text().splitlines()
        found += [line for line in map(json.loads, lines) if line["token"].split(".")[1] == str(step)]
    return found


async def refusal(call: Awaitable[Any]) -> str:
    """The error message of a call that must be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return caught.value.details() or ""


async def check_strangers(world: World) -> None:
    """Of another world, or without what the seal names: refused, and nothing changes."""
    groups = make_groups(1)
    seal = world.seal(groups, 1)
    stranger = dataclasses.replace(world, world="other")
    assert "not of world other" in await refusal(stranger.feed(0, stranger.seal(groups, 1), groups))
    assert "not of world other" in await refusal(stranger.apply(0, stranger.seal(groups, 1)))
    assert "missing" in await refusal(world.apply(0, seal))
    assert "not READY" in await refusal(world.apply(0, seal.model_copy(update={"state": SealState.SEALED})))


async def check_a_step(world: World, run_dir: Path) -> float:
    """One step, applied twice on every rank but done once. Its loss."""
    groups = make_groups(1)
    states = await world.step(1, groups)
    seal = world.seal(groups, 1)
    for rank in range(len(world.ranks)):
        await world.apply(rank, seal)
    assert states[0].report == states[1].report
    metrics = states[0].report.metrics
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    assert metrics["tokens"] == tokens
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["response_length_mean"] == pytest.approx(tokens / 9)
    receipts = logged(run_dir, world, 1)
    assert len(receipts) == len(world.ranks)
    trained = {(ref, digest, i) for receipt in receipts for ref, digest, indexes in receipt["groups"] for i in indexes}
    assert trained == {(str(group.ref), group.digest(), i) for group in groups for i in range(3)}
    return float(metrics["loss"])


def losses(states: list[pb.RankState]) -> float:
    return float(states[0].report.metrics["loss"])


async def test_a_world_trains_dies_and_goes_on_from_its_checkpoints_with_the_same_losses(
    model: Path, tmp_path: Path
) -> None:
    expected = {}
    with train_world(tmp_path, make_spec(model, zero_stage=1), ranks=2) as world:
        base, served = (
            load_file(folder / "model.safetensors") for folder in (model, weights_folder(tmp_path, Version(0, 0)))
        )
        assert all(np.array_equal(served[name], base[name]) for name in base)
        await check_strangers(world)
        expected[1] = await check_a_step(world, tmp_path)
        for step in (2, 3):
            expected[step] = losses(await world.step(step))
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["0-1", "0-2", "0-3"]
        assert not (tmp_path / "checkpoints" / "0-1").exists(), "none was due"
        shown = await world.saved(3)
        assert (shown.saved.file, shown.writing.over, shown.writing.error) == ("checkpoints/0-3", True, "")
        assert shown.saved.sha256 == manifest_digest(checkpoint_folder(tmp_path, Version(0, 3)))
        assert not list((tmp_path / "checkpoints").glob(".*")), "nothing is left over"
        newest = load_file(weights_folder(tmp_path, Version(0, 3)) / "model.safetensors")
        saved = load_file(checkpoint_folder(tmp_path, Version(0, 3)) / "model.safetensors")
        assert all(np.array_equal(newest[name], saved[name]) for name in base)
        assert verify_checkpoint(checkpoint_folder(tmp_path, Version(0, 2))).updates == 4

        world.ranks[1].process.kill()
        groups = make_groups(4)
        await world.feed(0, world.seal(groups, 4), groups)
        await world.apply(0, world.seal(groups, 4))
        assert "lost another rank" in world.ranks[0].wait("failed")["reason"]
        assert world.ranks[0].process.wait(60) == 1

    # The next world has another size and backend, and another lineage.
    fsdp2 = make_spec(model, zero_stage=3, backend="fsdp2")
    with train_world(tmp_path, fsdp2, ranks=1, lineage=1, step=2, checkpoint="checkpoints/0-2") as world:
        staged = load_file(weights_folder(tmp_path, Version(1, 2)) / "model.safetensors")
        before = load_file(weights_folder(tmp_path, Version(0, 2)) / "model.safetensors")
        assert all(np.array_equal(staged[name], before[name]) for name in before)
        states = await world.step(3)
        assert losses(states) == pytest.approx(expected[3], abs=1e-5)
        await world.saved(3)
        again = load_file(checkpoint_folder(tmp_path, Version(1, 3)) / "model.safetensors")
        # Adam's second moments came along too: without them the weights would differ by the learning rate.
        assert all(np.abs(again[name] - newest[name]).max() < 2e-5 for name in newest)
        async with world.stub(0) as stub:
            watching = stub.Watch(pb.WatchRequest(world=world.id))
            await watching.read()
            world.ranks[0].say(command="stop")
            assert await asyncio.to_thread(world.ranks[0].process.wait, 60) == 0
        assert "Traceback" not in (tmp_path / "world1-0.log").read_text(), "that a call was cut off is no error"


async def test_a_rank_that_is_started_again_has_its_critic_back(model: Path, tmp_path: Path) -> None:
    critic = {"advantage": "gae", "critic": {"learning_rate": 1e-2}}

    def told(states: list[pb.RankState]) -> dict[str, float]:
        metrics = states[0].report.metrics
        return {
            name: metrics[name] for name in ("loss", "value_loss", "value_mean", "critic_grad_norm", "advantage_std")
        }

    with train_world(tmp_path, make_spec(model, **critic), ranks=1) as world:
        first, _, third = [told(await world.step(step)) for step in (1, 2, 3)]
        assert first["value_mean"] == 0, "a new head"
        assert third["value_mean"] != 0
        assert verify_checkpoint(checkpoint_folder(tmp_path, Version(0, 2))).critic_updates == 4
        assert not (weights_folder(tmp_path, Version(0, 2)) / "critic").exists()
    again = make_spec(model, zero_stage=3, **critic)
    with train_world(tmp_path, again, ranks=1, lineage=1, step=2, checkpoint="checkpoints/0-2") as world:
        assert told(await world.step(3)) == pytest.approx(third, rel=1e-5, abs=1e-6)


@pytest.mark.large  # beside it: a disk that takes no weights
async def test_a_disk_that_takes_no_checkpoint_costs_no_step(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model) | {"checkpoint": {"every": 1}}
    in_the_way = tmp_path / "checkpoints"
    with train_world(tmp_path, spec, ranks=1) as world:
        in_the_way.write_text("a file where the folder should be")
        await world.step(1)
        async with world.stub(0) as stub:
            async for state in stub.Watch(pb.WatchRequest(world=world.id)):
                if state.writing.over:
                    break
        assert (state.writing.step, state.writing.error) == (1, "Not a directory")
        assert not state.HasField("saved")
        in_the_way.unlink()
        await world.step(2)
        assert (await world.saved(2)).saved.file == "checkpoints/0-2"
        world.ranks[0].say(command="stop")
        assert world.ranks[0].process.wait(60) == 0
    assert [path.name for path in in_the_way.iterdir()] == ["0-2"]


async def test_a_disk_that_takes_no_weights_is_told_and_the_step_ends_when_it_takes_them(
    model: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    with train_world(tmp_path, make_spec(model, zero_stage=3), ranks=2) as world:
        weights.rename(tmp_path / "aside")
        weights.write_text("a file where the folder should be")
        step = asyncio.create_task(world.step(1))
        async with world.stub(1) as stub:  # which writes no weights, and has waited with the other
            async for state in stub.Watch(pb.WatchRequest(world=world.id)):
                if state.trouble:
                    break
        assert state.trouble.startswith("the weights of step 1 cannot be written (Not a directory): ")
        weights.unlink()
        (tmp_path / "aside").rename(weights)
        done = await step
        assert not done[0].trouble
        assert (weights / "0-1" / "model.safetensors").is_file()


async def test_a_rank_without_memory_names_the_fields_to_lower(model: Path, tmp_path: Path) -> None:
    # Attention asks for more memory than there is, once the flag is there: torch's own error, in a real rank.
    flag, injected = tmp_path / "full", tmp_path / "injected"
    injected.mkdir()
    (injected / "sitecustomize.py").write_text(
        "import os, torch\n"
        "from torch.nn import functional\n"
        "attend = functional.scaled_dot_product_attention\n"
        "def greedy(*args, **kwargs):\n"
        f"    if os.path.exists({str(flag)!r}):\n"
        "        torch.empty(1 << 60)\n"
        "    return attend(*args, **kwargs)\n"
        "functional.scaled_dot_product_attention = greedy\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(injected), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with train_world(tmp_path, make_spec(model), ranks=1, env=env) as world:
        groups = make_groups(1)
        seal = world.seal(groups, 1)
        await world.feed(0, seal, groups)
        flag.touch()
        await world.apply(0, seal)
        reason = world.ranks[0].wait("failed")["reason"]
        assert world.ranks[0].process.wait(60) == 1
    longest = max(len(group.prompt_ids) + len(sample.token_ids) for group in groups for sample in group.samples)
    assert re.match(
        r"out of memory while old_logprobs: a micro-batch of \d+ samples, \d+ tokens, the longest \d+", reason
    )
    assert f"the longest {longest} " in reason
    places = [
        reason.index(f"train.{name}") for name in ("micro_batch_tokens (now 40)", "activation_checkpointing: true")
    ]
    assert places == sorted(places)
    assert "train.zero_stage" in reason


async def test_a_token_that_the_model_does_not_have_ends_the_rank_with_a_sentence(model: Path, tmp_path: Path) -> None:
    with train_world(tmp_path, make_spec(model), ranks=1) as world:
        groups = make_groups(1)
        sample = groups[1].samples[0]
        wrong = dataclasses.replace(sample, token_ids=(VOCABULARY, *sample.token_ids[1:]))
        groups[1] = dataclasses.replace(groups[1], samples=(wrong, *groups[1].samples[1:]))
        seal = world.seal(groups, 1)
        await world.feed(0, seal, groups)
        await world.apply(0, seal)
        reason = world.ranks[0].wait("failed")["reason"]
    assert f"token {VOCABULARY} in the response of sample 0 is not in the model's vocabulary of {VOCABULARY}" in reason
    assert str(groups[1].ref) in reason
