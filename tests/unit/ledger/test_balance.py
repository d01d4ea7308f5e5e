"""The layout of a step: complete, deterministic, and as balanced as LPT guarantees."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from builders import sample_slots, seal_of_lengths
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.balance import (
    NEAR_SLACK,
    TRANSFER_BYTES,
    SampleSlot,
    StepLayout,
    Unit,
    balance_samples,
    picture_cost,
    sample_cost,
    single_units,
    slot_cost,
)
from gcore.ledger.records.chain import Seal
from gcore.ledger.records.cluster import attention_equals_at, patch_cost

seals = st.builds(
    seal_of_lengths,
    st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=9), max_size=12),
    world_size=st.integers(1, 7),
    mini_batches=st.integers(1, 6),
    prompt_tokens=st.integers(1, 300),
    attention_equals_at=st.sampled_from([1, 960, 24_576]),
    masked=st.sampled_from([(), (0,), (1, 3)]),
)
pictured = st.builds(
    seal_of_lengths,
    st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=6), max_size=8),
    world_size=st.integers(1, 5),
    mini_batches=st.integers(1, 3),
    prompt_tokens=st.integers(1, 300),
    attention_equals_at=st.sampled_from([1, 960]),
    masked=st.sampled_from([(), (0,), (1, 3)]),
    patches=st.lists(st.sampled_from([0, 4, 900, 40_000]), min_size=1, max_size=4),
)


def fingerprint(layout: StepLayout) -> str:
    return hashlib.sha256(repr(layout).encode()).hexdigest()


@given(seals)
def test_every_sample_is_taken_exactly_once(seal: Seal) -> None:
    layout = balance_samples(seal)
    taken = [
        slot
        for mini_batch, rank in itertools.product(range(layout.mini_batches), range(seal.world_size))
        for slot in layout.share(mini_batch, rank)
    ]
    assert sorted(taken) == sample_slots(seal)


@given(seals, st.integers(2, 4))
def test_samples_are_spread_over_sequence_groups_as_over_so_many_ranks(seal: Seal, size: int) -> None:
    groups = seal.model_copy(update={"world_size": size * seal.world_size, "sequence_parallel": size})
    layout, alone = balance_samples(groups), balance_samples(seal)
    assert layout.shares == alone.shares
    assert [layout.of_rank(rank) for rank in range(groups.world_size)] == [
        alone.of_rank(rank // size) for rank in range(groups.world_size)
    ]
    listed = [slot for rank in range(groups.world_size) for slot in layout.receipt_of(rank)]
    assert sorted(listed) == sample_slots(seal), "each sample is in one receipt"
    with pytest.raises(ValueError, match="not a multiple of sequence_parallel"):
        balance_samples(groups.model_copy(update={"world_size": groups.world_size + 1}))


def pairs(slots: Iterable[SampleSlot]) -> list[Unit]:
    """Two neighbours of a group each; the last of an odd group alone."""
    every = itertools.groupby(slots, key=lambda slot: (slot.group, slot.sample // 2))
    return [tuple(unit) for _, unit in every]


@given(seals)
def test_a_unit_is_whole_on_one_rank(seal: Seal) -> None:
    layout = balance_samples(seal, pairs)
    shares = [share for by_rank in layout.shares for share in by_rank]
    assert sorted(slot for share in shares for slot in share) == sample_slots(seal)
    assert all(any(set(unit) <= set(share) for share in shares) for unit in pairs(sample_slots(seal)))


def test_a_unit_weighs_what_its_samples_cost_together() -> None:
    seal = seal_of_lengths([[30, 30, 50, 9]], world_size=2, mini_batches=1, prompt_tokens=1, attention_equals_at=10_000)
    assert balance_samples(seal, pairs).shares == (
        ((SampleSlot(0, 0), SampleSlot(0, 1)), (SampleSlot(0, 2), SampleSlot(0, 3))),
    )


@given(seals)
def test_mini_batches_are_contiguous_runs_of_groups_in_the_seals_order(seal: Seal) -> None:
    layout = balance_samples(seal)
    runs = [
        sorted({slot.group for rank in range(seal.world_size) for slot in layout.share(mini_batch, rank)})
        for mini_batch in range(layout.mini_batches)
    ]
    assert list(itertools.chain(*runs)) == list(range(len(seal.groups)))
    sizes = [len(run) for run in runs]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(seals)
def test_no_update_is_empty_and_there_are_as_many_as_asked_where_the_groups_suffice(seal: Seal) -> None:
    assert balance_samples(seal).mini_batches == min(seal.mini_batches, len(seal.groups))


@given(seals)
def test_the_fullest_rank_stays_within_the_bound_of_lpt(seal: Seal) -> None:
    layout = balance_samples(seal)
    for by_rank in layout.shares:
        costs = sorted((slot_cost(seal, slot) for share in by_rank for slot in share), reverse=True)
        loads = [sum(slot_cost(seal, slot) for slot in share) for share in by_rank]
        ranks = seal.world_size
        # The best possible is at least each of these; LPT stays within 4/3 − 1/(3m) of the best possible, and the
        # list-scheduling bound (mean + one job) holds as well.
        mean = sum(costs) / ranks
        assert max(loads) <= mean + (1 - 1 / ranks) * costs[0] + 1e-6
        assert max(loads) - min(loads) <= costs[0]


def best_makespan(costs: list[int], ranks: int) -> int:
    return min(
        max(sum(c for c, r in zip(costs, who, strict=True) if r == rank) for rank in range(ranks))
        for who in itertools.product(range(ranks), repeat=len(costs))
    )


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=7), st.integers(1, 3))
def test_against_the_best_layout_the_fullest_rank_has_at_most_a_third_more(lengths: list[int], ranks: int) -> None:
    seal = seal_of_lengths([lengths], world_size=ranks)
    loads = [sum(slot_cost(seal, slot) for slot in share) for share in balance_samples(seal).shares[0]]
    best = best_makespan([sample_cost(5 + length, seal.attention_equals_at) for length in lengths], ranks)
    assert 3 * ranks * max(loads) <= (4 * ranks - 1) * best


@given(seals)
def test_the_layout_is_the_same_each_time_and_after_the_store(seal: Seal) -> None:
    stored = Seal.model_validate_json(seal.model_dump_json())
    assert balance_samples(seal) == balance_samples(seal) == balance_samples(stored)


@given(seals)
def test_the_layout_does_not_depend_on_who_holds_the_groups_or_on_the_attempt(seal: Seal) -> None:
    moved = seal.model_copy(
        update={
            "attempt": seal.attempt + 1,
            "groups": tuple(group.model_copy(update={"holder": "b", "reward": 1.0}) for group in seal.groups),
        }
    )
    assert balance_samples(moved) == balance_samples(seal)


@given(seals)
def test_samples_of_a_rank_are_the_union_of_its_shares(seal: Seal) -> None:
    layout = balance_samples(seal)
    for rank in range(seal.world_size):
        slots = layout.of_rank(rank)
        assert list(slots) == sorted(slot for m in range(layout.mini_batches) for slot in layout.share(m, rank))


@given(st.integers(1, 6), st.integers(1, 40))
def test_equal_samples_are_spread_evenly(ranks: int, samples: int) -> None:
    layout = balance_samples(seal_of_lengths([[7] * samples], world_size=ranks))
    counts = [len(layout.share(0, rank)) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True), "what does not come out even goes to the lower ranks"


def test_samples_are_weighed_by_what_attention_costs_the_model() -> None:
    lengths = [[995] * 2 + [95] * 20]  # with the prompt: two of 1000 tokens, twenty of 100
    wide = balance_samples(seal_of_lengths(lengths, world_size=2, attention_equals_at=1_000_000))
    narrow = balance_samples(seal_of_lengths([[1995, *[95] * 20]], world_size=2, attention_equals_at=100))
    assert [len(share) for share in wide.shares[0]] == [11, 11]
    # 2000·2100 against 20 · 100·200: all the short ones together weigh a tenth of the long one.
    assert [len(share) for share in narrow.shares[0]] == [1, 20]


def test_a_masked_sample_costs_nothing_and_is_taken_all_the_same() -> None:
    seal = seal_of_lengths([[500, 10, 10, 10]], world_size=2, masked=(0,))
    assert slot_cost(seal, SampleSlot(0, 0)) == 0
    assert sorted(slot for share in balance_samples(seal).shares[0] for slot in share) == sample_slots(seal)
    assert max(sum(slot_cost(seal, s) for s in share) for share in balance_samples(seal).shares[0]) == 2 * sample_cost(
        15, 24_576
    )


def test_a_seal_of_before_is_read_with_the_weight_of_before() -> None:
    seal = seal_of_lengths([[4, 3]], world_size=2)
    assert b"attention_equals_at" not in seal.encode()
    assert Seal.decode(seal.encode()).attention_equals_at == 24_576
    assert (
        Seal.decode(seal_of_lengths([[4]], world_size=1, attention_equals_at=960).encode()).attention_equals_at == 960
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, 24_576, id="tells nothing"),
        pytest.param({"n_embd": 768, "n_head": 12, "n_inner": None, "activation_function": "gelu"}, 6 * 768, id="gpt2"),
        pytest.param(
            {
                "hidden_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 512,
                "hidden_act": "silu",
            },
            960,
            id="a small qwen3",
        ),
        pytest.param(
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14_336,
                "hidden_act": "silu",
            },
            26_624,
            id="llama of 8B",
        ),
        pytest.param(
            {
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "hidden_act": "silu",
            },
            6912,
            id="a mixture of experts counts those a token meets",
        ),
        pytest.param({"text_config": {"hidden_size": 64, "num_attention_heads": 1}}, 6 * 64, id="nested"),
    ],
)
def test_the_weight_of_attention_follows_from_the_models_configuration(config: dict[str, Any], expected: int) -> None:
    assert attention_equals_at(config) == expected


def test_a_seal_without_groups_has_no_updates() -> None:
    layout = balance_samples(seal_of_lengths([], world_size=3, mini_batches=2))
    assert layout.mini_batches == 0
    assert layout.of_rank(2) == ()


def test_the_layout_of_one_seal_never_changes() -> None:
    # Whoever changes the rule changes what running jobs agree on: then the seal needs a new schema version.
    layout = balance_samples(seal_of_lengths([[4, 3, 2], [4, 2, 1]], world_size=2, mini_batches=1))
    assert layout.share(0, 0) == (SampleSlot(0, 0), SampleSlot(0, 1), SampleSlot(1, 2))
    assert layout.share(0, 1) == (SampleSlot(0, 2), SampleSlot(1, 0), SampleSlot(1, 1))


def test_another_process_with_another_hash_seed_computes_the_same_layout() -> None:
    seal = seal_of_lengths([[11, 900, 3, 3], [3, 3, 3], [5000], [1, 2, 3, 4, 5]], world_size=3, mini_batches=2)
    program = (
        "import hashlib, sys; from gcore.ledger.balance import balance_samples; from gcore.ledger.records.chain import Seal; "
        "print(hashlib.sha256(repr(balance_samples(Seal.model_validate_json(sys.stdin.read()))).encode()).hexdigest())"
    )
    for hash_seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", program],
            input=seal.model_dump_json(),
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert other.stdout.strip() == fingerprint(balance_samples(seal))


@pytest.mark.parametrize(("ranks", "mini_batches"), [(0, 1), (1, 0)], ids=["no ranks", "no mini-batches"])
def test_a_seal_that_cannot_be_cut_is_refused(ranks: int, mini_batches: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        balance_samples(
            seal_of_lengths([[1]], world_size=1).model_copy(update={"world_size": ranks, "mini_batches": mini_batches})
        )


@pytest.mark.parametrize("rank", [-1, 2], ids=["below", "beyond"])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(IndexError):
        balance_samples(seal_of_lengths([[1, 2]], world_size=2)).of_rank(rank)


def load_with_pictures(seal: Seal, share: Iterable[SampleSlot]) -> int:
    """Cost of a share: of its samples, and of the pictures of each group of which a sample is computed."""
    share = list(share)
    groups = {slot.group for slot in share if slot_cost(seal, slot)}
    return sum(slot_cost(seal, slot) for slot in share) + sum(picture_cost(seal, group) for group in groups)


@given(pictured, st.sampled_from([single_units, pairs]))
def test_no_move_of_a_unit_lowers_the_greatest_load_with_pictures(seal: Seal, units_of: Any) -> None:
    layout = balance_samples(seal, units_of)
    taken = [slot for shares in layout.shares for share in shares for slot in share]
    assert sorted(taken) == sample_slots(seal)
    for shares in layout.shares:
        if not any(seal.groups[slot.group].patches for share in shares for slot in share):
            continue
        most = max(shares, key=lambda share: load_with_pictures(seal, share))
        least = min(shares, key=lambda share: load_with_pictures(seal, share))
        for unit in units_of(most):
            left = load_with_pictures(seal, set(most) - set(unit))
            grown = load_with_pictures(seal, {*least, *unit})
            assert max(left, grown) >= load_with_pictures(seal, most)


def test_samples_of_a_group_with_heavy_pictures_stay_on_one_rank() -> None:
    seal = seal_of_lengths([[40] * 4] * 4, world_size=4, patches=[4000])
    (shares,) = balance_samples(seal).shares
    assert all(len({slot.group for slot in share}) == 1 for share in shares)
    (light,) = balance_samples(seal_of_lengths([[40] * 4] * 4, world_size=4, patches=[2])).shares
    assert all(len(share) == 4 for share in light)
    (alone,) = balance_samples(seal_of_lengths([[40] * 8], world_size=4, patches=[100])).shares
    assert sorted(map(len, alone)) == [2, 2, 2, 2], "a group of its own is encoded on every rank"


def test_a_patch_costs_what_the_layers_of_tower_and_language_model_say() -> None:
    tower = {"depth": 2, "hidden_size": 10, "num_heads": 2, "intermediate_size": 30, "hidden_act": "x", "patch_size": 8}
    text = {
        "num_hidden_layers": 4,
        "hidden_size": 20,
        "num_attention_heads": 2,
        "intermediate_size": 10,
        "hidden_act": "x",
    }
    of_tower, of_text = 2 * (4 * 100 + 2 * 300), 4 * (4 * 400 + 3 * 200)
    assert patch_cost({"vision_config": tower, "text_config": text}) == pytest.approx(of_tower / of_text)
    assert patch_cost({"vision_config": tower, **text}) == pytest.approx(of_tower / of_text)
    assert patch_cost(text) == patch_cost({"vision_config": tower, "text_config": {}}) == 0


held = st.builds(
    lambda near, **fields: seal_of_lengths(**fields, near={f"c{n}": tuple(sorted(one)) for n, one in enumerate(near)}),
    st.lists(st.sets(st.integers(0, 5), max_size=2), min_size=1, max_size=4),
    lengths=st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=6), max_size=8),
    world_size=st.integers(1, 5),
    mini_batches=st.integers(1, 3),
    prompt_tokens=st.integers(1, 300),
    masked=st.sampled_from([(), (0,), (1, 3)]),
    patches=st.lists(st.sampled_from([0, 4, 900]), min_size=1, max_size=4),
    holders=st.permutations(["c0", "c1", "c2", "c3"]),
    media_bytes=st.lists(st.sampled_from([0, 1, 1000, 2_000_000]), min_size=1, max_size=4),
)


def far_bytes(seal: Seal, layout: StepLayout) -> int:
    """Bytes of samples on ranks that are not near them, times the number of samples of their group."""
    return sum(
        seal.groups[slot.group].media_bytes
        for shares in layout.shares
        for rank, share in enumerate(shares)
        for slot in share
        if rank not in seal.near.get(seal.groups[slot.group].holder, ())
    )


def greatest_loads(seal: Seal, layout: StepLayout) -> list[int]:
    return [max(load_with_pictures(seal, share) for share in shares) for shares in layout.shares]


@given(held, st.sampled_from([single_units, pairs]))
def test_samples_move_to_the_ranks_near_their_blobs_and_no_load_rises_above_the_bound(
    seal: Seal, units_of: Any
) -> None:
    nowhere = seal.model_copy(update={"near": {}})
    layout, before = balance_samples(seal, units_of), balance_samples(nowhere, units_of)
    taken = [slot for shares in layout.shares for share in shares for slot in share]
    assert sorted(taken) == sample_slots(seal)
    assert all(
        any(set(unit) <= set(share) for shares in layout.shares for share in shares)
        for unit in units_of(sample_slots(seal))
    )
    transfers = sum(group.media_bytes for group in seal.groups) * seal.attention_equals_at // TRANSFER_BYTES
    for load, bound in zip(greatest_loads(seal, layout), greatest_loads(seal, before), strict=True):
        assert load <= bound + bound // NEAR_SLACK + transfers
    assert layout == balance_samples(Seal.decode(seal.encode()), units_of)
    if not any(group.patches for group in seal.groups):
        assert far_bytes(seal, layout) <= far_bytes(seal, before)


@given(held)
def test_without_blobs_the_layout_does_not_depend_on_who_is_near(seal: Seal) -> None:
    text = seal.model_copy(
        update={"groups": tuple(group.model_copy(update={"media_bytes": 0}) for group in seal.groups)}
    )
    assert balance_samples(text) == balance_samples(text.model_copy(update={"near": {}}))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 8), st.sampled_from([0, 900]), st.randoms())
def test_equal_groups_of_equal_holders_stay_with_their_holders(
    nodes: int, each: int, samples: int, patches: int, random: Any
) -> None:
    holders = [f"c{number}" for number in range(nodes)] * each
    random.shuffle(holders)
    seal = seal_of_lengths(
        [[40] * samples] * len(holders),
        world_size=nodes,
        patches=[patches],
        holders=holders,
        media_bytes=[1000],
        near={f"c{number}": (number,) for number in range(nodes)},
    )
    assert far_bytes(seal, balance_samples(seal)) == 0


def test_a_holder_of_too_many_groups_keeps_as_many_as_its_rank_computes_in_time() -> None:
    seal = seal_of_lengths(
        [[40] * 2] * 8,
        world_size=2,
        patches=[100],
        holders=["a"] * 6 + ["b"] * 2,
        media_bytes=[1000],
        near={"a": (1,), "b": (0,)},
    )
    (shares,) = balance_samples(seal).shares
    assert [len(share) for share in shares] == [8, 8], "the step takes no longer than before"
    assert {slot.group for slot in shares[0]} >= {6, 7}
    assert far_bytes(seal, balance_samples(seal)) == 2 * 2 * 1000


@pytest.mark.parametrize(("size", "stay"), [(1000, False), (8 * TRANSFER_BYTES * 500, True)], ids=["small", "large"])
def test_samples_go_to_another_node_for_balance_only_if_their_blobs_are_small(size: int, stay: bool) -> None:
    """Four groups of long responses were made on one node, four of short ones on the other."""
    seal = seal_of_lengths(
        [[300] * 8] * 4 + [[100] * 8] * 4,
        world_size=2,
        holders=["a"] * 4 + ["b"] * 4,
        media_bytes=[size],
        near={"a": (0,), "b": (1,)},
    )
    layout = balance_samples(seal)
    loads = [load_with_pictures(seal, share) for share in layout.shares[0]]
    assert (max(loads) - min(loads) > sum(loads) // 8) == stay
    assert (far_bytes(seal, layout) == 0) == stay
