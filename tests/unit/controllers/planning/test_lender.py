"""Loans that the estimate forbids: after a while one is made, and its cost is measured.

A controller's report about its engines, and the planner's summary of all reports.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_views import place, placed

from controllers.planning.lender import (
    STALE_S,
    WAKE_PRIOR_S,
    WAKES_AS,
    WORTH_KNOWING,
    ForgoneGain,
    LoadPoller,
    is_unmeasured,
    own_loads,
)
from controllers.rules.view import EngineView
from gcore.api.v1 import placement_pb2 as pb
from gcore.api.v1 import placement_pb2_grpc
from gcore.ledger.records.job import Move, MoveKind, MoveOutcome, Moves, NodeRecord, SplitPart
from gcore.testing import FakeClock
from gcore.types import Version
from placement.moves import MoveProposal, switch_costs

BEFORE, AFTER = (
    SplitPart(mode="coexisting", rollout=6, reward=1, train=1),
    SplitPart(mode="coexisting", rollout=4, reward=3, train=1),
)


def loan(gain_s: float, **more: object) -> MoveProposal:
    move = Move(
        generation=2, step=1, kind=MoveKind.LEND, before=BEFORE, after=AFTER, reason="they had much", gain_s=gain_s
    )
    return MoveProposal(move.model_copy(update=more), None)


def test_forbidden_loan_is_made_once_its_missed_gain_equals_the_guess() -> None:
    forgone = ForgoneGain()
    assert forgone.weighed(loan(3.0), 1, 10.0) is None
    assert forgone.weighed(loan(4.0), 1, 10.0) is None, "of a step the best counts, and not each look at it"
    assert forgone.weighed(None, 2, 10.0) is None
    assert forgone.weighed(loan(4.0), 3, 10.0) is None
    made = forgone.weighed(loan(2.0), 4, 10.0)
    assert made is not None
    assert made.move.cost_s == 10.0
    assert made.move.reason == f"they had much; {WORTH_KNOWING}"


def test_measured_move_time_replaces_a_higher_guess_of_a_node() -> None:
    """A node whose controller was started again has seen no engine wake: it guessed for as long as nothing was lent."""
    begun = Moves().plus(loan(0.0, kind=MoveKind.BEGIN, outcome=MoveOutcome(took_s=0.1)).move)
    assert switch_costs(begun, None, 30.0).move_s == 30.0, "of none is it known what it took"
    moved = begun.plus(loan(1.0, outcome=MoveOutcome(took_s=0.9)).move)
    assert switch_costs(moved, None, 30.0).move_s == 0.9
    assert switch_costs(moved, None, 0.3).move_s == 0.3


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 50)), max_size=30), st.floats(0.1, 100))
def test_nothing_is_lent_before_as_much_was_given_away(looks: list[tuple[int, float]], guess_s: float) -> None:
    forgone, best = ForgoneGain(), {}
    for step, gain in looks:
        best[step] = max(best.get(step, 0.0), gain)
        made = forgone.weighed(loan(gain), step, guess_s)
        assert (made is not None) == (sum(best.values()) >= guess_s)


def test_cost_of_a_change_is_unmeasured_until_an_engine_has_changed_over() -> None:
    begun, took = Moves().plus(loan(0.0, kind=MoveKind.BEGIN).move), MoveOutcome(took_s=0.9)
    assert is_unmeasured(Moves(), {})
    assert is_unmeasured(begun, {1: 0.0})
    assert is_unmeasured(begun.plus(loan(1.0, state="would").move), {2: 0.9})
    assert is_unmeasured(begun.plus(loan(1.0, kind=MoveKind.WORLD, outcome=took).move), {}), "a world is another thing"
    for kind in (MoveKind.SPLIT, MoveKind.LEND, MoveKind.RETURN):
        made = begun.plus(loan(1.0, kind=kind).move)
        assert is_unmeasured(made, {}), "who measured it was killed before it was told: nothing else would ever be lent"
        assert not is_unmeasured(made, {2: 0.9}), "it is about to be told"
        assert not is_unmeasured(begun.plus(loan(1.0, kind=kind, outcome=took).move), {})


class Book:
    """Engines that say what they have to do."""

    def __init__(
        self,
        loads: dict[str, tuple[int, int]],
        slept: float | None = None,
        woke: float | None = None,
        pool: str = "rollout",
    ) -> None:
        self.told, self.slept_s, self.woke_s, self.pool = loads, slept, woke, pool
        self.beside_policy = False

    async def loads(self, instances: Collection[str]) -> dict[str, tuple[int, int]]:
        return {name: load for name, load in self.told.items() if name in instances}

    def unseated(self) -> int:
        return 3

    def foreseen(self) -> tuple[float, int]:
        return 70.0, 5


def view_of() -> Any:
    ready = EngineView("policy_cpu1", "h:1", Version(0, 0))
    resting = EngineView("j_cpu1", "h:1", None, asleep=True)
    return placed(place("cpu:1"), place("cpu:1", "j", asleep=True), policy_cpu1=ready, j_cpu1=resting)


async def test_a_controller_tells_what_its_engines_have_to_do_and_who_sleeps() -> None:
    pools = {"": Book({"policy_cpu1": (4, 2)}), "j": Book({"j_cpu1": (0, 0)}, pool="reward")}
    reply = await own_loads(view_of(), pools)  # type: ignore[arg-type]
    told = {engine.judge: engine for engine in reply.engines}
    assert (told[""].running, told[""].waiting, told[""].ready, told[""].asleep) == (4, 2, True, False)
    assert (told["j"].ready, told["j"].asleep) == (False, True)
    assert dict(reply.unseated) == {"rollout": 3, "reward": 3}
    assert (reply.left_tokens, reply.foreseen) == (70.0, 5)
    assert reply.change_s == 0


async def test_questions_to_a_judge_that_is_an_adapter_wait_for_rollout_engines() -> None:
    judge = Book({"policy_cpu1": (0, 0)}, pool="reward")
    judge.beside_policy = True
    reply = await own_loads(view_of(), {"": Book({"policy_cpu1": (4, 2)}), "j": judge})  # type: ignore[arg-type]
    assert dict(reply.unseated) == {"rollout": 6, "reward": 0}
    assert [(engine.running, engine.waiting) for engine in reply.engines] == [(4, 2)]


@pytest.mark.parametrize(
    ("slept", "woke", "change"),
    [
        pytest.param(0.5, 2.0, 2.5, id="both were measured"),
        pytest.param(0.5, None, 0.5 + WAKES_AS * 0.5 + WAKE_PRIOR_S, id="nothing has woken yet"),
        pytest.param(None, None, 0.0, id="nothing is known"),
    ],
)
async def test_cost_of_a_change_is_that_of_the_slowest_engine(
    slept: float | None, woke: float | None, change: float
) -> None:
    engines, judges = Book({}, None if slept is None else slept / 2, woke), Book({}, slept, woke, "reward")
    reply = await own_loads(view_of(), {"": engines, "j": judges})  # type: ignore[arg-type]
    assert reply.change_s == pytest.approx(change)


class Peer(placement_pb2_grpc.PlacementServicer):
    def __init__(self, reply: pb.LoadsReply) -> None:
        self.reply = reply

    async def Loads(self, request: pb.LoadsRequest, context: Any) -> pb.LoadsReply:
        if request.job_uid != "u":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such job")
        return self.reply


async def test_all_answers_are_put_together_and_who_does_not_answer_tells_nothing() -> None:
    servers, nodes = [], {}
    for number in range(2):
        reply = pb.LoadsReply(
            unseated={"rollout": number + 1}, change_s=float(number), left_tokens=30.0 + number, foreseen=2
        )
        reply.engines.add(node=f"n{number}", slot="cpu:0", running=number, ready=True)
        server = grpc.aio.server()
        placement_pb2_grpc.add_PlacementServicer_to_server(Peer(reply), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        name = f"n{number}"
        nodes[name] = NodeRecord(name=name, incarnation="x", address=f"127.0.0.1:{port}", slots=("cpu:0",), pid=1)
    nodes["gone"] = nodes["n0"].model_copy(update={"address": "127.0.0.1:1"})
    clock = FakeClock()
    polling = LoadPoller("u", clock)
    try:
        loads = await polling.loads(nodes)
        assert sorted(one.node for one in loads.engines) == ["n0", "n1"]
        assert (loads.left_tokens, loads.foreseen) == (61.0, 4)
        assert (loads.unseated["rollout"], loads.owed("rollout"), polling.change_s) == (3, 4, 1.0)
        other = LoadPoller("other", clock)
        assert (await other.loads(nodes)).engines == ()
        await servers[1].stop(None)
        assert len((await polling.loads(nodes)).engines) == 2, "what was told last counts for a while"
        await clock.advance(STALE_S)
        assert [one.node for one in (await polling.loads(nodes)).engines] == ["n0"]
        await other.close()
    finally:
        await polling.close()
        for server in servers:
            await server.stop(None)
