"""Tallies: head's sums by source, and the report of an epoch without training prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import EndedRef, Head, LogEntry, SealedGroup, SinceStep, SourceTally, Tally
from gcore.ledger.statistics import NOTHING, add_to_tally, barren_epoch, explain_barren_epoch, tally_difference
from gcore.types import PromptRef, Version

WRITER = ChainWriter("a", "n")
SHAPE = shard_lengths(7, 3)


def group(ref: PromptRef, source: str = "sums", reward: float = 0.5, truncated: int = 0) -> SealedGroup:
    return SealedGroup(
        ref=ref,
        digest="d",
        prompt_tokens=2,
        response_tokens=(3, 4),
        versions=(Version(0, 0),),
        reward=reward,
        source=source,
        truncated=truncated,
        holder="a",
    )


def filtered(ref: PromptRef, reason: str = "too long", source: str = "sums") -> EndedRef:
    return EndedRef(ref=ref, kind="filtered", reason=reason, source=source)


def accounted(head: Head, *refs: PromptRef) -> Head:
    return chain.account_entry(head, tuple(filtered(ref) for ref in refs), SHAPE, WRITER).head


def epoch_refs(epoch: int) -> list[PromptRef]:
    return [PromptRef(epoch, shard, seq) for shard, length in enumerate(SHAPE.lengths) for seq in range(length)]


def test_kept_filtered_and_failed_prompts_are_counted_by_source() -> None:
    ended = (
        filtered(PromptRef(0, 0, 1)),
        EndedRef(ref=PromptRef(0, 1, 0), kind="failed", reason="no engine", source="words"),
    )
    tally = add_to_tally(NOTHING, [group(PromptRef(0, 0, 0), reward=0.25, truncated=1)], ended)
    tally = add_to_tally(tally, [group(PromptRef(2, 0, 0), reward=0.5), group(PromptRef(1, 0, 0), "words")], ())
    assert tally == Tally(
        sources={
            "sums": SourceTally(kept=2, filtered=1, samples=4, truncated=1, tokens=14, reward=0.75),
            "words": SourceTally(kept=1, failed=1, samples=2, tokens=7, reward=0.5),
        },
        trained_epoch=2,
        since_step=SinceStep(filtered=1, failed=1),
    )


counts = st.integers(0, 1000)
tallies = st.builds(
    SourceTally,
    kept=counts,
    filtered=counts,
    failed=counts,
    samples=counts,
    truncated=counts,
    tokens=counts,
    reward=st.integers(-1000, 1000).map(float),
)
many = st.dictionaries(st.sampled_from(["a", "b", "c"]), tallies)


@given(many, many)
def test_a_difference_added_to_what_was_gives_what_is(
    then: dict[str, SourceTally], more: dict[str, SourceTally]
) -> None:
    now = {
        name: SourceTally(
            **{
                field: getattr(then.get(name, SourceTally()), field) + getattr(more.get(name, SourceTally()), field)
                for field in SourceTally.model_fields
            }
        )
        for name in then.keys() | more.keys()
    }
    assert tally_difference(now, then) == {name: more.get(name, SourceTally()) for name in now}


def test_a_difference_is_never_below_nothing() -> None:
    assert tally_difference({"a": SourceTally(filtered=2)}, {"a": SourceTally(filtered=3)}) == {"a": SourceTally()}


def test_a_tally_goes_through_the_store_as_it_is() -> None:
    head = accounted(chain.base_entry(3, "w", WRITER).head, PromptRef(0, 0, 0))
    assert Head.decode(head.encode()) == head


def test_an_epoch_that_has_ended_without_a_trained_prompt_is_barren() -> None:
    head = chain.base_entry(3, "w", WRITER).head
    assert barren_epoch(SHAPE, head) is None
    *most, last = epoch_refs(0)
    head = accounted(head, *most)
    assert barren_epoch(SHAPE, head) is None, "its last prompt may still be trained"
    head = accounted(head, last)
    assert barren_epoch(SHAPE, head) == 0


def test_a_job_that_kept_no_tally_when_it_began_is_not_called_barren_for_what_nobody_counted() -> None:
    older = chain.base_entry(3, "w", WRITER).head
    older = older.model_copy(update={"cursors": older.cursors.union(SHAPE, epoch_refs(0))})
    assert barren_epoch(SHAPE, older) is None
    assert barren_epoch(SHAPE, accounted(older, *epoch_refs(1))) is None


def test_one_trained_prompt_gives_an_epoch_and_those_before_it_a_sense() -> None:
    head = accounted(chain.base_entry(3, "w", WRITER).head, *epoch_refs(0))
    trained = head.model_copy(update={"tally": add_to_tally(head.tally, [group(PromptRef(1, 0, 0))], ())})
    assert barren_epoch(SHAPE, trained) is None
    trained = accounted(trained, *epoch_refs(1))
    assert barren_epoch(SHAPE, trained) is None
    assert barren_epoch(SHAPE, accounted(trained, *epoch_refs(2))) == 2


@given(st.permutations([ref for epoch in range(3) for ref in epoch_refs(epoch)]), st.integers(0, 21))
def test_an_epoch_is_barren_exactly_if_all_of_it_ended_and_nothing_since_was_trained(
    order: list[PromptRef], trained_at: int
) -> None:
    """For any order of the prompts' ends, and any choice of the trained ones."""
    head = chain.base_entry(3, "w", WRITER).head
    trained: PromptRef | None = None
    done: set[PromptRef] = set()
    for number, ref in enumerate(order):
        if number == trained_at:
            trained = ref
            head = head.model_copy(
                update={
                    "cursors": head.cursors.union(SHAPE, [ref]),
                    "tally": add_to_tally(head.tally, [group(ref)], ()),
                }
            )
        else:
            head = accounted(head, ref)
        done.add(ref)
        over = [epoch for epoch in range(3) if set(epoch_refs(epoch)) <= done]
        # Shards go through their epochs in order, so that the newest that is over has all before it over.
        newest = next((e for e in reversed(range(3)) if all(o in over for o in range(e + 1))), None)
        hopeless = newest is not None and (trained is None or trained.data_epoch < newest)
        assert barren_epoch(SHAPE, head) == (newest if hopeless else None)


def entry(*ended: EndedRef) -> LogEntry:
    return LogEntry(seq=1, parent=0, kind="account", lineage=0, step=0, world="w", nonce="n", delta=ended)


def test_the_sentence_has_the_counts_and_the_commonest_reason() -> None:
    refs = epoch_refs(3)
    log = [
        entry(filtered(refs[0]), filtered(refs[1]), EndedRef(ref=refs[2], kind="failed", reason="the reward raised")),
        entry(
            filtered(refs[3], "too short"),
            filtered(PromptRef(2, 0, 0), "too short"),
            filtered(PromptRef(2, 1, 0), "too short"),
        ),
    ]
    assert str(explain_barren_epoch(3, log)) == (
        "no prompt of data epoch 3 could be trained (3 were filtered, 1 failed); most common reason (2 times): too long"
    )
    assert "no longer known" in str(explain_barren_epoch(3, []))


def test_reasons_that_differ_in_their_numbers_only_are_one_reason() -> None:
    refs = epoch_refs(0)
    named = [filtered(ref, f"entry {number}: it has {number} tokens") for number, ref in enumerate(refs[:3])]
    found = explain_barren_epoch(0, [entry(filtered(refs[3], "another"), filtered(refs[4], "another"), *named)])
    assert (found.reason, found.times) == ("entry 0: it has 0 tokens", 3)
