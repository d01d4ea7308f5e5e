"""What the first placement estimates of memory, beside what real engines and real train ranks take.

    make bench-memory           all cases; writes benchmarks/results/memory.json

Models are made from configurations, with weights drawn at random. An engine is the torch engine, serving over HTTP; a rank is one of a
world over gloo that trains one step, at ZeRO stages 1 to 3, by one rank or two. Measured is the most of resident memory that the
kernel saw, less what the same process takes with next to no model. Estimated is what `placement.mapping.memory` says of the same,
from the configuration alone. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measured
from memory_cases import BASE, CASES, CONTEXT, SIZES, Case, make_models

from gcore.config import parse_spec
from placement.mapping.memory import engine_need, rank_needs
from placement.mapping.shapes import ModelShape, shape_of
from placement.mapping.workload import Lengths, Shapes, Workload, workload_of

SIDES = Path(__file__).with_name("memory_sides.py")
MB = 1e6


class Host:
    """The process that forks the others."""

    def __init__(self) -> None:
        out, theirs = os.pipe()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3>&{theirs}', "bash", sys.executable, str(SIDES)],
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self._lines = os.fdopen(out)
        assert self._answer()["ready"]

    def measure(self, told: Mapping[str, Any]) -> list[dict[str, int]]:
        """Bytes of each process of a case, by phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, int]] = self._answer()["found"]
        return found

    def end(self) -> None:
        """It ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._lines.close()

    def _answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise SystemExit("the processes ended; their error stands above")
        found: dict[str, Any] = json.loads(line)
        return found


def shape(model: str) -> ModelShape:
    """As its configuration says."""
    size = SIZES[model]
    return shape_of(size.config, where=model)


def workload(case: Case) -> Workload:
    """What the case does, as a job would say it."""
    spec = parse_spec(
        {
            "name": "bench",
            "model": {"path": "m"},
            "data": {"path": "d", "max_prompt_tokens": case.prompt},
            "flow": {"steps": 1, "groups_per_step": max(1, case.samples // 8), "samples_per_prompt": 8},
            "rollout": {"max_new_tokens": case.response, "batch_slots": case.samples},
            "train": {"old_logprobs": "engine"} | case.train,
        }
    )
    of = shape(case.model)
    return workload_of(spec, Shapes(of, None, {}), Lengths(case.prompt, case.response))


def estimated(case: Case) -> int:
    """Bytes of one process, at most."""
    said = workload(case)
    if case.what == "engine":
        need = engine_need(said.rollout, size=1, rows=case.samples, gpu=False)
        return need.stays(need.wanted) + need.works
    needs = rank_needs(said.training, case.size, gpu=False)
    return sum(need.stays for need in needs) + max(need.works for need in needs)


def row(case: Case, processes: Sequence[Mapping[str, int]], base: Mapping[str, int]) -> dict[str, Any]:
    """A case's figures. The largest process of a case counts: it is the one that must fit."""
    most = max(max(one["loading"], one["working"]) - base["working"] for one in processes)
    of, guess, empty = (
        shape(case.model),
        estimated(case),
        estimated(Case(case.what, BASE, case.size, train={"zero_stage": case.alike[2]})),
    )
    guess -= empty
    return {
        "case": words(case),
        "what": case.what,
        "parameters": of.parameters,
        "measured_mb": round(most / MB, 1),
        "of_each_process_mb": [
            round((max(one["loading"], one["working"]) - base["working"]) / MB, 1) for one in processes
        ],
        "after_loading_mb": [round((one["loaded"] - base["loaded"]) / MB, 1) for one in processes],
        "estimated_mb": round(guess / MB, 1),
        "error": round(guess / most - 1, 4),
    }


def words(case: Case) -> str:
    """`30M: ZeRO 2, 2 ranks`."""
    if case.what == "engine":
        return f"{case.model}: engine, {case.samples} requests of {case.prompt} + {case.response} tokens"
    more = {key: value for key, value in case.train.items() if key not in ("zero_stage", "critic")}
    said = [f"ZeRO {case.train.get('zero_stage', 1)}", f"{case.size} rank{'s' * (case.size > 1)}"]
    said += [f"{case.samples * (case.prompt + case.response)} tokens"]
    said += [f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in more.items()]
    return f"{case.model}: {', '.join(said)}"


def measure(cases: Sequence[Case]) -> list[tuple[Case, list[dict[str, int]]]]:
    """Each case's processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, sorted({case.model for case in cases}))
        host, found = Host(), []
        try:
            for number, case in enumerate(cases):
                found.append((case, host.measure(case.told(folder, folder / f"run-{number}"))))
                print(f"{words(case)}: measured", flush=True)
        finally:
            host.end()
    return found


def rows(found: Sequence[tuple[Case, list[dict[str, int]]]]) -> list[dict[str, Any]]:
    """Of all cases but those that are taken off the others."""
    base: dict[tuple[str, int, int], dict[str, int]] = {}
    for case, processes in found:
        if case.model == BASE:
            base[case.alike] = {key: max(one[key] for one in processes) for key in processes[0]}
    return [row(case, processes, base[case.alike]) for case, processes in found if case.model != BASE]


def main() -> None:
    """Measure, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SIZES), help="models, by name")
    parser.add_argument("--out", default="memory", help="the result's name")
    arguments = parser.parse_args()
    made = rows(measure([case for case in CASES if case.model == BASE or case.model in arguments.only]))
    result = measured.circumstances("torch", "transformers", "deepspeed") | {
        "what": (__doc__ or "").split("\n")[0],
        "models": f"qwen3 with tied embeddings, context {CONTEXT}, float32 weights drawn at random",
        "errors": measured.spread([one["error"] for one in made]),
        "cases": made,
    }
    for one in made:
        print(
            f"{one['case']:60} measured {one['measured_mb']:8.1f} MB, estimated {one['estimated_mb']:8.1f} MB, {one['error']:+.1%}"
        )
    print(measured.write(arguments.out, result))


if __name__ == "__main__":
    main()
