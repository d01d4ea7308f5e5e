"""The sandbox for untrusted programs: each way out is tried for real, and without a working sandbox no program runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gcore.config.reward import RewardSpec
from gcore.reward.code import code
from gcore.system.process import process_status
from gcore.worker.sandbox.box import PROBE, ProgramResult, ProgramSandbox

pytestmark = pytest.mark.needs("libseccomp")

LIMIT_S = 20.0
HARMLESS_OPEN = [
    *("open a socket", "open a datagram socket", "open a local socket", "open a pair of sockets"),
    *("read another's file", "read /etc/passwd", "read process information", "list folders"),
    *("write to its working folder", "write temporary files", "change another's file", "truncate a readable file"),
    *("change a file's mode", "remove a file"),
    *("make files in memory", "fork", "start a program", "replace itself by a program"),
    *("start a thousand threads", "exceed its memory limit", "exceed its shared memory limit"),
    *("signal another process", "signal all processes", "be debugged"),
]
"""Ways out that are open to any process of this user, and do no harm when they are tried."""


@pytest.fixture
def box() -> ProgramSandbox:
    return ProgramSandbox(256)


def run(box: ProgramSandbox, program: str, *tests: str, given: str = "", timeout_s: float = LIMIT_S) -> ProgramResult:
    return box.run(textwrap.dedent(program), tests, given, timeout_s=timeout_s)


def test_a_program_computes_and_its_tests_see_its_names(box: ProgramSandbox) -> None:
    program = """
        import collections, dataclasses, decimal, hashlib, heapq, itertools, json, math, random, re, statistics, threading
        def double(n):
            return 2 * n
        worker = threading.Thread(target=lambda: print(double(int(input()))))
        worker.start()
        worker.join()
    """
    ran = run(box, program, "assert double(2) == 4", "assert double(2) == 5", "assert nothing", given="21\n")
    assert ran == ProgramResult(output="42\n", passed=(True, False, False))


def test_the_same_program_prints_the_same_again(box: ProgramSandbox) -> None:
    program = "print(list({str(n) for n in range(50)}))"
    assert run(box, program) == run(box, program)


def test_program_that_raises_reports_its_error_and_runs_no_tests(box: ProgramSandbox) -> None:
    ran = run(box, "1 / 0", "pass")
    assert (ran.error, ran.passed) == ("ZeroDivisionError: division by zero", ())


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", id="connects"),
        pytest.param("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", id="opens a datagram socket"),
        pytest.param("import socket; socket.socket(socket.AF_UNIX)", id="opens a local socket"),
        pytest.param("import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT')", id="asks over HTTP"),
        pytest.param("open('SECRET').read()", id="reads another's file"),
        pytest.param("open('/etc/passwd').read()", id="reads /etc/passwd"),
        pytest.param("open('/proc/1/environ').read()", id="reads another process's environment"),
        pytest.param("import os; os.listdir('FOLDER')", id="lists a folder"),
        pytest.param("open('SECRET', 'a').write('x')", id="writes to another's file"),
        pytest.param("import os; os.open('/dev/null', os.O_RDONLY | os.O_TRUNC)", id="empties a file that it may read"),
        pytest.param("open('/tmp/gcore-attack', 'w').write('x' * 10**6)", id="writes a temporary file"),
        pytest.param("import tempfile; tempfile.TemporaryFile()", id="makes a temporary file"),
        pytest.param("import os; os.ftruncate(os.memfd_create('x'), 10**10)", id="makes a file in memory"),
        pytest.param("import os; os.unlink('SECRET')", id="removes a file"),
        pytest.param("import os; os.chmod('SECRET', 0)", id="changes a mode"),
        pytest.param("import os; os.rename('SECRET', 'SECRET.moved')", id="renames a file"),
        pytest.param("import os; [os.fork() for _ in range(1000)]", id="forks a thousand times"),
        pytest.param("import subprocess; subprocess.run(['/bin/sh', '-c', 'true'])", id="starts a shell"),
        pytest.param("import multiprocessing as m; p = m.Process(target=print); p.start()", id="starts a process"),
        pytest.param("import os; os.execv('/bin/sh', ['sh'])", id="becomes a shell"),
        pytest.param("import os; os.posix_spawn('/bin/sh', ['sh'], {})", id="spawns a shell"),
        pytest.param("x = bytearray(10 * 2**30)", id="takes ten gigabytes"),
        pytest.param("x = [bytearray(2**20) for _ in range(10_000)]", id="takes ten gigabytes bit by bit"),
        pytest.param("import mmap; x = mmap.mmap(-1, 10 * 2**30)", id="maps ten gigabytes"),
        pytest.param("import os; os.kill(os.getppid(), 9)", id="kills its parent"),
        pytest.param("import os; os.kill(-1, 9)", id="kills everything"),
        pytest.param("import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)", id="raises its limits"),
        pytest.param("import os; os.setuid(0)", id="becomes root"),
        pytest.param("import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", id="has signals sent"),
    ],
)
def test_a_program_cannot(box: ProgramSandbox, tmp_path: Path, attack: str) -> None:
    tmp_path.chmod(0o755)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\ninput()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        program = attack.replace("SECRET", str(secret)).replace("FOLDER", str(tmp_path))
        program = program.replace("PORT", server.stdout.readline().strip())
        ran = run(box, f"{program}\nprint('it could')")
        server.communicate("\n")
    assert "it could" not in ran.output
    assert ran.refused == ""
    assert ran.error.split(":")[0] in (
        "PermissionError",
        "OSError",
        "MemoryError",
        "ValueError",
        "URLError",
        "FileNotFoundError",
    )
    assert secret.read_text() == "secret"
    assert not Path("/tmp/gcore-attack").exists()


def test_a_program_cannot_start_a_thousand_threads(box: ProgramSandbox) -> None:
    program = """
        import threading
        threading.stack_size(65536)
        stop, started = threading.Event(), []
        try:
            for _ in range(1000):
                thread = threading.Thread(target=stop.wait)
                thread.start()
                started.append(thread)
        except RuntimeError:
            print("no more")
        stop.set()
    """
    assert run(box, program).output == "no more\n"


def test_a_program_does_not_outlive_its_limit_whatever_signals_it_ignores(box: ProgramSandbox) -> None:
    program = """
        import os, signal, threading
        for number in range(1, 64):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        print(os.getpid(), flush=True)
        threading.Thread(target=threading.Event().wait).start()
        os.close(1)
        while True:
            pass
    """
    ran = run(box, program, timeout_s=1.0)
    assert ran.error == "took longer than 1 s"
    assert process_status(int(ran.output)) is None


def test_a_program_that_never_stops_talking_is_ended(box: ProgramSandbox) -> None:
    ran = run(box, "while True:\n    print('x' * 10_000)")
    assert ran.error == "printed more than 1024 KiB"
    assert len(ran.output) < 2 << 20


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import os; os._exit(0)", id="leaves"),
        pytest.param("import sys; sys.exit('no')", id="gives up"),
        pytest.param("import ctypes; ctypes.string_at(0)", id="crashes"),
        pytest.param("import os; os.closerange(3, 64)", id="closes what its tests are told by"),
        pytest.param("this is no Python", id="is not valid Python"),
    ],
)
def test_a_program_that_does_not_come_to_its_tests_passes_none(box: ProgramSandbox, program: str) -> None:
    ran = run(box, program, "pass")
    assert ran.passed == ()
    assert ran.error


@pytest.mark.parametrize(
    "report",
    [
        pytest.param('{"refused": "the machine is to blame"}', id="it was not begun"),
        pytest.param("[" * 60_000, id="what no reader takes"),
        pytest.param(
            '{"error": "", "passed": [' + ", ".join(["true"] * 1000) + "]}", id="it passed what was not asked"
        ),
    ],
)
def test_a_program_that_reports_of_itself_cannot_fail_its_prompt_nor_be_worth_more_than_all_its_tests(
    report: str,
) -> None:
    program = (
        "import os, sys\nframe = sys._getframe()\nwhile 'report' not in frame.f_locals:\n    frame = frame.f_back\n"
    )
    program += f"os.write(frame.f_locals['report'], {report.encode()!r})\nos._exit(0)"
    spec = RewardSpec(name="code", answer="tests", options={"value": "share"})
    assert code(program, {"tests": ["print()"]}, spec).value <= 1.0
    assert code(program, {"tests": [{"input": "", "output": "1"}]}, spec).value == 0.0


def test_a_program_whose_process_dies_before_it_is_begun_could_not_be_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jail = tmp_path / "jail.py"
    jail.write_text("import os\nos.abort()\n")
    monkeypatch.setattr("gcore.worker.sandbox.box.JAIL", jail)
    assert run(ProgramSandbox(256), "pass") == ProgramResult(refused="its process was killed by SIGABRT")


def test_as_many_tests_are_counted_as_are_asked_for(box: ProgramSandbox) -> None:
    assert sum(run(box, "pass", *["pass"] * 20_000).passed) == 20_000


def test_a_program_dies_with_the_process_that_runs_it() -> None:
    script = (
        "import os, signal\n"
        "from gcore.worker.sandbox.box import ProgramSandbox\n"
        "box = ProgramSandbox(256)\n"
        "def die(process, *rest):\n"
        "    print(process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "box._watch = die\n"
        "box.run('while True: pass', timeout_s=60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    while (status := process_status(int(done.stdout))) is not None and status.state not in "ZX":
        pass  # the kernel kills it a moment later


def test_the_proof_holds_here(box: ProgramSandbox) -> None:
    box.prove()


@pytest.mark.parametrize("way", HARMLESS_OPEN)
def test_the_proof_sees_a_way_that_is_open(tmp_path: Path, way: str) -> None:
    """Each attempt of the proof works for a process that is not shut in; so it does not pass by failing for another reason."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    known = {"secret": str(secret), "memory_mb": 64, "parent": os.getpid()}
    program = f"KNOWN = {known!r}\n{PROBE.read_text()}".replace('if __name__ == "__main__":', "if False:")
    program += f"\nWAYS[{way!r}]()\nprint('open')\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if way == "replace itself by a program" else "open\n")
    Path("/tmp/gcore-probe").unlink(missing_ok=True)


WITHOUT = """
import ctypes, sys
calls = ctypes.CDLL("libseccomp.so.2")
calls.seccomp_init.restype = ctypes.c_void_p
calls.seccomp_rule_add_array.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
calls.seccomp_load.argtypes = (ctypes.c_void_p,)
rules = calls.seccomp_init(0x7FFF0000)
for name in sys.argv[1:]:
    number = calls.seccomp_syscall_resolve_name(name.encode())
    assert calls.seccomp_rule_add_array(rules, 0x00050026, number, 0, None) == 0
assert calls.seccomp_load(rules) == 0
from gcore.config.reward import RewardSpec
from gcore.errors import GcoreError
from gcore.reward.api import OpenReward
try:
    OpenReward.of(RewardSpec(name="code"))
except GcoreError as error:
    print(error)
else:
    print("it started")
"""
"""Asks for the reward on a machine whose kernel lacks some calls."""


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        pytest.param(["landlock_create_ruleset"], "the kernel has no Landlock", id="no Landlock"),
        pytest.param(["landlock_restrict_self"], "cannot restrict file access", id="no Landlock for this process"),
        pytest.param(["capset"], "cannot give up its capabilities", id="no giving up of capabilities"),
    ],
)
def test_where_programs_cannot_be_shut_in_the_reward_refuses_to_start(lacking: list[str], said: str) -> None:
    refused(without(*lacking), said)


def test_where_no_user_can_be_changed_the_reward_starts_for_all_but_root() -> None:
    done = without("setresuid", "setgroups")
    if os.geteuid() == 0:
        refused(done, "root may not become another user here")
    else:
        assert done.stdout == "it started\n", done.stderr


def without(*lacking: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *lacking], capture_output=True, text=True, check=False)


def refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.stdout.startswith("this machine cannot confine programs: "), done.stdout + done.stderr
    assert said in done.stdout
    assert "docs/use/rewards.md" in done.stdout


def test_where_seccomp_does_not_hold_the_proof_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A jail that believes it has shut the calls, and has not."""
    jail = tmp_path / "jail.py"
    source = Path(sys.modules["gcore.worker.sandbox.box"].__file__ or "").with_name("jail.py").read_text()
    jail.write_text(source.replace("    restrict_calls(seccomp)\n", ""))
    assert jail.read_text() != source
    monkeypatch.setattr("gcore.worker.sandbox.box.JAIL", jail)
    with pytest.raises(Exception, match="this machine cannot confine programs: a program could open a socket"):
        ProgramSandbox(256).prove()


def test_a_user_who_is_not_root_can_shut_programs_in(tmp_path: Path) -> None:
    script = (
        "import json, os\n"
        "from gcore.worker.sandbox.box import ProgramSandbox\n"
        "box = ProgramSandbox(256)\n"
        "box.prove()\n"
        "print(json.dumps([os.getuid(), box.run('print(6 * 7)', timeout_s=20).output]))\n"
    )
    command = [sys.executable, "-c", script]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        assert setpriv, "setpriv (util-linux) is missing"
        # It may look into root's folders, where this Python may be; nothing else of root is left.
        look = "+dac_read_search"
        command = [setpriv, "--reuid=65534", "--clear-groups", f"--inh-caps={look}", f"--ambient-caps={look}", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    uid, output = json.loads(done.stdout)
    assert (uid != 0, output) == (True, "42\n")


@pytest.mark.parametrize(
    ("response", "answer", "options", "value"),
    [
        pytest.param("```python\ndef f(n):\n    return n + 1\n```", ["assert f(1) == 2"], {}, 1.0, id="right"),
        pytest.param("def f(n):\n    return n", "assert f(1) == 2", {}, 0.0, id="wrong, no fence"),
        pytest.param(
            "```\ndef f(n): return 2\n```",
            ["assert f(1) == 2", "assert f(2) == 3"],
            {"value": "share"},
            0.5,
            id="share",
        ),
        pytest.param("print(int(input()) * 2)", [{"input": "2\n", "output": "4"}], {}, 1.0, id="pairs"),
        pytest.param("print(5)", '{"inputs": ["1", "2"], "outputs": ["5", "6"]}', {"value": "share"}, 0.5, id="JSON"),
        pytest.param("while True: pass", ["f()"], {"timeout_s": 0.5}, 0.0, id="never ends"),
        pytest.param(
            "import numpy\nx = int(numpy.ones(3).sum())", ["assert x == 3"], {"packages": True}, 1.0, id="packages"
        ),
        pytest.param("import numpy\nx = 3", ["assert x == 3"], {}, 0.0, id="no packages"),
    ],
)
def test_a_program_in_a_response_is_worth(
    response: str, answer: object, options: dict[str, str | float | bool], value: float
) -> None:
    result = code(response, {"answer": answer}, RewardSpec(name="code", options=options))
    assert result.value == value
    assert [name for name, _ in result.parts] == ["passed", "ran"]
