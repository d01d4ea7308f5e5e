"""Placement policies on running clusters: on emulated slots with a drifting job, and on two real cores.

**Live** (`placement-live`): 4 controllers, 32 emulated slots, responses that get longer and a judge that becomes slow. The control plane is real
(etcd, daemons, gRPC, HTTP, supervisors, the audit at the end); what computes is emulated, and takes the time of a law that is known to no
policy. Over the run the median response doubles, and in its middle the judge's decode steps become several times as long, so that first
rollout wants more slots and then the judge. What is drawn follows from the job's name and the prompt: every run has the same
responses, whatever its policy. Seconds are those of a step from commit to commit, in emulated time. What agreeing, routing and
asking cost is real, and weighs more as emulated time runs faster. All runs share this machine's cores, which on a cluster each node has
for itself.

`static:R:J:T` has R slots that roll out, J that judge and T that train, for as long as it runs. `colocated` has an engine of each model on every
slot, awake at once: two that compute on one slot share its pace and lose `shared_loss` by it. Any other name is a policy that moves slots.
Of policies that move slots each move's prediction is compared with what came, and so is what they expected of each step before which they moved
nothing (in real seconds); every node's books are added up.

**Pictures** (`placement-pictures`): the same with a policy that generates pictures and a judge that sees them: 2 controllers, 16 slots. All
pictures have equally many denoising steps. First generation is dearer than judging; from the middle on the judge's decode steps take
several times as long, so that judging is dearer. To put an engine to sleep and to wake another one takes 2 s. A slot's memory holds an engine and
one that sleeps, and not those of both models beside a rank, so pools are apart. Each picture has states, embeddings and a
PNG file in blob stores.

**Pairs** (`placement-pairs`): `dynamic` beside the best fixed plan there is, on two real cores: the judge example, real engines and ranks. With
two slots and three pools every plan shares slots; fixed plans differ in how many ranks train and how many slots judge. The one that takes
the least time is what `dynamic` is compared with. Of each run the seconds from the first step's commit to the last one's. The goal:
`dynamic` at least 0.97 times as fast, the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    EXAMPLES,
    Benchmark,
    Result,
    alternating_pairs,
    finished_run,
    spread,
    write_spec,
    write_sums,
)
from controllers.cli.view.placement import placement_story
from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger.records.job import HoldPeriod, Move
from gcore.ledger.records.slot_accounting import AccountLine
from gcore.testing.models import make_tiny_model
from gcore.testing.pipelines import write_pipeline
from gcore.testing.vision_models import make_tiny_vision_model

STEPS = 24
GROWN = 2.0
"""How many times as long the median response is at the end."""
LONGEST, ROWS = 400, 4
LAW: dict[str, Any] = {
    "speedup": 1.5,
    "load_s": 0.5,
    "prefill_tokens_per_s": 200_000.0,
    "decode_s": 0.01,
    "decode_per_sequence_s": 0.004,
    "response_tokens": 60,
    "response_spread": 0.2,
    "judge_decode_s": 0.01,
    "judge_decode_per_sequence_s": 0.004,
    "judge_response_tokens": 16,
    "judge_response_spread": 0.2,
    "judge_slow": 8.0,
    "shared_loss": 0.5,
    "publish_s": 0.1,
    "sleep_s": 0.1,
    "wake_s": 0.2,
    "train_s": 0.2,
    "train_tokens_per_s": 8_000.0,
    "replica_noise": 0.05,
    "event_noise": 0.02,
}
"""No accelerator's numbers. Sharing costs half of the pace again, so that to have everything everywhere is not free of charge."""
PICTURE_LAW: dict[str, Any] = LAW | {
    "memory_gib": 2.2,
    "denoise_s": 0.05,
    "denoise_per_token_s": 0.005,
    "picture_s": 0.02,
    "train_tokens_per_s": 20_000.0,
    "judge_response_tokens": 32,
    "judge_slow": 10.0,
    "sleep_s": 0.8,
    "wake_s": 1.2,
}
"""Pipeline and judge are large, so sleep and wake take long. A slot has room for two processes and no third."""
WARM = 1
"""Steps that are not counted: everything is published, imported and connected for the first time."""
COLOCATED = "colocated"
MOVING = ("dynamic",)


@dataclass(frozen=True)
class Scene:
    """A cluster and its job. `groups`: of a step, a whole number for each shard and each controller. `fixed`: the static splits, from
    the first of which policies that move slots begin."""

    what: str
    name: str
    nodes: int
    slots: int
    groups: int
    samples: int
    law: Mapping[str, Any]
    fixed: tuple[str, ...]
    sections: Mapping[str, Any]
    """Of the spec."""
    judge: Mapping[str, Any]
    policies: tuple[str, ...]
    """Beside the static splits."""
    write: Callable[[Path], None]
    """Writes the models and the prompts into a folder."""
    steps: int = STEPS
    speedup: float = LAW["speedup"]

    def law_of(self, steps: int, speedup: float) -> dict[str, Any]:
        """The law of a run of so many steps."""
        grown = {"response_growth": GROWN ** (1 / steps)} if "diffusion" not in self.sections["rollout"] else {}
        return {**self.law, "speedup": speedup, **grown, "judge_slow_at": slow_at(steps)}


def write_texts(folder: Path) -> None:
    """A tiny model, and sums."""
    make_tiny_model(folder / "model", seed=1)
    write_sums(folder / "train.jsonl", range(100, 200), range(80))


def write_pictures(folder: Path) -> None:
    """A tiny pipeline, a tiny judge that sees, and prompts. Prompts differ in the words that the pipeline knows and in others."""
    write_pipeline(folder / "pipeline")
    make_tiny_vision_model(folder / "seer")
    colours, forms = ("red", "green", "blue"), ("square", "circle")
    prompts = (f"a {colour} {form} {number}" for number in range(600) for colour in colours for form in forms)
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


TEXTS = Scene(
    what="Placement policies live on emulated slots: 4 controllers, 32 slots, responses that get longer and a judge that becomes slow.",
    name="placement",
    nodes=4,
    slots=32,
    groups=64,
    samples=4,
    law=LAW,
    fixed=("static:20:8:4", "static:16:12:4", "static:12:16:4"),
    sections={"model": {"path": "model"}, "rollout": {"max_new_tokens": LONGEST, "batch_slots": ROWS}},
    judge={"model": {"path": "model"}, "template": "{{ prompt }}{{ response }}"},
    policies=(COLOCATED, *MOVING),
    write=write_texts,
)
PICTURES = Scene(
    what="Placement policies live on emulated slots: 2 controllers, 16 slots, a policy that generates pictures, and a judge that sees them and becomes "
    "slow.",
    name="placement-pictures",
    nodes=2,
    slots=16,
    groups=32,
    samples=2,
    law=PICTURE_LAW,
    fixed=("static:8:6:2", "static:6:8:2", "static:4:10:2"),
    sections={
        "model": {"path": "pipeline"},
        "rollout": {
            "batch_slots": 2,
            "diffusion": {"steps": 10, "window": {"size": 4, "strategy": "progressive"}},
        },
    },
    judge={"model": {"path": "seer"}, "images": True, "template": "{{ prompt }} {{ response }}"},
    policies=MOVING,
    write=write_pictures,
    steps=16,
    speedup=4.0,
)


def slow_at(steps: int) -> int:
    """From these weights on the judge is slow."""
    return steps // 2


@dataclass(frozen=True)
class Choice:
    """A policy and what it begins with."""

    name: str

    def placement(self, scene: Scene) -> dict[str, Any]:
        """The section of the spec."""
        if self.name == COLOCATED:
            return {"policy": COLOCATED}
        policy, *split = self.name.split(":")
        _, reward, train = map(int, split or scene.fixed[0].split(":")[1:])
        return {"policy": policy, "train": train, "reward": reward}


def write_job(folder: Path, scene: Scene, choice: Choice, steps: int) -> Path:
    """A spec for a policy. All have one name, from which the responses follow."""
    drawn = "diffusion" in scene.sections["rollout"]
    job = {
        "name": scene.name,
        **scene.sections,
        "data": {"path": "train.jsonl", "shards": 16 * scene.nodes},
        "flow": {"steps": steps, "groups_per_step": scene.groups, "samples_per_prompt": scene.samples}
        | ({"name": "mix_grpo"} if drawn else {}),
        "judges": [
            {
                "name": "tutor",
                **scene.judge,
                "max_new_tokens": 100,
                "serving": {"batch_slots": ROWS},
                "verdict": {"parser": "words", "words": {"y": 1, "n": 0}},
            }
        ],
        "reward": {"judge": "tutor"},
        "placement": choice.placement(scene),
        "checkpoint": {"every": 1000},
    }
    if not choice.name.startswith("static"):
        job["train"] = {"ranks": int(scene.fixed[0].split(":")[3])}
    return write_spec(folder / f"{choice.name.replace(':', '-')}.yaml", job)


def live_run(folder: Path, scene: Scene, choice: Choice, steps: int, speedup: float, limit_s: float) -> dict[str, Any]:
    """One run: its steps, its moves and its books. Raises SystemExit unless it succeeds with a clean audit."""
    run = finished_run(
        write_job(folder, scene, choice, steps),
        controllers=scene.nodes,
        slots=f"emulated:{scene.slots}",
        environment={LAW_FILE: str(folder / "law.json")},
        limit_s=limit_s,
    )
    seconds = [one * speedup for one in run.step_seconds][WARM - 1 :]
    return {
        "policy": choice.name,
        "step_seconds": [round(one, 3) for one in seconds],
        "seconds": round(sum(seconds), 2),
        "tokens": [int(one["tokens"]) for one in run.stats],
        "collect_seconds": [round(one["collect_s"] * speedup, 2) for one in run.stats],
        "train_seconds": [round(one["train_s"] * speedup, 2) for one in run.stats],
        "moves": moves_of(run.moves),
        "foretold": foretold_of(run.stays),
        "account": placement_story(scene.name, None, [move for move in run.moves if not move.within], 0, run.stays)[1:],
        "books": books_of(run.books),
    }


def moves_of(moves: list[Move]) -> list[dict[str, Any]]:
    """Each move with what was expected of a step after it, and what the steps came to."""
    return [
        {
            "step": move.step,
            "kind": move.kind,
            "within": move.within,
            "before": move.before.model_dump(mode="json"),
            "after": move.after.model_dump(mode="json"),
            "state": move.state,
            "reason": move.reason,
            "expected_s": move.expected_s,
            "measured_s": move.outcome.step_s if move.outcome else None,
            "took_s": move.outcome.took_s if move.outcome else None,
        }
        for move in moves
    ]


def foretold_of(stays: list[HoldPeriod]) -> dict[str, Any] | None:
    """What the policy expected of each step before which nothing moved, beside what that took; None where it expects nothing."""
    told = [stay.foretold for stay in stays if stay.foretold.steps]
    if not told:
        return None
    expected, took, off = (sum(getattr(one, name) for one in told) for name in ("expected_s", "took_s", "off_s"))
    return {
        "steps": sum(one.steps for one in told),
        "expected_by_measured": round(expected / took, 3),
        "off": round(off / took, 3),
        "stretches": [one.model_dump(mode="json") for one in told],
    }


def books_of(lines: list[AccountLine]) -> dict[str, Any] | None:
    """The error of the nodes' slot accounting against slots times seconds, and the states of the slots; None for runs without accounting."""
    if not lines:
        return None
    states: dict[str, float] = {}
    for line in lines:
        for state, seconds in line.book.booked.items():
            states[state] = states.get(state, 0.0) + seconds
    total = sum(line.book.seconds * line.book.slots for line in lines)
    return {
        "nodes_and_steps": len(lines),
        "largest_error": round(max(line.book.error for line in lines), 5),
        "largest": largest_of(lines),
        "error": round(sum(line.book.unbooked + line.book.overbooked for line in lines) / total, 5),
        "shares": {state: round(seconds / total, 4) for state, seconds in sorted(states.items())},
    }


def largest_of(lines: list[AccountLine]) -> dict[str, Any]:
    """The largest accounting error of a node and step, and the unaccounted times of its slots, in seconds since the step began."""
    line = max(lines, key=lambda one: one.book.error)
    untold = {
        slot: [[round(span.begin, 3), round(span.end, 3)] for span in spans if not span.most]
        for slot, spans in line.spans.items()
    }
    return {
        "node": line.node,
        "step": line.book.version.step,
        "seconds": round(line.book.seconds, 3),
        "unbooked": round(line.book.unbooked, 3),
        "overbooked": round(line.book.overbooked, 3),
        "untold": {slot: spans for slot, spans in untold.items() if spans},
    }


def summed(runs: list[dict[str, Any]], slow: int) -> dict[str, Any]:
    """Of each policy: the seconds of a run, and of its steps before and after the judge became slow."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run["policy"] for run in runs):
        mine = [run for run in runs if run["policy"] == name]
        early = [one for run in mine for one in run["step_seconds"][: slow - WARM]]
        late = [one for run in mine for one in run["step_seconds"][slow - WARM :]]
        moves = [move for run in mine for move in run["moves"] if move["state"] == "done"]
        between = [move for move in moves if not move["within"]]
        ratios = [m["expected_s"] / m["measured_s"] for m in between if m["expected_s"] and m["measured_s"]]
        foretold = [run["foretold"] for run in mine if run.get("foretold")]
        books = [run["books"] for run in mine if run["books"]]
        found[name] = {
            "seconds": spread([run["seconds"] for run in mine], 2),
            "step_seconds_before": round(statistics.mean(early), 3) if early else None,
            "step_seconds_after": round(statistics.mean(late), 3) if late else None,
            "moves": len(between),
            "lent": len(moves) - len(between),
            "expected_by_measured": spread(ratios, 3) if ratios else None,
            "foretold_by_measured": spread([one["expected_by_measured"] for one in foretold], 3) if foretold else None,
            "foretold_off": spread([one["off"] for one in foretold], 3) if foretold else None,
            "largest_error_of_books": max((one["largest_error"] for one in books), default=None),
        }
    return found


def runs_before(file: Path, law: dict[str, Any]) -> list[dict[str, Any]]:
    """Of an earlier call. Raises SystemExit for those of another law."""
    if not file.is_file():
        return []
    found = json.loads(file.read_text())
    if found["law"] != law:
        raise SystemExit(f"{file} has runs of another law; name another file")
    runs: list[dict[str, Any]] = found["runs"]
    return runs


def beside_the_best(policies: dict[str, Any]) -> dict[str, Any]:
    """How the others' seconds are to those of the best static split, in hindsight."""
    static = {name: row["seconds"]["median"] for name, row in policies.items() if name.startswith("static")}
    if not static:
        return {}
    best = min(static, key=static.__getitem__)
    ratios = {name: round(row["seconds"]["median"] / static[best], 3) for name, row in policies.items()}
    return {"best_static": best, "seconds_by_best_static": ratios}


def measure_live(scene: Scene, arguments: argparse.Namespace, taken: Result) -> Result:
    """Every policy in each round; the order changes from round to round."""
    law = scene.law_of(arguments.steps, arguments.speedup)
    runs = runs_before(arguments.out, law) if arguments.add else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        scene.write(folder)
        (folder / "law.json").write_text(json.dumps(law))
        for number in range(arguments.pairs):
            order = arguments.policies if number % 2 == 0 else arguments.policies[::-1]
            for name in order:
                one = live_run(folder, scene, Choice(name), arguments.steps, arguments.speedup, arguments.limit)
                runs.append({"round": number, **one})
                print(f"round {number + 1}: {name:16} {one['seconds']:7.1f} s  {one['step_seconds']}", flush=True)
    result = taken | {
        "what": scene.what,
        "slots": scene.slots,
        "controllers": scene.nodes,
        "steps": arguments.steps,
        "groups": scene.groups,
        "samples": scene.samples,
        "rows": ROWS,
        "law": law,
        "policies": summed(runs, slow_at(arguments.steps)),
        "runs": runs,
        "load_after": round(os.getloadavg()[0], 2),
    }
    return result | beside_the_best(result["policies"])


def live_options(scene: Scene, parser: argparse.ArgumentParser) -> None:
    """Policies and sizes."""
    parser.add_argument(
        "--policies", nargs="+", default=[*scene.fixed, *scene.policies], help="in the order of the first round"
    )
    parser.add_argument("--steps", type=int, default=scene.steps)
    parser.add_argument("--speedup", type=float, default=scene.speedup, help="emulated seconds in a real one")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a run is given up")
    parser.add_argument("--add", action="store_true", help="to the runs that the file has already")


# Pairs on two real cores ----------------------------------------------------------------------------------------------

SPEC = EXAMPLES / "arithmetic" / "judge.yaml"
GOAL_RATIO = 0.97
PAIR_STEPS = 40
FIXED_PLANS = {
    "two ranks, a judge on each slot": ("train.ranks=2",),
    "one rank, a judge on each slot": ("train.ranks=1",),
    "two ranks, a judge on one slot": ("train.ranks=2", "judges.0.serving.replicas=1"),
    "one rank, a judge on one slot": ("train.ranks=1", "judges.0.serving.replicas=1"),
}
DYNAMIC = ("placement.policy=dynamic",)


def pair_run(*settings: str) -> dict[str, Any]:
    """One run. Raises SystemExit unless it succeeds with a clean audit."""
    run = finished_run(SPEC, f"flow.steps={PAIR_STEPS}", "eval.every=1000", *settings)
    return {
        "seconds": round(run.step_times[-1] - run.step_times[0], 3),
        "accuracy_after": run.summary["eval_accuracy_after"],
        "moves": run.move_lines,
    }


def measure_pairs(arguments: argparse.Namespace, taken: Result) -> Result:
    """Each fixed plan once, then alternating pairs with the best of them."""
    fixed = {}
    for name, settings in FIXED_PLANS.items():
        fixed[name] = pair_run(*settings)["seconds"]
        print(f"fixed, {name}: {fixed[name]:.1f} s", flush=True)
    best = min(fixed, key=lambda name: fixed[name])
    sides = ("fixed", lambda: pair_run(*FIXED_PLANS[best])), ("dynamic", lambda: pair_run(*DYNAMIC))
    pairs = alternating_pairs(arguments.pairs, *sides)
    return taken | {
        "what": f"dynamic placement against the best fixed plan: the judge example, {PAIR_STEPS} steps, two CPU slots, real engines and ranks",
        "goal_ratio": GOAL_RATIO,
        "fixed_seconds": fixed,
        "best_fixed": best,
        "ratio": spread([pair["fixed"]["seconds"] / pair["dynamic"]["seconds"] for pair in pairs]),
        "fixed_accuracy": spread([pair["fixed"]["accuracy_after"] for pair in pairs]),
        "dynamic_accuracy": spread([pair["dynamic"]["accuracy_after"] for pair in pairs]),
        "pairs": pairs,
    }


BENCHMARKS = (
    Benchmark(
        "placement-live",
        "placement_live",
        partial(measure_live, TEXTS),
        ("grpcio", "uvicorn"),
        3,
        partial(live_options, TEXTS),
    ),
    Benchmark(
        "placement-pictures",
        "placement_pictures",
        partial(measure_live, PICTURES),
        ("grpcio", "uvicorn", "diffusers"),
        5,
        partial(live_options, PICTURES),
    ),
    Benchmark("placement-pairs", "placement_pairs", measure_pairs, ("torch", "deepspeed"), 5),
)
