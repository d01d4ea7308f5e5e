"""Memory of the host and of the control group, and the errors that mean out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcore.system.memory import HostMemory, host_memory, is_out_of_memory


def test_cached_files_that_nothing_reads_count_as_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.current").write_text("3221225472\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1073741824\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(4 << 30, 2 << 30)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mmap: Cannot allocate memory"), True),
        (RuntimeError("the shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_allocation_that_failed_is_known_by_its_type_or_its_words(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
