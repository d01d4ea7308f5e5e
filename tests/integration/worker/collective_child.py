"""A child that runs collectives with another one, as train ranks do, and reports each before it starts."""

from __future__ import annotations

import datetime
import threading

import torch
from torch import distributed

from gcore.system.control_line import ControlLine


def main() -> None:
    control = ControlLine.inherit()
    assert control is not None
    store = distributed.FileStore(control.launch["meet"], 2)
    # The time-out is as useless as it is in a rank: an hour.
    distributed.init_process_group(
        "gloo", store=store, rank=control.launch["rank"], world_size=2, timeout=datetime.timedelta(hours=1)
    )
    value, count, pause = torch.zeros(1), 0, threading.Event()
    while True:
        count += 1
        control.send("progress", phase="collective", progress=count)
        distributed.all_reduce(value)
        pause.wait(0.02)
        if count == 3:
            control.send("serving", address="127.0.0.1:1")


if __name__ == "__main__":
    main()
