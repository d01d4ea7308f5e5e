"""A child for the supervisor's tests: it runs the steps of its launch document one by one, then waits for commands.

A step is [name, arguments...]; see `STEPS`. After the last it waits for "stop" and ends with 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from gcore.system.control_line import ControlLine


def main() -> None:
    control = ControlLine.inherit()
    assert control is not None
    for name, *arguments in control.launch["steps"]:
        STEPS[name](control, *arguments)
    control.wait_for("stop")
    print("stopped as told", flush=True)


def tell(control: ControlLine, event: str, fields: dict[str, Any]) -> None:
    control.send(event, **fields)


def serve_where_the_rendezvous_is(control: ControlLine) -> None:
    control.send("serving", address=control.wait_for("rendezvous")["address"])


def say(_: ControlLine, text: str) -> None:
    print(text, flush=True)


def say_environment(_: ControlLine, *names: str) -> None:
    print(*(f"{name}={os.environ.get(name)}" for name in names), flush=True)


def leave_a_grandchild(_: ControlLine) -> None:
    print("grandchild", subprocess.Popen(["sleep", "600"]).pid, flush=True)


STEPS = {
    "tell": tell,
    "serve where the rendezvous is": serve_where_the_rendezvous_is,
    "say": say,
    "say environment": say_environment,
    "leave a grandchild": leave_a_grandchild,
    "exit": lambda _, code: sys.exit(code),
    "kill": lambda _, number: os.kill(os.getpid(), number),
    "sleep": lambda _: signal.pause(),
}

if __name__ == "__main__":
    main()
