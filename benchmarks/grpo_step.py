"""Seconds per GRPO step of the arithmetic example's model, beside TRL's `GRPOTrainer`.

64 completions (8 prompts × 8) of exactly 5, 64 and 256 tokens, one update a step, no reference model, float32, two cores,
passive waiting on both sides. gcore runs as its users run it: `gcore run` with a real etcd, one controller, two engines and
two train ranks of one thread each that share the two slots. TRL runs both ways it can use two cores, one process of two
threads and two processes (torchrun) of one, and is represented by whichever is faster. The sides take turns, round by
round; each round's first steps are left out (start-up, caches). A gcore step is the time from commit to commit, everything
included: issuing, rollout, scoring, seal, exchange, update, commit, publication.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.harness import PREPARED, ROOT, Benchmark, Result, cpu_environment, finished_run, spread, write_spec

EXAMPLE = PREPARED / "arithmetic"
CONTEXT = 1024
WARM_UP = 3
PHASES = ("publish_s", "collect_s", "exchange_s", "train_s")


def widened_model(folder: Path) -> Path:
    """The example's model with room for long responses: rotary positions need no new weights."""
    model = folder / "model"
    shutil.copytree(EXAMPLE / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    return model


def gcore_steps(model: Path, folder: Path, tokens: int, steps: int) -> list[dict[str, float]]:
    """The statistics of each step after the warm-up."""
    spec = {
        "name": f"bench-{tokens}",
        "model": {"path": str(model)},
        "data": {"path": str(EXAMPLE / "train.jsonl"), "shards": 32},
        "flow": {"steps": steps, "groups_per_step": 8, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": tokens, "min_new_tokens": tokens},
        "reward": {"name": "exact"},
        "train": {
            "learning_rate": 3e-4,
            "schedule": "linear",
            "betas": [0.9, 0.95],
            "old_logprobs": "current",
            "micro_batch_tokens": 2048,
            "ranks": 2,
        },
        "checkpoint": {"every": steps},
    }
    run = finished_run(write_spec(folder / "spec.yaml", spec), controllers=1, environment=cpu_environment())
    return [one for one in run.stats[WARM_UP:] if "seconds" in one]


def trl_steps(python: Path, model: Path, folder: Path, tokens: int, steps: int, processes: int) -> list[float]:
    """Seconds of each step after the warm-up."""
    script = [str(ROOT / "benchmarks" / "trl_grpo.py"), "--model", str(model)]
    script += ["--data", str(EXAMPLE / "train.jsonl"), "--tokens", str(tokens), "--steps", str(steps)]
    script += ["--work", str(folder / "trl")]
    launcher = [str(python)]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*launcher, *script], env=cpu_environment(2 // processes), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stdout}\n{done.stderr}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    answer = json.loads(line)
    if answer["mean_length"] != tokens:
        raise SystemExit(f"TRL's responses have {answer['mean_length']} tokens, not {tokens}")
    return list(answer["seconds"][WARM_UP - 1 :])


def compare(python: Path, model: Path, folder: Path, tokens: int, rounds: int, steps: int) -> Result:
    """Rounds in turn; medians, and the ratio of each round."""
    sides: dict[str, list[float]] = {"gcore": [], "trl 1 x 2": [], "trl 2 x 1": []}
    ratios: list[float] = []
    phases: dict[str, list[float]] = {
        name: [] for name in (*PHASES, "reference_seconds", "update_seconds", "saving_seconds")
    }
    for number in range(rounds):
        medians = {}
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for side in order:
            if side == "gcore":
                stats = gcore_steps(model, folder, tokens, steps)
                seconds = [one["seconds"] for one in stats]
                for name, values in phases.items():
                    values.extend(one[name] for one in stats if name in one)
                if any(one["response_length"] != tokens for one in stats):
                    raise SystemExit(f"gcore's responses do not all have {tokens} tokens")
            else:
                seconds = trl_steps(python, model, folder, tokens, steps, 2 if side == "trl 2 x 1" else 1)
            sides[side] += seconds
            medians[side] = statistics.median(seconds)
            print(f"{tokens} tokens, {side}: {medians[side]:.3f} s a step", flush=True)
        ratios.append(min(medians["trl 1 x 2"], medians["trl 2 x 1"]) / medians["gcore"])
    return {
        "tokens": tokens,
        "seconds": {side: spread(values) for side, values in sides.items()},
        "times_faster_than_trl": spread(ratios, 2),
        "gcore_phases": {name: spread(values) for name, values in phases.items() if values},
    }


def measure(arguments: argparse.Namespace, taken: Result) -> Result:
    """Every number of tokens."""
    trl = subprocess.run(
        [str(arguments.trl), "-c", "from importlib.metadata import version; print(version('trl'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    taken["versions"]["trl"] = trl
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = widened_model(folder)
        cases = [
            compare(arguments.trl, model, folder, tokens, arguments.pairs, arguments.steps)
            for tokens in arguments.tokens
        ]
    what = "Seconds per GRPO step of the arithmetic example's model, beside TRL's `GRPOTrainer`."
    return {"what": what, **taken, "completions": 64, "cases": cases}


def options(parser: argparse.ArgumentParser) -> None:
    """TRL's environment, and sizes."""
    parser.add_argument("--trl", type=Path, default=ROOT / ".venv-trl" / "bin" / "python", help="TRL's Python")
    parser.add_argument("--tokens", type=int, nargs="+", default=[5, 64, 256])
    parser.add_argument("--steps", type=int, default=20)


BENCHMARKS = (Benchmark("grpo", "grpo_step", measure, ("torch", "transformers", "deepspeed"), 3, options),)
