"""Confine this process and run an untrusted Python program in it: `jail.py < REQUEST`.

The program can compute and print, and do nothing else. The request is a JSON object:

    program     the program's source
    tests       a list of statements that run after it, in its namespace
    input       its standard input
    memory_mb, cpu_s, threads    its limits
    readable    the files and folders that Python itself needs
    paths       folders from which packages may be imported
    uid         a user without other processes; null if the process cannot change its user
    parent      pid of the process with which it dies
    report      a file descriptor

Descriptor 1 is the program's output. The process writes to `report` either why the program was not started, or BEGUN
followed by the results of the program and its tests. The program itself may have written what follows BEGUN. Between
reading the request and running the program, the process gives up the following permanently and in this order:

1. resources (rlimits): address space, processor time, processes and threads, open files; files cannot grow at all;
2. its user, replaced by one without other processes (if it is root), and every capability except reading folders,
   because Python may be installed in root's;
3. files (Landlock): only `readable` can be read; nothing can be written, created or removed;
4. system calls (seccomp): only a list of calls needed for computing. No opening except for reading, no socket, no
   process, no program, no signal to another process, no shared memory; calls not on the list fail as unknown.

A step that fails raises, so that nothing runs partly confined. `gcore.worker.sandbox.box` tests the confinement before
the first program. This file imports only the standard library: it is run by path, by an interpreter that loads nothing
else. Linux only.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38

LOOK_INTO_FOLDERS = (2, 1)
"""Capabilities that allow reading all folders: CAP_DAC_READ_SEARCH, or else CAP_DAC_OVERRIDE. One is kept, if
available.
"""

CAPABILITY_VERSION_3 = 0x20080522

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""System call numbers of Landlock, the same on every architecture."""

FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
"""By version of Landlock: the bit mask of all file access rights that this version knows."""

READ_FILE, READ_DIR = 1 << 2, 1 << 3

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
"""Actions of seccomp for a system call: allow it, or fail it with this error."""

EQUAL, MASKED_EQUAL = 4, 7
CLONE_THREAD = 0x00010000
TCGETS = 0x5401

CHANGES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
"""Flags of opening a file that must not be set.

Landlock prevents writing, but before Linux 6.2 not O_TRUNC, which truncates a file opened for reading only, if its mode
or a capability allows it.
"""

BEGUN = b"begun\n"
"""Written to the report when the process is confined and the program starts."""

HARMLESS_FCNTL = (0, 1, 2, 3, 4, 1030)
"""Commands of fcntl that are allowed: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC.

F_SETOWN is not among them, because it can send signals.
"""

# System calls that a Python program needs: memory, time, its own threads, files it may open, its pipes.
CALLS = """
    access arch_prctl brk chdir clock_getres clock_gettime clock_nanosleep close close_range dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd2 exit exit_group faccessat faccessat2 fchdir fstat
    fstatfs ftruncate futex getcwd getdents getdents64 getegid geteuid getgid getpgid getpgrp getpid getppid getrandom
    getresgid getresuid getrlimit getrusage getsid gettid gettimeofday getuid lseek lstat madvise membarrier mincore mmap
    mprotect mremap munmap nanosleep newfstatat pause pipe pipe2 poll ppoll pread64 preadv pselect6
    pwrite64 pwritev read readlink readlinkat readv restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getparam sched_getscheduler sched_yield select set_robust_list set_tid_address setitimer sigaltstack stat statfs
    statx sysinfo time times timer_create timer_delete timer_settime umask uname write writev
""".split()  # noqa: SIM905  (a list of them would be as long as the rest of this file)


def main() -> None:
    """Read the request, confine this process and run the program."""
    with open(0, "rb", closefd=False) as stream:
        request = json.loads(stream.read())
    try:
        os.dup2(_given_input(request["input"]), 0)
        os.chdir("/")
        enter_jail(request)
    except OSError as error:
        os.write(request["report"], json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    os.write(request["report"], BEGUN)
    run_program(request["program"], request["tests"], request["report"])


def enter_jail(request: dict[str, Any]) -> None:
    """Confine this process permanently, as `request` states. Raises OSError if a step fails."""
    sys.path.extend(request["paths"])
    # Open libraries before their files are out of reach.
    libc, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2", use_errno=True)
    limit_resources(request["memory_mb"], request["cpu_s"], request["threads"])
    drop_privileges(libc, request["uid"])
    _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")
    if os.getppid() != request["parent"]:  # the parent died before the call
        os._exit(70)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")
    restrict_files(libc, request["readable"])
    restrict_calls(seccomp)


def run_program(program: str, tests: list[str], report: int) -> None:
    """Run the program, then each test in its namespace; write the results to the descriptor `report` and end the
    process.
    """
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    error, passed = "", []
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), names)
    except SystemExit as stopped:
        error = "" if not stopped.code else f"SystemExit: {stopped.code}"
        tests = tests if not error else []
    except BaseException as raised:  # noqa: BLE001  a foreign program may raise anything
        error = f"{type(raised).__name__}: {raised}"
    if not error:
        for test in tests:
            passed.append(_passes(test, names))
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        error = error or "its output could not be written"
    os.write(report, json.dumps({"error": error[:300], "passed": passed}).encode())
    os._exit(0)


def _passes(test: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except BaseException:  # noqa: BLE001  as above
        return False
    return True


def limit_resources(memory_mb: int, cpu_s: int, threads: int) -> None:
    """Lower this process's resource limits permanently: memory in MiB, processor seconds, threads, files."""
    wanted = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_NPROC: threads,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    for limit, most in wanted.items():
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def drop_privileges(libc: Any, uid: int | None) -> None:
    """Change to user `uid` (None: keep the user) without other groups, and give up all capabilities except reading
    folders.
    """
    header = ctypes.create_string_buffer(struct.pack("<II", CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _checked(libc.capget(header, data), "read its capabilities")
    permitted = struct.unpack("<IIIIII", data.raw[:24])[1]
    kept = next((1 << one for one in LOOK_INTO_FOLDERS if permitted & 1 << one), 0)
    if uid is not None:
        _checked(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep a capability")
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            raise OSError(f"root may not become another user here ({error.strerror})") from error
    data = ctypes.create_string_buffer(struct.pack("<IIIIII", kept, kept, 0, 0, 0, 0))
    _checked(libc.capset(header, data), "give up its capabilities")
    _checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "forbid debugging")


def restrict_files(libc: Any, readable: list[str]) -> None:
    """Restrict file access permanently (Landlock): only the files and folders `readable` can be opened, only for
    reading.
    """
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise OSError("the kernel has no Landlock (Linux 5.13 and later, with landlock among its security modules)")
    handled = FILE_RIGHTS[min(version, max(FILE_RIGHTS))]
    # Later versions also support the network and signals; an older kernel reads a shorter record.
    record = struct.pack("<Q", handled)
    record += struct.pack("<Q", 3) if version >= 4 else b""
    record += struct.pack("<Q", 3) if version >= 6 else b""
    rules = _checked(
        libc.syscall(LANDLOCK_CREATE_RULESET, record, ctypes.c_size_t(len(record)), 0), "create file rules"
    )
    for path in readable:
        try:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        rule = struct.pack("<Qi", rights, beneath)
        _checked(libc.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0), f"create a rule for {path}")
        os.close(beneath)
    _checked(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "restrict file access")
    os.close(rules)


class Argument(ctypes.Structure):
    """libseccomp's comparison of a call's argument."""

    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def restrict_calls(seccomp: Any) -> None:
    """Restrict system calls permanently (seccomp) to `CALLS`, and to the others listed here with certain arguments."""
    seccomp.seccomp_init.restype = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = (ctypes.c_uint32,)
    seccomp.seccomp_load.argtypes = (ctypes.c_void_p,)
    seccomp.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    seccomp.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.POINTER(Argument),
    )
    rules = seccomp.seccomp_init(EPERM)
    if not rules:
        raise OSError("libseccomp cannot be initialised")

    def allow(name: str, *arguments: Argument, action: int = ALLOW) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # the call does not exist on this architecture
        array = (Argument * max(len(arguments), 1))(*arguments)
        if seccomp.seccomp_rule_add_array(rules, action, number, len(arguments), array) != 0:
            raise OSError(f"libseccomp cannot restrict {name}")

    for call in CALLS:
        allow(call)
    allow("open", Argument(1, MASKED_EQUAL, CHANGES, 0))
    allow("openat", Argument(2, MASKED_EQUAL, CHANGES, 0))
    allow("clone", Argument(0, MASKED_EQUAL, CLONE_THREAD, CLONE_THREAD))
    allow("clone3", action=ENOSYS)  # rules cannot check its flags in memory; without it libc uses clone
    allow("tgkill", Argument(0, EQUAL, os.getpid(), 0))
    allow("kill", Argument(0, EQUAL, os.getpid(), 0))
    allow("prlimit64", Argument(0, EQUAL, 0, 0), Argument(2, EQUAL, 0, 0))
    allow("ioctl", Argument(1, EQUAL, TCGETS, 0))
    for command in HARMLESS_FCNTL:
        allow("fcntl", Argument(1, EQUAL, command, 0))
    loaded = seccomp.seccomp_load(rules)
    if loaded != 0:
        raise OSError(f"the kernel rejects the seccomp rules ({os.strerror(-loaded)})")


def _given_input(text: str) -> int:
    """Return a file descriptor from which the program reads `text` as its standard input."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    with open(memory, "wb", closefd=False) as stream:
        stream.write(text.encode("utf-8", errors="surrogatepass"))
    os.lseek(memory, 0, os.SEEK_SET)
    return memory


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
