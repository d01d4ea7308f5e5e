"""The distribution of slots among several jobs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gcore.ledger.records.cluster import Claim, QueuePosition, Share, Shares, group_by_node, slots_of_share
from placement.shares import ClusterSlots, divide_slots, explain_surplus, queue_jobs


def nodes(**slots: int) -> dict[str, tuple[str, ...]]:
    return {name: tuple(f"cpu:{number}" for number in range(count)) for name, count in slots.items()}


def settled(cluster: ClusterSlots, claims: Mapping[str, Claim], shares: Shares | None = None) -> Shares:
    """After all that is asked back was given back."""
    shares = shares or Shares()
    for _ in range(20):
        found = divide_slots(cluster, claims, shares)
        for uid, share in list(found.jobs.items()):
            found = found.released(uid, share.surplus)
        if found == shares:
            return found
        shares = found
    raise AssertionError("it never comes to rest")


def counts(shares: Shares) -> dict[str, int]:
    return {uid: len(slots_of_share(share.granted)) for uid, share in shares.jobs.items()}


def test_a_job_alone_has_all_slots() -> None:
    cluster = ClusterSlots(nodes(a=2, b=3))
    shares = divide_slots(cluster, {"one": Claim()}, Shares())
    assert shares.jobs["one"].granted == cluster.nodes
    assert divide_slots(cluster, {"one": Claim()}, shares) is shares


def test_two_equals_have_half_each_and_the_older_the_odd_one() -> None:
    claims = {"b": Claim(created=1.0), "a": Claim(created=2.0)}
    assert counts(settled(ClusterSlots(nodes(n=2, m=3)), claims)) == {"b": 3, "a": 2}


def test_slots_in_use_go_to_no_other_job() -> None:
    cluster = ClusterSlots(nodes(n=4))
    alone = divide_slots(cluster, {"one": Claim()}, Shares())
    both = divide_slots(cluster, {"one": Claim(), "two": Claim(created=9.0)}, alone)
    assert counts(both) == {"one": 2}
    assert len(both.jobs["one"].surplus) == 2
    given_back = both.released("one", both.jobs["one"].surplus)
    assert counts(divide_slots(cluster, {"one": Claim(), "two": Claim(created=9.0)}, given_back)) == {
        "one": 2,
        "two": 2,
    }


def test_a_job_of_a_higher_priority_takes_what_it_needs_and_the_lower_has_the_rest() -> None:
    cluster = ClusterSlots(nodes(n=4))
    low = {"low": Claim()}
    before = settled(cluster, low)
    claims = {**low, "high": Claim(priority=5, least=3, created=9.0)}
    assert counts(settled(cluster, claims, before)) == {"high": 3, "low": 1}
    claims = {**low, "high": Claim(priority=5, least=4, created=9.0)}
    after = settled(cluster, claims, before)
    assert counts(after) == {"high": 4}
    assert queue_jobs(cluster, claims, after) == {
        "low": QueuePosition(1, "it needs 1 slot, and other jobs use 4 of 4 slots")
    }


def test_jobs_of_equal_priority_do_not_preempt_each_other() -> None:
    cluster = ClusterSlots(nodes(n=2))
    before = settled(cluster, {"runs": Claim(least=2, created=5.0)})
    claims = {"runs": Claim(least=2, created=5.0), "older": Claim(least=2, created=1.0)}
    assert counts(settled(cluster, claims, before)) == {"runs": 2}


def test_a_namespace_has_no_more_than_its_quota() -> None:
    cluster = ClusterSlots(nodes(n=8), quotas={"small": 2})
    claims = {
        "a": Claim(namespace="small"),
        "b": Claim(namespace="small", created=1.0, least=2),
        "c": Claim(created=2.0),
    }
    shares = settled(cluster, claims)
    assert counts(shares) == {"a": 2, "c": 6}
    assert (
        queue_jobs(cluster, claims, shares)["b"].reason
        == "it needs 2 slots, but namespace 'small' has a quota of 2 and uses 2"
    )


def test_namespaces_share_alike_and_not_their_jobs() -> None:
    claims = {
        "a": Claim(namespace="x"),
        "b": Claim(namespace="y"),
        "c": Claim(namespace="y"),
        "d": Claim(namespace="y"),
    }
    assert counts(settled(ClusterSlots(nodes(n=12)), claims)) == {"a": 6, "b": 2, "c": 2, "d": 2}


def test_a_paused_job_has_none_and_goes_on_where_it_was() -> None:
    cluster = ClusterSlots(nodes(n=2, m=2))
    before = settled(cluster, {"one": Claim(), "two": Claim(created=1.0)})
    paused = settled(cluster, {"one": Claim(paused=True), "two": Claim(created=1.0)}, before)
    assert counts(paused) == {"two": 4}
    assert queue_jobs(cluster, {"one": Claim(paused=True), "two": Claim(created=1.0)}, paused) == {}
    assert counts(settled(cluster, {"one": Claim(), "two": Claim(created=1.0)}, paused)) == {"one": 2, "two": 2}


def test_a_drained_nodes_slots_are_given_back_and_others_found() -> None:
    cluster = ClusterSlots(nodes(n=2, m=2))
    claims = {"one": Claim(most=2)}
    (node,) = settled(cluster, claims).jobs["one"].granted
    out = slots_of_share({node: cluster.nodes[node]})
    after = divide_slots(ClusterSlots(cluster.nodes, out), claims, settled(cluster, claims))
    assert set(after.jobs["one"].granted) == {"n", "m"} - {node}
    assert after.jobs["one"].surplus == out


def given_up(cluster: ClusterSlots, claims: Mapping[str, Claim], drained: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Why job `one`, which had every slot, gives some back."""
    before = settled(ClusterSlots(cluster.nodes), {"one": Claim()})
    after = divide_slots(cluster, claims, before)
    return explain_surplus(cluster, claims, after, "one", drained)


def test_the_reason_for_giving_slots_back_names_the_job_the_node_or_the_limit() -> None:
    cluster, one = ClusterSlots(nodes(n=2, m=2)), Claim()
    urgent = {"one": one, "two": Claim(least=3, most=3, priority=1, created=1.0)}
    assert given_up(cluster, urgent) == ("3 slots go to job two",)
    stranger = {"one": one, "two": Claim(least=1, most=1, namespace="other", priority=1, created=1.0)}
    assert given_up(cluster, stranger) == ("1 slot goes to a job of another namespace",)
    out = ClusterSlots(cluster.nodes, slots_of_share({"n": ["cpu:0", "cpu:1"], "m": ["cpu:0"]}))
    assert given_up(out, {"one": one}, ("n",)) == (
        "2 slots are on a draining node: n",
        "1 slot is on a node where it is unhealthy: m",
    )
    assert given_up(cluster, {"one": Claim(most=3)}) == ("it may use at most 3 slots",)
    assert given_up(cluster, {"one": Claim(paused=True)}) == ()
    assert given_up(cluster, {"one": one}) == ()


def test_the_reason_for_giving_slots_back_names_a_node_that_other_slots_replace() -> None:
    cluster, claims = ClusterSlots(nodes(m=2, o=2)), {"one": Claim(most=4)}
    before = settled(ClusterSlots(nodes(n=2, m=2)), claims)
    after = divide_slots(cluster, claims, before)
    assert explain_surplus(cluster, claims, after, "one", ()) == ("2 slots are on a node that is gone: n",)


def test_the_slots_of_a_node_that_is_away_stay_its_jobs() -> None:
    cluster = ClusterSlots(nodes(n=2, m=2))
    before = settled(cluster, {"one": Claim()})
    away = divide_slots(ClusterSlots(nodes(n=2)), {"one": Claim(), "two": Claim(created=1.0)}, before)
    assert away.jobs["one"].granted["m"] == ("cpu:0", "cpu:1")
    back = divide_slots(cluster, {"one": Claim(), "two": Claim(created=1.0)}, away)
    assert counts(back)["one"] == 2


@pytest.mark.parametrize("limit", ["most", "quota"])
def test_a_job_that_may_have_no_more_loses_the_slots_that_were_replaced_while_their_node_was_away(limit: str) -> None:
    quotas, claim = ({}, Claim(most=2)) if limit == "most" else ({"": 2}, Claim(namespace=""))
    claims, on_m = {"one": claim}, {"m": ("cpu:0", "cpu:1")}
    before = Shares(jobs={"one": Share(granted=on_m, held=on_m)})
    away = divide_slots(ClusterSlots(nodes(k=1), quotas=quotas), claims, before)
    assert away.jobs["one"].granted == {"k": ("cpu:0",), "m": ("cpu:0",)}
    away = divide_slots(ClusterSlots(nodes(k=3), quotas=quotas), claims, before)
    assert away.jobs["one"].granted == {"k": ("cpu:0", "cpu:1")}
    assert away.jobs["one"].surplus == slots_of_share(on_m), "other jobs wait until this one has returned them"
    back = divide_slots(ClusterSlots(nodes(k=3, m=2), quotas=quotas), claims, away)
    assert back.jobs["one"].granted == {"k": ("cpu:0", "cpu:1")}, "and it stays where it is"


def test_a_job_keeps_what_it_has_on_an_absent_node_and_gets_nothing_in_its_place() -> None:
    on_m = {"m": ("cpu:0",)}
    claims = {"one": Claim(most=1), "two": Claim(created=1.0)}
    before = Shares(jobs={"one": Share(granted=on_m, held=on_m)})
    found = divide_slots(ClusterSlots(nodes(k=2), absent=frozenset({"m"})), claims, before)
    assert found.jobs["one"].granted == on_m
    assert found.jobs["two"].granted == {"k": ("cpu:0", "cpu:1")}


def test_a_job_keeps_what_it_runs_on_though_an_absent_node_has_as_many_of_its_slots() -> None:
    """The node may not come back, and a job of equal priority is not preempted."""
    both = {"k": ("cpu:0", "cpu:1"), "m": ("cpu:0", "cpu:1")}
    before = Shares(jobs={"runs": Share(granted=both, held=both)})
    claims = {"runs": Claim(least=2, created=1.0), "waits": Claim(least=2)}
    found = divide_slots(ClusterSlots(nodes(k=2), absent=frozenset({"m"})), claims, before)
    assert {uid: share.granted for uid, share in found.jobs.items()} == {"runs": both}


def test_slots_on_an_absent_node_go_to_no_job_of_a_higher_priority() -> None:
    on_m = {"m": ("cpu:0", "cpu:1")}
    claims = {"low": Claim(), "high": Claim(priority=5, least=2)}
    before = Shares(jobs={"low": Share(granted=on_m, held=on_m)})
    cluster = ClusterSlots(nodes(k=1), absent=frozenset({"m"}))
    found = divide_slots(cluster, claims, before)
    assert found.jobs["low"].granted["m"] == ("cpu:0", "cpu:1")
    assert "high" not in found.jobs
    assert [*queue_jobs(cluster, claims, before)] == ["high"]


def test_a_namespace_keeps_no_more_than_its_quota_of_slots_that_are_away() -> None:
    of_a, of_b = {"m": ("cpu:0",)}, {"m": ("cpu:1",)}
    claims = {"a": Claim(namespace="x"), "b": Claim(namespace="x", created=1.0)}
    before = Shares(jobs={"a": Share(granted=of_a, held=of_a), "b": Share(granted=of_b, held=of_b)})
    away = divide_slots(ClusterSlots(nodes(z=1), quotas={"x": 2}), claims, before)
    assert {uid: share.granted for uid, share in away.jobs.items()} == {"a": {"z": ("cpu:0",)}, "b": of_b}
    back = divide_slots(ClusterSlots(nodes(m=2, z=1), quotas={"x": 2}), claims, away)
    assert {uid: share.granted for uid, share in back.jobs.items()} == {"a": {"z": ("cpu:0",)}, "b": of_b}


@pytest.mark.parametrize(("most", "kept"), [(5, ("cpu:10", "cpu:11", "cpu:8", "cpu:9")), (3, ("cpu:8", "cpu:9"))])
def test_slots_that_are_away_are_kept_in_whole_engines_as_they_stand_on_their_node(
    most: int, kept: tuple[str, ...]
) -> None:
    on_m = {"m": tuple(sorted(f"cpu:{number}" for number in range(8, 12)))}
    before = Shares(jobs={"one": Share(granted=on_m, held=on_m)})
    found = divide_slots(ClusterSlots(nodes(k=1)), {"one": Claim(unit=2, least=2, most=most)}, before)
    assert found.jobs["one"].granted == {"m": kept}


def test_wide_engines_find_room_and_narrow_ones_move_for_them() -> None:
    cluster = ClusterSlots(nodes(n=4, m=4))
    scattered = Shares(
        jobs={"narrow": Share(granted={"n": ("cpu:1",), "m": ("cpu:1",)}, held={"n": ("cpu:1",), "m": ("cpu:1",)})}
    )
    claims = {"narrow": Claim(most=2), "wide": Claim(unit=4, least=4, most=4, created=1.0)}
    after = settled(cluster, claims, scattered)
    assert counts(after) == {"narrow": 2, "wide": 4}
    assert len(after.jobs["wide"].granted) == 1


def test_a_wide_engine_of_a_lower_priority_leaves_a_narrower_one_of_a_higher_its_room() -> None:
    cluster = ClusterSlots(nodes(n=4, m=1, o=1))
    claims = {"first": Claim(priority=9, unit=2, least=2, most=2), "wide": Claim(unit=4, least=4, most=4, created=1.0)}
    assert counts(settled(cluster, claims)) == {"first": 2}
    said = queue_jobs(cluster, claims, settled(cluster, claims))["wide"].reason
    assert said == "it needs 4 slots in engines of 4 adjacent slots, and other jobs use 2 of 6 slots"


def test_slots_that_no_engine_of_two_can_have_go_to_jobs_of_single_ones_and_who_waits_is_told() -> None:
    cluster = ClusterSlots(nodes(n=3, m=3))
    claims = {f"pair-{n}": Claim(unit=2, least=2, created=float(n)) for n in range(3)} | {"one": Claim(created=9.0)}
    rest = settled(cluster, claims)
    assert counts(rest) == {"pair-0": 2, "pair-1": 2, "one": 2}
    assert queue_jobs(cluster, claims, rest).keys() == {"pair-2"}


def test_ended_job_is_removed_from_the_shares() -> None:
    cluster = ClusterSlots(nodes(n=2))
    before = settled(cluster, {"one": Claim(), "two": Claim()})
    assert counts(settled(cluster, {"two": Claim()}, before)) == {"two": 2}


def test_a_slot_that_is_granted_is_not_given_back() -> None:
    shares = Shares(jobs={"one": Share(granted={"n": ("cpu:0",)}, held={"n": ("cpu:0",)})})
    with pytest.raises(ValueError, match="cannot give back"):
        shares.released("one", frozenset({("n", "cpu:0")}))


CLAIMS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        Claim,
        namespace=st.sampled_from(["x", "y", "z"]),
        priority=st.integers(-1, 1),
        least=st.integers(1, 6),
        most=st.none() | st.integers(6, 9),
        unit=st.sampled_from([1, 1, 2, 3, 4]),
        created=st.floats(0, 9),
        paused=st.booleans(),
        ends=st.sampled_from(["", "", "asked"]),
    ),
    max_size=6,
)
CLUSTERS = st.builds(
    ClusterSlots,
    st.dictionaries(st.sampled_from(["n", "m", "o"]), st.integers(0, 6)).map(lambda counts: nodes(**counts)),
    st.frozensets(st.tuples(st.sampled_from(["n", "m", "o"]), st.sampled_from(["cpu:0", "cpu:3"])), max_size=3),
    st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 6)),
)


def check(cluster: ClusterSlots, claims: Mapping[str, Claim], before: Shares, after: Shares) -> None:
    there = slots_of_share(cluster.nodes) - cluster.out
    seen: set[tuple[str, str]] = set()
    used: dict[str, int] = {}
    assert after.jobs.keys() <= claims.keys()
    assert all(share.held for share in after.jobs.values())
    for uid, share in after.jobs.items():
        claim, granted, held = claims[uid], slots_of_share(share.granted), slots_of_share(share.held)
        assert seen.isdisjoint(held), "no slot is two jobs'"
        seen |= held
        assert granted <= held
        old = before.jobs.get(uid, Share())
        away = {slot for slot in granted if slot[0] not in cluster.nodes}
        assert away <= slots_of_share(old.granted)
        new = granted - away
        assert new <= there
        assert claim.wants or not granted
        assert claim.most is None or len(new) <= claim.most
        assert len(new) % claim.unit == 0
        used[claim.namespace] = used.get(claim.namespace, 0) + len(new)
    for uid, share in before.jobs.items():
        kept = after.jobs.get(uid, Share()).held
        assert uid not in claims or slots_of_share(share.held) <= slots_of_share(kept), (
            "only who uses a slot gives it back"
        )
    for namespace, quota in cluster.quotas.items():
        assert used.get(namespace, 0) <= quota
    waiting = queue_jobs(cluster, claims, after)
    assert waiting.keys() <= {uid for uid, claim in claims.items() if claim.wants}
    assert [one.position for one in waiting.values()] == list(range(1, len(waiting) + 1))


@given(st.lists(st.tuples(CLUSTERS, CLAIMS, st.booleans()), min_size=1, max_size=6))
def test_no_slot_belongs_to_two_jobs(story: list[tuple[ClusterSlots, dict[str, Claim], bool]]) -> None:
    shares = Shares()
    for cluster, claims, gives_back in story:
        after = divide_slots(cluster, claims, shares)
        check(cluster, claims, shares, after)
        assert divide_slots(cluster, claims, after) is after, "asked twice it says the same"
        shares = settled(cluster, claims, after) if gives_back else after


WIDE_FIRST = {
    "a": Claim(namespace="x"),
    "b": Claim(namespace="x", least=2, unit=2),
    "c": Claim(namespace="x", priority=1, least=4, unit=3),
}


@example(ClusterSlots(nodes(n=3, m=3)), WIDE_FIRST)
@given(CLUSTERS, CLAIMS)
def test_it_comes_to_rest_and_then_nothing_moves(cluster: ClusterSlots, claims: dict[str, Claim]) -> None:
    rest = settled(cluster, claims)
    assert divide_slots(cluster, claims, rest) is rest
    waiting = queue_jobs(cluster, claims, rest)
    for uid, claim in claims.items():
        if claim.wants:
            has, fewest = counts(rest).get(uid, 0), -(-claim.least // claim.unit) * claim.unit
            assert has >= fewest if uid not in waiting else has == 0, (
                "who has any slots can run on them; who has none is told why"
            )
    highest = max((claim.priority for claim in claims.values() if claim.wants), default=0)
    for uid, claim in claims.items():
        if not claim.wants or claim.priority != highest or claim.namespace in cluster.quotas:
            continue
        alone = settled(ClusterSlots(cluster.nodes, cluster.out), {uid: claim})
        if len([one for one in claims.values() if one.wants and one.priority == highest]) == 1:
            runs, fewest = counts(rest).get(uid, 0), -(-claim.least // claim.unit) * claim.unit
            assert runs >= min(counts(alone).get(uid, 0), fewest), (
                "the only one of the highest priority runs if it would alone; beyond its fewest slots others' fewest come first"
            )


@given(CLUSTERS, CLAIMS)
def test_shares_are_read_as_they_were_written(cluster: ClusterSlots, claims: dict[str, Claim]) -> None:
    shares = settled(cluster, claims)
    assert Shares.decode(shares.encode()) == shares
    assert all(group_by_node(slots_of_share(share.held)) == share.held for share in shares.jobs.values())
    for claim in claims.values():
        assert Claim.decode(claim.encode(), "here") == claim


def test_half_an_engine_is_not_granted_while_another_job_may_use_its_other_half() -> None:
    cluster = ClusterSlots(nodes(n=4))
    claims = {"a": Claim(least=1, created=1.0)}
    all_four = divide_slots(cluster, claims, Shares())
    assert counts(all_four) == {"a": 4}
    smaller = divide_slots(cluster, {"a": Claim(least=1, most=3, created=1.0)}, all_four)
    smaller = settled(cluster, {"a": Claim(least=1, most=3, created=1.0)}, smaller)
    both = {"a": Claim(least=1, most=3, created=1.0), "b": Claim(least=2, unit=2, created=2.0)}
    asked = divide_slots(cluster, both, smaller)
    assert counts(asked).get("b", 0) == 0, "of two slots that are to be its engine one is still held"
    assert counts(settled(cluster, both, asked)) == {"a": 2, "b": 2}


def test_limit_below_the_rounded_minimum_is_the_reason_to_wait() -> None:
    """Its fewest are rounded up to whole engines."""
    cluster, claims = ClusterSlots(nodes(n=4, m=4)), {"a": Claim(least=5, most=6, unit=4)}
    assert divide_slots(cluster, claims, Shares()) == Shares()
    assert queue_jobs(cluster, claims, Shares())["a"].reason == "it needs 8 slots in engines of 4, but its limit is 6"
