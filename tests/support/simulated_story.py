"""The story of a seed of the simulated cluster: number of nodes, job, network quality, faults; and its outcome."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from simulated_blobs import SIDE, SIZE
from simulated_network import Weather
from simulated_pictures import WAYS, picture_requests

from gcore.config import JobSpec, parse_spec


@dataclass(frozen=True)
class Story:
    """The parameters of a seed. Times in seconds."""

    seed: int
    nodes: int = 3
    staleness: int = 0
    ranks: int | None = None
    prompts: int = 17
    steps: int | None = 8
    epochs: int | None = None
    filter_rate: float = 0.2
    weather: Weather = field(default_factory=Weather)
    hasty: float = 0.0
    """The share of looks at which a peer acts out of turn."""
    fault_every_s: float = 7.0
    faults_s: float = 90.0
    copies: int | None = None
    """On how many nodes something lies, where nodes share no folder; None: they share one."""
    faults: tuple[str, ...] = ()
    """Kinds; empty: all."""
    part: int | None = None
    """Groups from which on a part of a step is trained by itself; None: steps are not streamed."""
    quota: int = 3
    turns: bool = False
    """Whether engines and ranks take turns in the memory of their slots."""
    slots: int = 1
    """Of a node."""
    plans: bool = False
    """Whether controllers plan as in production (`simulated_planning`)."""
    goes_on: int = 0
    """How often the job, when it has succeeded, goes on to a higher goal."""
    changes: int = 0
    """How often the train backend is changed while the job runs."""
    pictures: bool = False
    """Whether prompts have pictures, whose blobs ranks fetch, and stores lose blobs."""
    shown: int = 0
    """How many pictures tools may return in a response, if prompts have pictures."""
    generates: str = ""
    """How the policy generates pictures, of which each sample has blobs (`simulated_pictures.WAYS`); empty: it writes texts."""
    room: float | None = None
    """How often the blobs of all steps at once fit into a node's blob store; None: it never fills."""

    @classmethod
    def of(cls, seed: int) -> Story:
        """The seed's."""
        chance = random.Random(f"story {seed}")
        by_epochs = chance.random() < 0.2
        weather = chance.choice(
            [
                Weather(),
                Weather(late=0.05, twice=0.02),
                Weather(late=0.1, lost=0.03, twice=0.05),
                Weather(typical_s=0.4, late=0.15, lateness_s=20.0, lost=0.05, twice=0.1),
            ]
        )
        return (
            cls(
                seed=seed,
                nodes=chance.choice([1, 2, 2, 3, 3, 4]),
                staleness=chance.choice([0, 0, 0, 1, 2]),
                ranks=chance.choice([None, 1, 2]),
                prompts=chance.choice([9, 17, 40]),
                steps=None if by_epochs else chance.choice([6, 9, 12]),
                epochs=1 if by_epochs else None,
                filter_rate=chance.choice([0.0, 0.2, 0.2, 0.6]),
                weather=weather,
                hasty=chance.choice([0.0, 0.0, 0.02, 0.2]),
                fault_every_s=chance.choice([3.0, 6.0, 12.0]),
                faults_s=chance.choice([40.0, 80.0]),
                goes_on=random.Random(f"goes on {seed}").choice([0, 0, 0, 1, 2]),
                changes=random.Random(f"changes {seed}").choice([0, 0, 0, 1, 3]),
                pictures=random.Random(f"pictures {seed}").choice([False, False, True]),
                shown=random.Random(f"shown {seed}").choice([0, 0, 1, 2]),
                room=random.Random(f"room {seed}").choice([None, None, 2.0, 1.0]),
            )
            .streamed(chance)
            .generating(random.Random(f"generates {seed}"))
        )

    def streamed(self, chance: random.Random) -> Story:
        """Every other story at staleness 0 with steps that come in parts."""
        if self.staleness or chance.random() < 0.5:
            return self
        return replace(self, part=chance.choice([1, 1, 2]), quota=chance.choice([3, 3, 5]))

    def generating(self, chance: random.Random) -> Story:
        """Every third story without pictures in prompts with a policy that generates some."""
        way = chance.choice(["", "", "", "", "", "", "", "", *WAYS])
        if self.pictures or not way:
            return self
        # Losses that need only finished pictures compare with the network that generated them.
        return replace(self, generates="share" if way == "forward" and (self.staleness or self.part) else way)

    @property
    def has_blobs(self) -> bool:
        """Whether prompts or responses have blobs, which ranks fetch."""
        return self.pictures or bool(self.generates)

    @property
    def blob_bytes(self) -> int:
        """The bound of each blob store."""
        if self.room is None:
            return 1 << 40
        groups = self.quota * (self.staleness + 1 + (self.staleness > 0))  # as `check_blob_room` counts them
        requests = picture_requests(self.spec)
        each = SIZE + self.spec.tool_picture_bytes if requests is None else requests.group_bytes
        return int(self.room * groups * each)

    @property
    def spec(self) -> JobSpec:
        """The job's."""
        length: dict[str, Any] = {"steps": self.steps} if self.steps is not None else {"epochs": self.epochs}
        if self.steps is None:
            length["count"] = "prompts"
        shows: dict[str, Any] = {}
        if self.pictures and self.shown:
            tools = {"max_pictures": self.shown, "max_pixels": SIDE**2}
            shows["environment"] = {"name": "showing", "options": {"pictures": self.shown}, "tools": tools}
        way = WAYS.get(self.generates, {})
        return parse_spec(
            {
                "name": "simulated",
                "model": {"path": "m"},
                "data": {"path": "d", "shards": 4, "window": 4} | ({"images": "images"} if self.pictures else {}),
                "flow": {"groups_per_step": self.quota, "samples_per_prompt": 2, "max_reissues": 50, **length},
                "rollout": {
                    "staleness": self.staleness,
                    "timeout_s": 20,
                    "batch_slots": 1,
                    **({"engine": "diffusers", **way["rollout"]} if way else {"max_new_tokens": 16}),
                },
                "train": {
                    "ranks": min(self.ranks or self.nodes, self.nodes),
                    "mini_batches": 1 if self.part else 2,
                    "stream": self.part is not None,
                    "stream_min": self.part,
                    "old_logprobs": "engine",
                    "copies_gb": 0,
                    **({"clip_low": 1e-4, "clip_high": 1e-4, "diffusion": {"adv_std": "group"}} if way else {}),
                    **way.get("train", {}),
                },
                "checkpoint": {"every": 2, "keep": 2},
                "storage": {"copies": self.copies},
                "placement": {"memory": "in_turns"} if self.turns else {},
                "reward": {"name": "of_pictures" if way else "exact"},
                **shows,
            }
        )


@dataclass
class Ended:
    """How a story ended. `wrong`: what must not have happened, or nothing. `why`: the same with what led to it."""

    story: Story
    history: list[str]
    wrong: str = ""
    steps: int = 0
    lineages: int = 0
    seconds: float = 0.0
    revisions: int = 0
    faults: int = 0

    @property
    def why(self) -> str:
        """For people."""
        again = f"again: make sim FIRST={self.story.seed} SEEDS=1"
        return "\n".join(
            [f"seed {self.story.seed}: {self.wrong}", str(self.story), *self.history[-120:], self.wrong, again]
        )
