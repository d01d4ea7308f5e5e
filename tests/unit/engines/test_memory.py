"""The memory limit of the cache, and release of memory to the system."""

import gc
from pathlib import Path

import pytest
import torch
from engine_core import finish, make_core, prompt, task

from gcore.engines.torch.kv_cache import CacheShape, LayerShape
from gcore.engines.torch.model import (
    DEVICE_SHARE,
    HOST_SHARE,
    SMALLEST,
    default_cache_tokens,
    free_host_bytes,
    stage_weights,
)
from gcore.engines.torch.model_runner import FastRunner
from gcore.errors import EngineError
from gcore.system.memory import release_free_memory
from gcore.testing.models import make_tiny_model

MIB = 2**20
LAYERS = (LayerShape(2, 8, 8),) * 3


@pytest.mark.parametrize(
    ("device", "share"), [pytest.param("cpu", HOST_SHARE, id="host"), pytest.param("cuda", DEVICE_SHARE, id="GPU")]
)
def test_the_default_cache_takes_a_part_of_the_free_memory(device: str, share: float) -> None:
    shape = CacheShape(LAYERS, torch.float32, torch.device(device))
    # Keys and values of three layers with two heads of eight numbers, and the bias.
    assert shape.bytes_per_token == (3 * 2 * 16 + 2) * 4
    assert default_cache_tokens(shape, 10**9) == int(share * 10**9) // shape.bytes_per_token
    assert default_cache_tokens(shape, 0) == SMALLEST


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        pytest.param({}, 8000 * 1024, id="no control group"),
        pytest.param({"memory.max": "max", "memory.current": "5"}, 8000 * 1024, id="a group without a limit"),
        pytest.param({"memory.max": "3000000", "memory.current": "1000000"}, 2_000_000, id="a group with a limit"),
        pytest.param(
            {"memory.max": "3000000", "memory.current": "2900000", "memory.stat": "anon 5\ninactive_file 500000\n"},
            600_000,
            id="files that can be dropped are free",
        ),
    ],
)
def test_free_memory_is_the_hosts_or_what_the_control_group_has_left(
    tmp_path: Path, group: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    assert free_host_bytes(tmp_path) == expected


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    release_free_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 50 MB of weights."""
    return make_tiny_model(tmp_path_factory.mktemp("big"), hidden=512, layers=5, heads=8, kv_heads=8, ends=False)


def test_released_weights_free_their_memory_and_come_back_to_the_bit(big: Path) -> None:
    core = make_core(big)
    one = task(0, prompt(0, 5), 12)
    before = finish(core, [one])[0]
    core.release(frozenset({"kv_cache"}))
    size = sum(p.numel() * p.element_size() for p in core.model.module.parameters())
    assert size > 40 * MIB
    awake = resident()
    core.release(frozenset({"weights"}))
    assert resident() < awake - 0.5 * size  # the allocator may take other memory meanwhile
    core.submit([one])
    assert not core.can_work
    core.wake(frozenset({"weights", "kv_cache"}))
    assert resident() > awake - 0.5 * size
    after = finish(core, [])[0]
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


def test_a_released_cache_frees_its_memory(big: Path) -> None:
    core = make_core(big)
    finish(core, [task(n, prompt(n, 600), 2) for n in range(8)])
    assert isinstance(core.lane, FastRunner)
    size = 8 * 602 * core.model.shape.bytes_per_token
    assert size > 80 * MIB
    full = resident()
    core.release(frozenset({"kv_cache"}))
    assert resident() < full - 0.8 * size
    core.wake(frozenset({"kv_cache"}))
    assert len(finish(core, [task(9, prompt(9, 5), 3)])[9].tokens) == 3


def test_nothing_is_released_from_under_what_runs(big: Path) -> None:
    core = make_core(big)
    core.submit([task(0, (3, 4), 9)])
    core.cycle()
    with pytest.raises(EngineError, match="1 requests are running"):
        core.release(frozenset({"weights"}))
    assert len(finish(core, [])[0].tokens) == 9


def test_sleeping_weights_are_not_changed(big: Path) -> None:
    core = make_core(big)
    staged = stage_weights(core.model, big)
    core.release(frozenset({"weights"}))
    with pytest.raises(EngineError, match="weights are released"):
        stage_weights(core.model, big)
    with pytest.raises(EngineError, match="weights are released"):
        core.change_weights(staged, "0.1", flush=True, abort=False)


def test_weights_that_find_no_room_to_sleep_stay_where_they_are(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(big)
    expected = finish(core, [task(0, (3, 4), 5)])[0]

    class Full:
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            return None

    monkeypatch.setattr("gcore.engines.torch.model.tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(
        EngineError, match=r"cannot write the released weights to a file \(No space left on device\).*TMPDIR"
    ):
        core.release(frozenset({"weights"}))
    assert finish(core, [task(0, (3, 4), 5)])[0].tokens == expected.tokens
