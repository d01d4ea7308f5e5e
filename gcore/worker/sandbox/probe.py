"""The program that tests the confinement: it tries every escape that `docs/use/rewards.md` rules out.

It runs like any other program (`gcore.worker.sandbox.box`), which puts the definition of KNOWN in front of it. It
prints the escapes that worked, as a JSON list of phrases that complete "one could". It runs confined, so it imports
nothing of gcore.
"""

import ctypes
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

KNOWN: dict[str, Any] = globals().get("KNOWN", {})
"""What `prove` states: the path of a file that must be unreadable, the memory limit in MiB, and the parent's pid."""
MEBIBYTE = 1 << 20
KEYCTL = 250 if os.uname().machine == "x86_64" else 219
"""System call number of keyctl on this architecture."""


def attempt_read(path: str) -> Callable[[], object]:
    return lambda: open(path, "rb").read(1)


def attempt_write(path: str) -> Callable[[], object]:
    return lambda: open(path, "wb").write(b"x")


def attempt_fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def attempt_many_threads() -> None:
    threading.stack_size(64 * 1024)
    stop = threading.Event()
    started = []
    try:
        for _ in range(1000):
            thread = threading.Thread(target=stop.wait)
            thread.start()
            started.append(thread)
    finally:
        stop.set()
        for thread in started:
            thread.join()


def attempt_memory(flags: int) -> Callable[[], object]:
    return lambda: mmap.mmap(-1, (KNOWN["memory_mb"] + 64) * MEBIBYTE, flags=flags)


def attempt_call(name: str, *arguments: int) -> Callable[[], object]:
    """Return a function that makes the C library's call `name`, and raises OSError if it fails, as it must."""

    def call() -> None:
        if getattr(ctypes.CDLL(None), name)(*arguments) == -1:
            raise OSError(name)

    return call


def attempt_raise_limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


WAYS: dict[str, Callable[[], object]] = {
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "open a datagram socket": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "open a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "open a pair of sockets": socket.socketpair,
    "read another's file": lambda: attempt_read(KNOWN["secret"])(),
    "read /etc/passwd": attempt_read("/etc/passwd"),
    "read process information": attempt_read("/proc/self/status"),
    "list folders": lambda: os.listdir("/tmp"),
    "write to its working folder": attempt_write("gcore-probe"),
    "write temporary files": attempt_write("/tmp/gcore-probe"),
    "write shared memory": attempt_write("/dev/shm/gcore-probe"),
    "change another's file": lambda: attempt_write(KNOWN["secret"])(),
    "truncate a readable file": lambda: os.open("/dev/null", os.O_RDONLY | os.O_TRUNC),
    "change a file's mode": lambda: os.chmod(KNOWN["secret"], 0o600),
    "remove a file": lambda: os.remove(KNOWN["secret"]),
    "make a folder": lambda: os.mkdir("/tmp/gcore-probe-folder"),
    "make files in memory": lambda: os.memfd_create("probe"),
    "fork": attempt_fork,
    "start a program": lambda: subprocess.run(["/bin/true"], check=False),
    "replace itself by a program": lambda: os.execv("/bin/true", ["true"]),
    "start a thousand threads": attempt_many_threads,
    "exceed its memory limit": attempt_memory(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "exceed its shared memory limit": attempt_memory(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    "raise its limits": attempt_raise_limit,
    "signal another process": lambda: os.kill(KNOWN["parent"], 0),
    "signal all processes": lambda: os.kill(-1, 0),
    "make a namespace": attempt_call("unshare", 0x10000000),
    "be debugged": attempt_call("ptrace", 0, 0, 0, 0),
    "make shared memory segments": attempt_call("shmget", 0, 4096, 0o1600),
    "make message queues": attempt_call("msgget", 0, 0o1600),
    "use io_uring": attempt_call("syscall", 425, 1, 0),
    "use the kernel's keys": attempt_call("syscall", KEYCTL, 0, -3, 0),
}
"""Escapes by the phrase that completes "one could"; a function that returns without an error has escaped."""


def find_open_ways() -> Iterator[str]:
    for name, attempt in WAYS.items():
        try:
            attempt()
        except (OSError, RuntimeError, MemoryError, ValueError):
            continue
        yield name


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(find_open_ways())))
