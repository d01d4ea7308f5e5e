"""Stories for the simulated cluster with changing placement: one arbitrary move a step, or production's planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulated_story import Story

from controllers.planning.planner import Planner
from gcore.config import JobSpec, parse_spec
from gcore.config.placement import PlacementSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import Move, MoveKind, Moves, Plan
from placement.assign import split_of
from placement.moves import MoveProposal, split_part
from placement.slots import Split

JUDGE = {
    "name": "tutor",
    "model": {"path": "m"},
    "template": "{{ prompt }}{{ response }}",
    "max_new_tokens": 8,
    "verdict": {"parser": "number"},
}


@dataclass(frozen=True)
class Moving(Story):
    """A story whose slots move. `propose_moves` must be in force."""

    @property
    def spec(self) -> JobSpec:
        """The same job, with as many ranks as a policy wants."""
        spec = super().spec
        train = spec.train.model_copy(update={"ranks": None})
        return spec.model_copy(update={"placement": PlacementSpec(policy="dynamic"), "train": train})


def moving(seed: int) -> Moving:
    """The seed's story, moving."""
    told = vars(Story.of(seed))
    return Moving(**{**told, "nodes": max(told["nodes"], 2), "part": None})


def propose_moves(patch: Any) -> None:
    """Make the leader request one move a step, instead of asking a policy. `patch`: pytest's MonkeyPatch."""

    async def turn(planner: Any) -> None:
        planner._last_state = planner._state()
        planner._propose(*next_move(planner._job.mirror, planner._job.me))

    patch.setattr(Planner, "_turn", turn)


def next_move(mirror: JobMirror, me: str) -> tuple[MoveProposal | None, Moves | None]:
    """The leader's next proposal: one move a step."""
    leader, head, stored = mirror.leader, mirror.head, mirror.plan
    if leader is None or leader.record.incarnation != me or head is None or stored is None or head.record.step == 0:
        return None, None
    newest, plan = mirror.moves.newest, stored.record
    if newest is not None and newest.step == head.record.step:
        return None, None
    if head.record.step % 2 == 0:
        return _another_world(plan, head.record.step, head.record.seq), None
    return _another_sleeper(plan, head.record.step, head.record.seq), None


def _another_world(plan: Plan, step: int, seq: int) -> MoveProposal:
    now = split_of(plan)
    nodes = len({*(p.node for p in plan.engines), *(p.node for p in plan.ranks)})
    together = Split("colocated", nodes, 0, nodes)
    apart = Split("coexisting", nodes - 1, 0, 1)
    return MoveProposal(
        _move(plan, MoveKind.WORLD, now, apart if now.mode == "colocated" else together, step, seq, "wanted"), None
    )


def _another_sleeper(plan: Plan, step: int, seq: int) -> MoveProposal | None:
    engines = sorted(plan.engines, key=lambda place: place.node)
    if len(engines) < 2:
        return None
    sleeper = engines[step // 2 % len(engines)]
    changed = tuple(place.model_copy(update={"asleep": place == sleeper}) for place in engines)
    after = plan.model_copy(update={"generation": plan.generation + 1, "engines": changed})
    return MoveProposal(_move(plan, MoveKind.LEND, split_of(plan), split_of(after), step, seq, "done"), after)


def _move(plan: Plan, kind: MoveKind, before: Split, after: Split, step: int, seq: int, state: str) -> Move:
    fields: Mapping[str, Any] = {
        "before": split_part(before),
        "after": split_part(after),
        "time": float(seq),
        "state": state,
    }
    return Move.model_validate({"generation": plan.generation + 1, "step": step, "seq": seq, "kind": kind, **fields})


@dataclass(frozen=True)
class Planning(Story):
    """A story with a judge, whose slots are planned. There is a checkpoint after each step, so that another world may be formed at once."""

    plans: bool = True
    slots: int = 3

    @property
    def spec(self) -> JobSpec:
        """The same job, with a judge and a policy."""
        tree: dict[str, Any] = super().spec.model_dump(mode="json", exclude_unset=True)
        tree["train"].pop("ranks")
        tree["rollout"].pop("batch_slots")  # an engine that runs one request at once is never one too many
        placement = {"policy": "dynamic", "train": 1, "reward": 1, "lend": True}
        more = {"judges": [JUDGE], "reward": {"judge": "tutor"}, "placement": placement, "checkpoint": {"every": 1}}
        return parse_spec(tree | more)


def planning(seed: int) -> Planning:
    """The seed's story, planned."""
    told = vars(Story.of(seed))
    return Planning(**{**told, "nodes": max(told["nodes"], 2), "part": None, "plans": True, "slots": 3})
