"""The contract of `gcore.models.publisher.Publisher`: one folder per version, a broadcast, and the fake."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from saving_ranks import Model
from torch import Tensor
from warm_programs import ENGINES

from gcore.errors import EngineError
from gcore.models.publisher import SENDER, BroadcastPublisher, Publisher, WeightGroup
from gcore.rollout.api import BroadcastUpdate, FolderUpdate, WeightUpdate
from gcore.testing.models import rank_launch
from gcore.testing.training import FakePublisher
from gcore.train.checkpoint.run_files import BackgroundWriter, RetryingWriter
from gcore.train.checkpoint.writer import FolderPublisher
from gcore.types import Version

FIRST, SECOND = Version(0, 1), Version(0, 2)


class NotStaged(Exception):
    """An engine cannot take an update any more."""


class Interrupted(Exception):
    """A staging that ends before its last tensor."""


@dataclass
class Published:
    """A publisher of a model's weights, and the weights that an engine gets for an update."""

    publisher: Publisher
    model: Model
    take: Callable[[WeightUpdate], Mapping[str, Tensor]]

    def stage(self, version: Version) -> WeightUpdate:
        return self.publisher.stage(version, lambda: None)


@pytest.fixture(params=["folder", "broadcast", "fake"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Published]:
    model = Model()
    match request.param:
        case "folder":
            yield folder(model, tmp_path)
        case "broadcast":
            yield from broadcast(model, tmp_path)
        case _:
            fake = FakePublisher(partial(model.tensors, "served"))

            def read(update: WeightUpdate) -> Mapping[str, Tensor]:
                try:
                    return fake.read(update)
                except EngineError as error:
                    raise NotStaged from error

            yield Published(fake, model, read)


def folder(model: Model, path: Path) -> Published:
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    spec = {
        "name": "j",
        "model": {"path": str(path / "model")},
        "data": {"path": "d"},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
    }
    launch = rank_launch(spec, path / "run")
    writer = BackgroundWriter(launch.run_path, launch.world)
    insisting = RetryingWriter(writer.hindered, 60.0)
    publisher = FolderPublisher(launch, model, writer, insisting, list)  # type: ignore[arg-type]

    def load(update: WeightUpdate) -> Mapping[str, Tensor]:
        assert isinstance(update, FolderUpdate)
        file = launch.run_path / update.folder / "model.safetensors"
        if not file.exists():
            raise NotStaged
        return load_file(file)

    return Published(publisher, model, load)


def broadcast(model: Model, path: Path) -> Iterator[Published]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine = ENGINES.popen(
        "weight_receiver", str(port), "weights", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    told, said = engine.stdin, engine.stdout
    group = WeightGroup.join("127.0.0.1", port, rank=SENDER, world_size=2, name="weights", backend="gloo", timeout_s=60)
    assert said.readline() == "joined\n"
    publisher = BroadcastPublisher("weights", group, partial(model.tensors, "served"))
    staged: set[Version] = set()

    def receive(update: WeightUpdate) -> Mapping[str, Tensor]:
        assert isinstance(update, BroadcastUpdate)
        assert update.group == "weights"
        if update.version not in staged:
            with pytest.raises(EngineError):
                publisher.send(update)
            raise NotStaged
        file = path / f"{update.version}.safetensors"
        told.write(json.dumps(asdict(update.manifest) | {"path": str(file)}) + "\n")
        told.flush()
        publisher.send(update)
        assert said.readline() == "received\n"
        return load_file(file)

    class Noted:
        """The publisher, and what it has staged."""

        def stage(self, version: Version, tell: Callable[[], None]) -> WeightUpdate:
            staged.add(version)
            return publisher.stage(version, tell)

        def send(self, update: WeightUpdate) -> None:
            publisher.send(update)

        def release(self, update: WeightUpdate) -> None:
            staged.discard(update.version)
            publisher.release(update)

    yield Published(Noted(), model, receive)
    group.close()
    told.close()
    assert engine.wait(60) == 0


def served(model: Model) -> dict[str, Tensor]:
    return {one.name: one.tensor.detach().clone() for one in model.tensors("served")}


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """A folder holds buffers too, and all parameters in the model's own type."""
    assert found.keys() >= wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape
        assert found[name].double().equal(tensor.double())


def test_an_engine_gets_the_weights_as_they_were_staged(published: Published) -> None:
    wanted = served(published.model)
    update = published.stage(FIRST)
    assert update.version == FIRST
    published.model.values["a"] += 1.0  # the next step
    assert_same(published.take(update), wanted)


def test_each_version_is_its_own(published: Published) -> None:
    before = served(published.model)
    first = published.stage(FIRST)
    published.model.values["a"] += 1.0
    after = served(published.model)
    second = published.stage(SECOND)
    assert first != second
    assert_same(published.take(second), after)
    assert_same(published.take(first), before)
    published.publisher.release(first)
    assert_same(published.take(second), after)


def test_staging_reports_progress_with_each_tensor(published: Published) -> None:
    reports: list[None] = []
    published.publisher.stage(FIRST, lambda: reports.append(None))
    assert len(reports) >= len(published.model.values)


def test_a_version_that_is_staged_again_is_what_it_is_the_last_time(published: Published) -> None:
    update = published.stage(FIRST)
    published.model.values["a"] += 1.0
    assert published.stage(FIRST) == update
    assert_same(published.take(update), served(published.model))


def test_released_updates_cannot_be_taken(published: Published) -> None:
    update = published.stage(FIRST)
    published.publisher.release(update)
    published.publisher.release(update)
    with pytest.raises(NotStaged):
        published.take(update)


def test_a_staging_that_fails_halfway_leaves_the_weights_that_were_staged(published: Published) -> None:
    wanted = served(published.model)
    update = published.stage(FIRST)
    for value in published.model.values.values():
        value += 1.0

    def fail() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        published.publisher.stage(FIRST, fail)
    assert_same(published.take(update), wanted)
