"""An engine's side of a weight group: `python weight_receiver.py PORT GROUP`.

Prints "joined". For each line on its input, a JSON object with `names`, `dtypes`, `shapes` and `path`, it receives these tensors, writes them to the
safetensors file `path`, and prints "received". Ends at the end of its input.
"""

import json
import os
import sys

from safetensors.torch import save_file

from gcore.models.publisher import WeightGroup
from gcore.rollout.api import TransferManifest

TIMEOUT_S = 60


def main() -> None:
    port, name = sys.argv[1:]
    group = WeightGroup.join(
        "127.0.0.1", int(port), rank=1, world_size=2, name=name, backend="gloo", timeout_s=TIMEOUT_S
    )
    print("joined", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        shapes = tuple(tuple(shape) for shape in asked["shapes"])
        tensors = group.receive(TransferManifest(tuple(asked["names"]), tuple(asked["dtypes"]), shapes))
        save_file(tensors, asked["path"])
        print("received", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's threads may abort at the interpreter's end
