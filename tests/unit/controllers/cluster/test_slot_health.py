"""The available devices: the driver's list, tolerated failures of the driver, usable cores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controllers.cluster.slot_health import SILENT, DriverReport, ask_driver, missing_devices, parse_devices

TWO = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a1b2c3d-0000-1111-2222-333344445555)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-ffffffff-0000-1111-2222-333344445555)
  MIG 1g.10gb     Device  0: (UUID: MIG-12345678-0000-1111-2222-333344445555)
"""


def test_gpus_are_listed_by_number_and_by_name_and_so_are_their_parts() -> None:
    assert parse_devices(TWO) == {
        "0",
        "1",
        "GPU-0a1b2c3d-0000-1111-2222-333344445555",
        "GPU-ffffffff-0000-1111-2222-333344445555",
        "MIG-12345678-0000-1111-2222-333344445555",
    }
    assert parse_devices("No devices were found\n") == frozenset()


def test_a_gpu_that_the_driver_does_not_list_is_missing() -> None:
    driver = DriverReport().answered(TWO)
    assert missing_devices(("cuda:0", "cuda:1", "cpu:0"), driver, None) == {}
    assert missing_devices(("cuda:1", "cuda:7"), driver, None) == {
        "cuda:7": "the driver does not list this GPU (nvidia-smi -L)"
    }


def test_a_driver_is_silent_for_a_while_before_its_gpus_count_as_gone() -> None:
    driver = DriverReport().answered(TWO)
    for _ in range(SILENT - 1):
        driver = driver.failed("it hangs")
        assert missing_devices(("cuda:0",), driver, None) == {}
    gone = driver.failed("it hangs")
    assert missing_devices(("cuda:0",), gone, None) == {"cuda:0": "the driver no longer responds: it hangs"}
    assert missing_devices(("cuda:0",), gone.answered(TWO), None) == {}


def test_a_driver_that_never_answered_says_nothing_against_a_slot() -> None:
    driver = DriverReport()
    for _ in range(10):
        driver = driver.failed("no")
    assert missing_devices(("cuda:0",), driver, None) == {}


def test_cores_that_this_process_may_not_use_make_their_slot_sick() -> None:
    found = missing_devices(("cpu:0-3", "cpu:4-5", "cpu:6-6"), DriverReport(), frozenset({0, 1, 4, 5}))
    assert set(found) == {"cpu:0-3", "cpu:6-6"}
    assert "the cores 2, 3 " in found["cpu:0-3"]
    assert "the core 6 " in found["cpu:6-6"]
    assert missing_devices(("cpu:0-3",), DriverReport(), None) == {}


def program(folder: Path, text: str) -> tuple[str, ...]:
    file = folder / "smi.py"
    file.write_text(text)
    return (sys.executable, "-S", str(file))


async def test_output_of_the_drivers_program_is_parsed(tmp_path: Path) -> None:
    driver = await ask_driver(DriverReport(), program(tmp_path, f"print({TWO!r})"))
    assert driver.names is not None
    assert "1" in driver.names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("print('NVIDIA-SMI has failed'); raise SystemExit(9)", None, id="it fails"),
        pytest.param("print('GPU 1: X (UUID: GPU-1)'); raise SystemExit(15)", {"1", "GPU-1"}, id="one GPU is lost"),
        pytest.param("print('No devices were found')", set(), id="no GPU"),
    ],
)
async def test_a_driver_that_complains_is_understood(tmp_path: Path, text: str, names: set[str] | None) -> None:
    driver = await ask_driver(DriverReport(), program(tmp_path, text))
    assert driver.names == names
    assert (driver.silent > 0) == (names is None)


async def test_without_the_program_a_machine_that_shows_no_gpu_has_none(tmp_path: Path) -> None:
    none = await ask_driver(DriverReport(), ("/nonexistent/nvidia-smi",), dev=tmp_path)
    assert "cuda:0" in missing_devices(("cuda:0",), none, None)
    (tmp_path / "nvidia0").touch()
    unknown = await ask_driver(DriverReport(), ("/nonexistent/nvidia-smi",), dev=tmp_path)
    assert missing_devices(("cuda:0",), unknown, None) == {}
