"""What rollouts gain by issuing ahead, by running ahead of training, and by training steps in parts.

**Issue ahead** (`issue`): what `flow.issue_cap` gains and costs at staleness 0: steps of generation alone, in virtual time, by the
ledger's own rules. A group takes as long as its longest response, whose length has a long tail (Pareto, shape 1.2, half below 36 tokens,
cut at 3000). Engines make so many groups at once, each at full speed however many there are; what is issued beyond waits in the order
in which it was issued. Prompts are filtered by chance, the same ones and with the same lengths whatever the cap. When a step's
batch is sealed whatever is in flight is aborted and unsealed groups are thrown away, as controllers do at staleness 0. Training and
publishing take no time here. The machine does not matter: the same seeds give the same figures everywhere.

**Asynchrony** (`async`): the same job with `rollout.staleness` 0 and 2, each pool on a slot of its own (`placement.policy: static`), so
that nothing but the waiting differs. Of each run the seconds from the first step's commit to the last one's, and the accuracy at
the end; of a pair their ratio. Real engines and ranks, on two CPU cores.

**Stream** (`stream`): the same job with `train.stream` on and off, one slot that rolls out and one that trains, and the same responses.
Devices are emulated: lengths are drawn from a log-normal law with a long tail (the longest of a step is about sixteen times the median), and
generation takes about four times as long as training, as is reported of large models. Controllers, etcd, RPC, seals, exchanges and
receipts are real, and cost what they do on this machine; as emulated time runs faster than real time, they weigh more than they would. Of
each run the seconds of a step, from commit to commit, in emulated time; of a pair their ratio.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import tempfile
from collections import deque
from dataclasses import dataclass, field
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
from gcore.data.order import shard_lengths
from gcore.engines.emulated.launch import LAW_FILE
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import EndedRef, Head, Offer, OfferedGroup
from gcore.ledger.selection import AwaitGroups, CloseStep, DataExhausted, OffersView, StreamRules, choose_seal, due_refs
from gcore.testing.models import make_tiny_model
from gcore.types import PromptRef

# Issue ahead ----------------------------------------------------------------------------------------------------------

WRITER = ChainWriter("a", "n")
QUOTA, ISSUE_STEPS, WARM_UP, SEEDS = 16, 30, 5, 5
FILTER_RATES = (0.0, 0.3, 0.5, 0.7, 0.9)
CAPS = (1.0, 2.0, 4.0)
SEATS = {"as many as the quota": QUOTA, "any number": 10**9}
"""Groups that the engines make at once."""


def long_tailed(chance: random.Random) -> int:
    """A group's longest response, in tokens."""
    return min(int(20 * chance.paretovariate(1.2)), 3000)


@dataclass
class Generation:
    """A job's steps, of which only generation takes time."""

    rules: StreamRules
    filter_rate: float
    seats: int
    seed: int
    now: float = 0.0
    made_tokens: float = 0.0
    """Generated, with what was aborted on the way."""
    used_tokens: float = 0.0
    """Of groups that were trained or filtered."""
    _outcomes: dict[PromptRef, EndedRef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head: Head = chain.base_entry(len(self.rules.shape.lengths), "w", WRITER).head

    def step(self) -> None:
        """Until the next batch is sealed."""
        groups: dict[PromptRef, OfferedGroup] = {}
        waiting: deque[PromptRef] = deque()
        running: list[tuple[float, float, PromptRef]] = []
        known: set[PromptRef] = set(self._outcomes)
        while True:
            offer = Offer(incarnation="a", groups=tuple(groups.values()), outcomes=tuple(self._outcomes.values()))
            offered = OffersView.collect(self.rules, self.head, [offer])
            chosen = choose_seal(self.rules, self.head, (), offered)
            assert not isinstance(chosen, DataExhausted)
            if isinstance(chosen, CloseStep):
                self.head = chain.account_entry(self.head, chosen.outcomes, self.rules.shape, WRITER).head
                self._forget()
                continue
            if not isinstance(chosen, AwaitGroups):
                break
            fresh = [ref for ref in due_refs(self.rules, self.head, (), offered) if ref not in known]
            waiting.extend(fresh)
            known |= {*fresh}
            while waiting and len(running) < self.seats:
                ref = waiting.popleft()
                length = long_tailed(random.Random(f"{self.seed} {ref} {self.head.step}"))
                heapq.heappush(running, (self.now + length, self.now, ref))
            self.now, began, ref = heapq.heappop(running)
            self.made_tokens += self.now - began
            self._finish(ref, int(self.now - began), groups)
        self.made_tokens += sum(self.now - began for _, began, _ in running)
        self.used_tokens += sum(group.response_tokens[0] for group in chosen.groups)
        seal = chain.seal_slot(None, self.head, chosen, world_size=1, mini_batches=1, sealer="a")
        advance = chain.commit_entry(self.head, chain.ready_slot(seal), self.rules.shape, WRITER, keep_cursors=False)
        self.head = advance.head
        self._forget()

    def _finish(self, ref: PromptRef, length: int, groups: dict[PromptRef, OfferedGroup]) -> None:
        if random.Random(f"{self.seed} {ref}").random() < self.filter_rate:
            self._outcomes[ref] = EndedRef(ref=ref, kind="filtered", versions=(self.head.version,))
            self.used_tokens += length
        else:
            versions = (self.head.version,)
            one = OfferedGroup(ref=ref, digest=str(ref), prompt_tokens=1, response_tokens=(length,), versions=versions)
            groups[ref] = one

    def _forget(self) -> None:
        ended = [ref for ref in self._outcomes if self.head.cursors.is_terminal(self.rules.shape, ref)]
        for ref in ended:
            del self._outcomes[ref]


def issue_case(filter_rate: float, cap: float, seats: int) -> dict[str, Any]:
    """Tokens of time a step takes, and the share of the generated tokens that was thrown away; one figure a seed."""
    times, wasted = [], []
    for seed in range(SEEDS):
        rules = StreamRules(shard_lengths(100_000, 64), window=256, quota=QUOTA, issue_cap=cap)
        generation = Generation(rules, filter_rate, seats, seed)
        for _ in range(WARM_UP):
            generation.step()
        began, made, used = generation.now, generation.made_tokens, generation.used_tokens
        for _ in range(ISSUE_STEPS):
            generation.step()
        times.append((generation.now - began) / ISSUE_STEPS)
        wasted.append(1 - (generation.used_tokens - used) / (generation.made_tokens - made))
    return {"time": spread(times, 1), "wasted": spread(wasted, 4)}


def measure_issue(_: argparse.Namespace, taken: Result) -> Result:
    """Every filter rate, number of seats and cap."""
    cases = [
        {
            "filter_rate": rate,
            "seats": name,
            "caps": {str(cap): issue_case(rate, cap, seats) for cap in CAPS},
        }
        for rate in FILTER_RATES
        for name, seats in SEATS.items()
    ]
    sizes = {"quota": QUOTA, "steps": ISSUE_STEPS, "seeds": SEEDS, "issue_caps": list(CAPS)}
    return taken | sizes | {"cases": cases}


# Asynchrony -----------------------------------------------------------------------------------------------------------

SPEC = EXAMPLES / "arithmetic" / "grpo.yaml"
ASYNC_STEPS = 40
STALENESS = 2
SHARED = ("placement={policy: static, train: 1}", f"flow.steps={ASYNC_STEPS}", "eval.every=1000")
AHEAD = (f"rollout.staleness={STALENESS}", "rollout.correction=tis")


def async_run(*settings: str) -> dict[str, Any]:
    """One run. Raises SystemExit unless it succeeds with a clean audit."""
    run = finished_run(SPEC, *SHARED, *settings, controllers=1)
    return {
        "seconds": run.step_times[-1] - run.step_times[0],
        "step_seconds": [round(one, 3) for one in run.step_seconds],
        "accuracy_after": run.summary["eval_accuracy_after"],
        "staleness": [round(one.get("staleness", 0.0), 3) for one in run.stats],
        "wait_for_batch_s": round(sum(one.get("wait_for_batch_s", 0.0) for one in run.stats), 3),
        "wait_for_weights_s": round(sum(one.get("wait_for_weights_s", 0.0) for one in run.stats), 3),
    }


def measure_async(arguments: argparse.Namespace, taken: Result) -> Result:
    """Alternating pairs."""
    pairs = alternating_pairs(arguments.pairs, ("strict", async_run), ("ahead", lambda: async_run(*AHEAD)))
    return taken | {
        "what": f"staleness {STALENESS} against 0: GRPO on sums, {ASYNC_STEPS} steps, one slot rolls out and one trains",
        "ratio": spread([pair["strict"]["seconds"] / pair["ahead"]["seconds"] for pair in pairs]),
        "strict_accuracy": spread([pair["strict"]["accuracy_after"] for pair in pairs]),
        "ahead_accuracy": spread([pair["ahead"]["accuracy_after"] for pair in pairs]),
        "pairs": pairs,
    }


# Steps in parts -------------------------------------------------------------------------------------------------------

STREAM_STEPS, GROUPS, SAMPLES, LONGEST = 7, 32, 8, 600
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


def stream_run(folder: Path, *, stream: bool) -> dict[str, Any]:
    """One run. Raises SystemExit unless it succeeds with a clean audit."""
    name = STREAMED if stream else WHOLE
    job = {
        "name": "long-tail",  # of both: what is drawn follows from the name, so that every response is as long in both
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "shards": 16},
        "flow": {"steps": STREAM_STEPS, "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": LONGEST},
        "train": {"stream": stream},
        "placement": {"policy": "static", "train": 1},
        "checkpoint": {"every": 1000},
    }
    file = write_spec(folder / f"{name}.yaml", job)
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


def measure_stream(arguments: argparse.Namespace, taken: Result) -> Result:
    """Alternating pairs."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_tiny_model(folder / "model", seed=1)
        write_sums(folder / "train.jsonl", range(20), range(20))
        (folder / "law.json").write_text(json.dumps(LAW))
        sides = (WHOLE, lambda: stream_run(folder, stream=False)), (STREAMED, lambda: stream_run(folder, stream=True))
        pairs = alternating_pairs(arguments.pairs, *sides)
    what = f"one slot rolls out, one trains; {STREAM_STEPS - 1} steps of {GROUPS} x {SAMPLES}"
    return taken | {
        "what": f"train.stream on and off, emulated devices: {what}",
        "law": LAW,
        "ratio": spread([pair[WHOLE]["seconds"] / pair[STREAMED]["seconds"] for pair in pairs]),
        "whole_step_seconds": spread([one for pair in pairs for one in pair[WHOLE]["step_seconds"]], 2),
        "streamed_step_seconds": spread([one for pair in pairs for one in pair[STREAMED]["step_seconds"]], 2),
        "parts": spread([float(one) for pair in pairs for one in pair[STREAMED]["parts"]], 1),
        "pairs": pairs,
    }


BENCHMARKS = (
    Benchmark("issue", "issue_ahead", measure_issue),
    Benchmark("async", "asynchrony", measure_async, ("torch", "deepspeed"), 5),
    Benchmark("stream", "stream", measure_stream, ("grpcio",), 5),
)
