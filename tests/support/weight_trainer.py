"""A trainer that sends weights to engines: `python weight_trainer.py FOLDER PORT WORLD_SIZE GROUP`.

Rank 0 of a weight group. Prints "joined" once all members are connected. For each line "send NAME,NAME,..." on its input it
broadcasts these tensors of the folder's weights ("send *": all, in the order of their names) and prints "sent". Exits at the
end of its input.
"""

import os
import sys
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from gcore.errors import GcoreError
from gcore.models.publisher import SENDER, BroadcastPublisher, NamedTensor, WeightGroup
from gcore.types import Version

TIMEOUT_S = 60


def main() -> None:
    folder, port, world_size, name = sys.argv[1:]
    weights = dict(sorted(load_file(Path(folder) / "model.safetensors").items()))
    group = WeightGroup.join(
        "127.0.0.1",
        int(port),
        rank=SENDER,
        world_size=int(world_size),
        name=name,
        backend="gloo",
        timeout_s=TIMEOUT_S,
    )
    print("joined", flush=True)
    for step, line in enumerate(sys.stdin):
        names = line.removeprefix("send ").strip()
        wanted = [NamedTensor(n, weights[n]) for n in (weights if names == "*" else names.split(","))]
        publisher = BroadcastPublisher(name, group, partial(iter, wanted))
        try:
            publisher.send(publisher.stage(Version(0, step), lambda: None))
        except GcoreError as error:
            print(f"failed: {error}", flush=True)
        else:
            print("sent", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may abort at the interpreter's end
