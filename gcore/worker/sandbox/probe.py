"""The program with which a box is proved: it tries every way out that `docs/rewards.md` says is not there.

It is run like any other program (`gcore.reward.box`), with KNOWN before it, and prints the ways that were open, in words that
follow "one could". Runs shut in, so it imports nothing of gcore.
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


MEBIBYTE = 1 << 20


KEYCTL = 250 if os.uname().machine == "x86_64" else 219


def reads(path: str) -> Callable[[], object]:
    return lambda: open(path, "rb").read(1)


def writes(path: str) -> Callable[[], object]:
    return lambda: open(path, "wb").write(b"x")


def forks() -> None:
    if os.fork() == 0:
        os._exit(0)


def starts_many_threads() -> None:
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


def takes_memory(flags: int) -> Callable[[], object]:
    return lambda: mmap.mmap(-1, (KNOWN["memory_mb"] + 64) * MEBIBYTE, flags=flags)


def calls(name: str, *arguments: int) -> Callable[[], object]:
    """A call of the C library that must fail."""

    def call() -> None:
        if getattr(ctypes.CDLL(None), name)(*arguments) == -1:
            raise OSError(name)

    return call


def raises_a_limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


WAYS: dict[str, Callable[[], object]] = {
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "open a datagram socket": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "open a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "open a pair of sockets": socket.socketpair,
    "read another's file": lambda: reads(KNOWN["secret"])(),
    "read /etc/passwd": reads("/etc/passwd"),
    "read about processes": reads("/proc/self/status"),
    "list folders": lambda: os.listdir("/tmp"),
    "write where it is": writes("gcore-probe"),
    "write temporary files": writes("/tmp/gcore-probe"),
    "write shared memory": writes("/dev/shm/gcore-probe"),
    "change another's file": lambda: writes(KNOWN["secret"])(),
    "empty a file that it may read": lambda: os.open("/dev/null", os.O_RDONLY | os.O_TRUNC),
    "change a file's mode": lambda: os.chmod(KNOWN["secret"], 0o600),
    "remove a file": lambda: os.remove(KNOWN["secret"]),
    "make a folder": lambda: os.mkdir("/tmp/gcore-probe-folder"),
    "make files in memory": lambda: os.memfd_create("probe"),
    "fork": forks,
    "start a program": lambda: subprocess.run(["/bin/true"], check=False),
    "replace itself by a program": lambda: os.execv("/bin/true", ["true"]),
    "start a thousand threads": starts_many_threads,
    "take more memory than it may": takes_memory(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "take more shared memory than it may": takes_memory(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    "raise its limits": raises_a_limit,
    "signal another process": lambda: os.kill(KNOWN["parent"], 0),
    "signal all processes": lambda: os.kill(-1, 0),
    "make a namespace": calls("unshare", 0x10000000),
    "be debugged": calls("ptrace", 0, 0, 0, 0),
    "make shared memory segments": calls("shmget", 0, 4096, 0o1600),
    "make message queues": calls("msgget", 0, 0o1600),
    "use io_uring": calls("syscall", 425, 1, 0),
    "use the kernel's keys": calls("syscall", KEYCTL, 0, -3, 0),
}


def open_ways() -> Iterator[str]:
    for name, attempt in WAYS.items():
        try:
            attempt()
        except (OSError, RuntimeError, MemoryError, ValueError):
            continue
        yield name


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(open_ways())))
