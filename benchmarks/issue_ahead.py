"""What `flow.issue_cap` buys and costs at staleness 0: steps of generation alone, in virtual time, by the ledger's own rules.

    make bench-issue        benchmarks/results/issue_ahead.json, and the table of docs/dynamic-sampling.md from it

A group takes as long as its longest response, whose length has a long tail (Pareto, shape 1.2, half below 36 tokens, cut at
3000). Engines make so many groups at once, each at full speed however many there are; what is issued beyond waits in the
order in which it was issued. Prompts are filtered by chance, the same ones and with the same lengths whatever the cap. When
a step's batch is sealed whatever is in flight is aborted and unsealed groups are thrown away, as controllers do at
staleness 0. Training and publishing take no time here.

Virtual, so the machine does not matter: the same seeds give the same figures everywhere.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from measured import RESULTS, ROOT, circumstances, spread, write
from page_form import renewed, table

from gcore.ledger import chain
from gcore.ledger.chain import Writer
from gcore.ledger.records import EndedRef, Head, Offer, OfferedGroup
from gcore.ledger.rules import StreamRules
from gcore.ledger.stream import AccountNow, NotYet, Offered, Short, choose, due
from gcore.prompts.cursor import shard_lengths
from gcore.types import PromptRef

PAGE = ROOT / "docs" / "dynamic-sampling.md"
MARK = "issue_ahead"
WRITER = Writer("a", "n")
QUOTA, STEPS, WARM_UP, SEEDS = 16, 30, 5, 5
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
        self.head: Head = chain.base(len(self.rules.shape.lengths), "w", WRITER).head

    def step(self) -> None:
        """Until the next batch is sealed."""
        groups: dict[PromptRef, OfferedGroup] = {}
        waiting: deque[PromptRef] = deque()
        running: list[tuple[float, float, PromptRef]] = []
        known: set[PromptRef] = set(self._outcomes)
        while True:
            offer = Offer(incarnation="a", groups=tuple(groups.values()), outcomes=tuple(self._outcomes.values()))
            offered = Offered.collect(self.rules, self.head, [offer])
            chosen = choose(self.rules, self.head, (), offered)
            assert not isinstance(chosen, Short)
            if isinstance(chosen, AccountNow):
                self.head = chain.accounted(self.head, chosen.outcomes, self.rules.shape, WRITER).head
                self._forget()
                continue
            if not isinstance(chosen, NotYet):
                break
            fresh = [ref for ref in due(self.rules, self.head, (), offered) if ref not in known]
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
        seal = chain.sealed(None, self.head, chosen, world_size=1, mini_batches=1, sealer="a")
        advance = chain.committed(self.head, chain.readied(seal), self.rules.shape, WRITER, keep_cursors=False)
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


def measure(filter_rate: float, cap: float, seats: int) -> dict[str, Any]:
    """Tokens of time a step takes, and the share of the generated tokens that was thrown away; one figure a seed."""
    times, wasted = [], []
    for seed in range(SEEDS):
        rules = StreamRules(shard_lengths(100_000, 64), window=256, quota=QUOTA, issue_cap=cap)
        generation = Generation(rules, filter_rate, seats, seed)
        for _ in range(WARM_UP):
            generation.step()
        began, made, used = generation.now, generation.made_tokens, generation.used_tokens
        for _ in range(STEPS):
            generation.step()
        times.append((generation.now - began) / STEPS)
        wasted.append(1 - (generation.used_tokens - used) / (generation.made_tokens - made))
    return {"time": spread(times, 1), "wasted": spread(wasted, 4)}


def rows(result: dict[str, Any]) -> str:
    """The page's table: per filter rate and seats, what each cap takes beside a cap of 1."""
    found = []
    for case in result["cases"]:
        base = case["caps"]["1.0"]["time"]["median"]
        row = [f"{case['filter_rate']:.0%}, {case['seats']}"]
        for cap in result["issue_caps"]:
            one = case["caps"][str(cap)]
            row.append(f"{one['time']['median'] / base:.2f} ({one['wasted']['median']:.0%})")
        found.append(row)
    return table(["filtered, groups made at once", *(f"cap {cap:g}" for cap in result["issue_caps"])], found)


def page(result: dict[str, Any], text: str) -> str:
    """The page with its table made anew."""
    return renewed(text, MARK, f"\n{rows(result)}\n", PAGE)


def main() -> None:
    """Measure, and write result and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="only make the page's table anew from the result there is")
    if parser.parse_args().page:
        result = json.loads((RESULTS / "issue_ahead.json").read_text())
    else:
        cases = [
            {
                "filter_rate": rate,
                "seats": name,
                "caps": {str(cap): measure(rate, cap, seats) for cap in CAPS},
            }
            for rate in FILTER_RATES
            for name, seats in SEATS.items()
        ]
        sizes = {"quota": QUOTA, "steps": STEPS, "seeds": SEEDS, "issue_caps": list(CAPS)}
        result = circumstances() | sizes | {"cases": cases}
        write("issue_ahead", result)
    if PAGE.exists():
        PAGE.write_text(page(result, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(rows(result))
    print(f"median of {result['seeds']} seeds: time of a step beside cap 1 (share of generated tokens thrown away)")


if __name__ == "__main__":
    main()
