"""The commands of the documents, for tests that run them: what a test must run, a proof that it did, and a shell in a checkout.

`make lint` demands that each command belongs to one test, which takes it from `commands_run_by`, or has a reason
(`tools/check_commands.py`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path

from cluster_run import PATIENCE_S, gcore
from user_venv import make_user_venv

from tools.check_commands import commands_of_test
from tools.documents import Typed
from tools.problem import ROOT

KINDS = ("console", "python", "inline")
COPIED = ("deploy", "examples", "tools")
"""Entries of the repository into which documented commands write."""
STEPS = re.compile(r"flow\.steps=(\d+)")


class Walk:
    """The commands that a test must run. Leaving the `with` block fails the test if one of them has not passed."""

    def __init__(self, commands: list[Typed]) -> None:
        self.commands = commands
        self._left = list(commands)

    def __enter__(self) -> Walk:
        return self

    def passed(self, command: Typed) -> None:
        """The command ran, and ended as it should."""
        self._left.remove(command)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert kind is not None or self._left == [], f"not run: {'; '.join(map(str, self._left))}"


def commands_run_by(test: str, page: str | None = None, kinds: Collection[str] = KINDS) -> Walk:
    """What `tools/commands.toml` gives to a test; of that what is on one page, or of some kinds. `test`: below tests/."""
    found = commands_of_test(ROOT, test)
    return Walk([command for command in found if page in (None, command.page) and command.kind in kinds])


def shortened(text: str) -> str:
    """The command or program with a twentieth of its training steps, at least two."""
    text = STEPS.sub(lambda steps: f"flow.steps={max(2, int(steps[1]) // 20)}", text)
    if re.match(r"\S*gcore (run|submit) ", text) and "flow.steps" not in text:
        text = re.sub(r"\s+# .*$", "", text) + " --set flow.steps=2"
    return text


class Checkout:
    """A reader's checkout of the repository with an activated environment, and a shell that keeps its folder and variables."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder / "gcore"
        self.folder.mkdir()
        for entry in ROOT.iterdir():
            if entry.name in COPIED:
                shutil.copytree(entry, self.folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif entry.name not in (".git", ".venv", ".gcore"):
                (self.folder / entry.name).symlink_to(entry)
        (folder / "home").mkdir()
        own = Path(sys.executable).parent  # of the etcdctl that is installed with gcore
        activated = make_user_venv(self.folder / ".venv")
        activated.pop("NUMBA_DISABLE_JIT", None)  # of the tests; a reader's simulator compiles its loops
        self.own_cluster = folder / "own"
        self._state = folder / "state"
        self._environment = {
            **activated,
            "PATH": f"{activated['PATH']}:{own}",
            "HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "home" / ".config"),
            "GCORE_HOME": str(self.own_cluster),
            **environment,
        }
        self._state.write_text(f"cd {shlex.quote(str(self.folder))}\n")

    def run(self, text: str, environment: Mapping[str, str] | None = None) -> str:
        """Run one command in the shell; its output. Fails unless it ends with 0."""
        script = f". {self._state}\n{text}\nended=$?\n"
        script += f'{{ export -p; printf "cd %q\\n" "$PWD"; }} > {self._state}.new; exit $ended\n'
        file = self._state.with_suffix(".sh")
        file.write_text(script)
        ended = subprocess.run(
            ["bash", str(file)], cwd=self.folder, env={**self._environment, **(environment or {})},
            capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, (
            f"$ {text}\nends with {ended.returncode}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
        )
        lines = Path(f"{self._state}.new").read_text()
        kept = set(environment or ())
        self._state.write_text("\n".join(x for x in lines.splitlines() if not _sets(x, kept)) + "\n")
        return ended.stdout

    def run_python(self, text: str) -> str:
        """Run a Python block as a program. One that awaits outside of functions runs in a coroutine."""
        try:
            compile(text, "block", "exec")
        except SyntaxError:
            text = f"import asyncio\nimport gcore\nasync def main():\n{textwrap.indent(text, '    ')}\nasyncio.run(main())\n"
        program = self._state.with_name("program.py")
        program.write_text(text)
        return self.run(f"python {program}")

    def close(self) -> None:
        """Stop what documented commands have started here."""
        for home in {self.own_cluster, *(file.parent for file in self.folder.parent.glob("*/cluster.json"))}:
            gcore("down", "--home", str(home), check=None)


def _sets(line: str, names: set[str]) -> bool:
    return any(line.startswith(f"declare -x {name}=") for name in names)
