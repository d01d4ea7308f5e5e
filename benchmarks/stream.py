"""Steps that are trained part by part beside steps that are trained as a whole, where generation has a long tail.

    make bench-stream          five alternating pairs; benchmarks/results/stream.json

The same job with `train.stream` on and off, one slot that rolls out and one that trains (`placement.policy: static`), and the
same responses, so that nothing but the waiting differs. Devices are emulated: lengths are drawn from a log-normal law with a long tail (the longest of
a step is about sixteen times the median), and generation takes about four times as long as training, which is what is told
of large models. Controllers, etcd, RPC, seals, exchanges and receipts are real, and cost what they do on this machine; as
emulated time runs faster than real time, they weigh more than they would. Of each run the seconds of a step, from commit to
commit, in emulated time; of a pair their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measured import circumstances, spread, write
from runs import alternating_pairs, finished_run

from gcore.emulated.launch import LAW_FILE
from gcore.testing.tiny_model import make_tiny_model

STEPS, GROUPS, SAMPLES, LONGEST = 7, 32, 8, 600
LAW = {
    "speedup": 8.0,
    "decode_s": 0.2,
    "decode_per_sequence_s": 0.0,
    "prefill_tokens_per_s": 200_000.0,
    "train_s": 1.0,
    "train_tokens_per_s": 700.0,
    "response_tokens": 24,
    "response_spread": 1.0,
    "response_likeness": 0.5,
    "replica_noise": 0.0,
    "event_noise": 0.0,
}
"""Times are emulated seconds."""
WHOLE, STREAMED = "whole", "streamed"


def one_run(folder: Path, *, stream: bool) -> dict[str, Any]:
    """One run. Raises SystemExit unless it succeeds with a clean audit."""
    name = STREAMED if stream else WHOLE
    job = {
        "name": "long-tail",  # of both: what is drawn follows from the name, so that every response is as long in both
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 16},
        "flow": {"steps": STEPS, "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": LONGEST},
        "train": {"stream": stream},
        "placement": {"policy": "static", "train": 1},
        "checkpoint": {"every": 1000},
    }
    file = folder / f"{name}.yaml"
    file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in job.items()) + "\n")
    run = finished_run(file, controllers=1, slots="emulated:2", environment={LAW_FILE: str(folder / "law.json")})
    speedup = float(LAW["speedup"])
    seconds = [one * speedup for one in run.step_seconds]
    return {
        "step_seconds": [round(one, 2) for one in seconds],
        "median_step_seconds": round(statistics.median(seconds), 2),
        "seconds": round(sum(seconds), 2),
        "tokens": [int(one["tokens"]) for one in run.stats],
        "parts": [int(one.get("parts", 1)) for one in run.stats],
        "collect_seconds": [round(one["collect_s"] * speedup, 2) for one in run.stats],
        "train_seconds": [round(one["train_s"] * speedup, 2) for one in run.stats],
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--name", default="stream", help="of the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = circumstances("grpcio")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_tiny_model(folder / "model", seed=1)
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "law.json").write_text(json.dumps(LAW))
        sides = (WHOLE, lambda: one_run(folder, stream=False)), (STREAMED, lambda: one_run(folder, stream=True))
        pairs = alternating_pairs(arguments.pairs, *sides)
    result |= {
        "what": f"train.stream on and off, emulated devices: one slot rolls out, one trains; {STEPS - 1} steps of {GROUPS} x {SAMPLES}",
        "law": LAW,
        "ratio": spread([pair[WHOLE]["seconds"] / pair[STREAMED]["seconds"] for pair in pairs]),
        "whole_step_seconds": spread([one for pair in pairs for one in pair[WHOLE]["step_seconds"]], 2),
        "streamed_step_seconds": spread([one for pair in pairs for one in pair[STREAMED]["step_seconds"]], 2),
        "parts": spread([float(one) for pair in pairs for one in pair[STREAMED]["parts"]], 1),
        "pairs": pairs,
    }
    print(write(arguments.name, result))


if __name__ == "__main__":
    main()
