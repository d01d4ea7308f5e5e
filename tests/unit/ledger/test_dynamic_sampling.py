"""Sizes, limits and ends of steps with many filtered prompts: pure rules, applied over whole jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger import staleness as carried
from gcore.ledger.audit.audit import audit_records
from gcore.ledger.audit.receipts import Receipt
from gcore.ledger.chain import Advance, ChainWriter
from gcore.ledger.records.chain import (
    EndedRef,
    Head,
    LogEntry,
    Offer,
    OfferedGroup,
    Seal,
    SealState,
    SourceTally,
)
from gcore.ledger.selection import (
    AwaitGroups,
    Choice,
    CloseStep,
    DataExhausted,
    OffersView,
    StreamRules,
    choose_seal,
    due_refs,
    is_acceptable,
    is_over,
    issue_ratio,
    planned_steps,
    prompts_left,
    refs_in_order,
    refuse_seal,
)
from gcore.ledger.statistics import add_outcomes, shortage_reason, start_next_step
from gcore.types import PromptRef

Keeps = Callable[[PromptRef], bool]


def rules(prompts: int = 400, shards: int = 4, window: int = 64, quota: int = 8, **more: object) -> StreamRules:
    return replace(StreamRules(shard_lengths(prompts, shards), window, quota, issue_cap=4.0), **more)  # type: ignore[arg-type]


def group(ref: PromptRef, head: Head) -> OfferedGroup:
    return OfferedGroup(
        ref=ref, digest=str(ref), prompt_tokens=3, response_tokens=(2, 4), versions=(head.version,), reward=0.5
    )


def ended(ref: PromptRef, head: Head) -> EndedRef:
    return EndedRef(
        ref=ref,
        kind="filtered",
        reason="all its rewards are the same",
        versions=(head.version,),
        reward=1.0,
        length=9.0,
    )


class Job:
    """One controller that always sees everything: rounds of generation, each of what is due, until nothing is left."""

    def __init__(self, rules: StreamRules, keeps: Keeps) -> None:
        self.rules, self.keeps = rules, keeps
        self.head = chain.base_entry(len(rules.shape.lengths), "w", ChainWriter("a", "n")).head
        self.log: dict[int, LogEntry] = {
            0: chain.base_entry(len(rules.shape.lengths), "w", ChainWriter("a", "n")).entry
        }
        self.receipts: list[Receipt] = []
        self.outcomes: dict[PromptRef, EndedRef] = {}
        self.groups: dict[PromptRef, OfferedGroup] = {}
        self.seals: list[Seal] = []
        self.rounds: list[int] = []
        """Rounds of generation that each step took."""
        self.made: list[int] = []
        """Groups and outcomes that each step's rounds made."""
        self.short: DataExhausted | None = None

    def offered(self) -> OffersView:
        offer = Offer(incarnation="a", groups=tuple(self.groups.values()), outcomes=tuple(self.outcomes.values()))
        return OffersView.collect(self.rules, self.head, [offer])

    def due(self) -> tuple[PromptRef, ...]:
        rule = carried.due_refs if self.rules.staleness else due_refs
        return rule(self.rules, self.head, (), self.offered())

    def chosen(self) -> Choice:
        rule = carried.choose_seal if self.rules.staleness else choose_seal
        return rule(self.rules, self.head, (), self.offered())

    def step(self) -> bool:
        """Until the next step is committed; False if there is none. Groups of too old weights are thrown away."""
        rounds = made = 0
        while not is_over(self.rules, self.head):
            wanted, chosen = self.due(), self.chosen()
            if isinstance(chosen, AwaitGroups):
                assert chosen.oldest in wanted, "what the seal waits for must be made"
                rounds, made = rounds + 1, made + len(wanted)
                for ref in wanted:
                    if self.keeps(ref):
                        self.groups[ref] = group(ref, self.head)
                    else:
                        self.outcomes[ref] = ended(ref, self.head)
            elif isinstance(chosen, CloseStep):
                self.advance(chain.account_entry(self.head, chosen.outcomes, self.rules.shape, ChainWriter("a", "n")))
            elif isinstance(chosen, DataExhausted):
                self.short = chosen
                return False
            else:
                assert refuse_seal(self.rules, self.head, (), chosen) is None
                seal = chain.ready_slot(
                    chain.seal_slot(None, self.head, chosen, world_size=1, mini_batches=2, sealer="a")
                )
                seal = Seal.decode(seal.encode())
                self.seals.append(seal)
                self.receipts.append(Receipt(seal.token, "w", 0, {g.ref: frozenset((0, 1)) for g in seal.groups}))
                self.advance(
                    chain.commit_entry(self.head, seal, self.rules.shape, ChainWriter("a", "n"), keep_cursors=False)
                )
                self.rounds.append(rounds)
                self.made.append(made)
                return True
        return False

    def run(self, steps: int = 10_000) -> Job:
        """So many steps, or to the end."""
        while steps and self.step():
            steps -= 1
        self.check()
        return self

    def advance(self, advance: Advance) -> None:
        self.head, self.log[advance.entry.seq] = advance.head, advance.entry
        terminal = {e.ref for e in advance.entry.delta}
        self.outcomes = {ref: e for ref, e in self.outcomes.items() if ref not in terminal}
        self.groups = {
            ref: g
            for ref, g in self.groups.items()
            if ref not in terminal and is_acceptable(self.head, self.head.step + 1, g.versions, self.rules.staleness)
        }

    def check(self) -> None:
        """The audit, to which an end that comes too late is a violation too."""
        found = audit_records(self.rules, self.head, self.log, self.receipts)
        assert found.clean, found.violations


def share(percent: int) -> Keeps:
    """Keeps so many of a hundred, spread over the stream, always the same."""
    return lambda ref: _mixed(ref) < percent


def _mixed(ref: PromptRef) -> int:
    return (ref.data_epoch * 7919 + ref.shard * 104_729 + ref.seq * 1_299_709 + 17) * 2_654_435_761 % 2**32 % 100


def nothing(ref: PromptRef) -> bool:
    return False


def everything(ref: PromptRef) -> bool:
    return True


class TestSizes:
    """How many prompts are issued at once."""

    def test_the_first_step_issues_what_it_wants_and_no_more(self) -> None:
        job = Job(rules(), share(30))
        assert len(job.due()) == job.rules.quota

    def test_a_step_issues_at_once_what_recent_steps_took_for_a_group(self) -> None:
        job = Job(rules(), share(30)).run(6)
        ratio = issue_ratio(job.rules, job.head)
        assert 2.0 < ratio < 4.0
        assert len(job.due()) in (
            math.ceil(job.rules.quota * ratio),
            math.ceil(job.rules.quota * ratio) - len(job.outcomes),
        )

    def test_never_more_than_the_cap_says(self) -> None:
        job = Job(rules(prompts=4000, issue_cap=2.0), share(10)).run(6)
        assert job.head.tally.issue_ratio > 2.0
        job.outcomes.clear()
        assert len(job.due()) == 2 * job.rules.quota

    def test_without_a_filter_nothing_is_ever_made_in_vain(self) -> None:
        job = Job(rules(), everything).run(20)
        assert set(job.rounds) == {1}
        assert set(job.made) == {job.rules.quota}

    def test_sizing_saves_rounds_of_generation(self) -> None:
        one_by_one = Job(rules(prompts=4000, issue_cap=1.0), share(30)).run(20)
        sized = Job(rules(prompts=4000), share(30)).run(20)
        assert sum(sized.rounds) < 0.6 * sum(one_by_one.rounds)
        assert [len(seal.groups) for seal in sized.seals] == [8] * 20

    def test_a_rollback_takes_the_size_back_too(self) -> None:
        job = Job(rules(), share(30)).run(3)
        target = job.head
        entry = job.log[target.seq].model_copy(update={"cursors": target.cursors, "tally": target.tally})
        outcomes = tuple(ended(ref, target) for ref in itertools.islice(refs_in_order(job.rules, target, ()), 5))
        job.advance(chain.account_entry(job.head, outcomes, job.rules.shape, ChainWriter("a", "n")))
        assert job.head.tally.since_step.ended == 5
        back = chain.rollback_entry(job.head, entry, "w2", ChainWriter("a", "m"), "died").head
        assert back.tally.since_step.ended == 0
        assert issue_ratio(job.rules, back) == issue_ratio(job.rules, target)

    @given(st.integers(1, 12), st.floats(1.0, 8.0), st.floats(1.0, 20.0), st.data())
    def test_refs_that_a_seal_waits_for_are_always_due(
        self, quota: int, cap: float, ratio: float, data: st.DataObject
    ) -> None:
        limit = data.draw(st.none() | st.integers(quota, 40))
        r = rules(
            prompts=60, window=8, quota=quota, issue_cap=cap, limit=limit, epochs=data.draw(st.none() | st.just(1))
        )
        head = chain.base_entry(4, "w", ChainWriter("a", "n")).head
        head = head.model_copy(update={"tally": head.tally.model_copy(update={"issue_ratio": ratio})})
        refs = list(refs_in_order(r, head, ()))
        kinds = data.draw(st.lists(st.sampled_from("gfn"), min_size=len(refs), max_size=len(refs)))
        offer = Offer(
            incarnation="a",
            groups=tuple(group(ref, head) for ref, k in zip(refs, kinds, strict=True) if k == "g"),
            outcomes=tuple(ended(ref, head) for ref, k in zip(refs, kinds, strict=True) if k == "f"),
        )
        known = OffersView.collect(r, head, [offer])
        wanted, chosen = due_refs(r, head, (), known), choose_seal(r, head, (), known)
        assert len(set(wanted)) == len(wanted)
        assert not set(wanted) & (known.groups.keys() | known.outcomes.keys())
        if isinstance(chosen, AwaitGroups):
            assert chosen.oldest == wanted[0]
            assert chosen.missing <= len(wanted)
        if limit is not None:
            assert len(wanted) <= limit

    @given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 500)), min_size=1, max_size=20))
    def test_the_ratio_stays_between_what_was_seen(self, steps: list[tuple[int, int]]) -> None:
        head = chain.base_entry(1, "w", ChainWriter("a", "n")).head
        tally, seen = head.tally, []
        for groups, outcomes in steps:
            refs = [EndedRef(ref=PromptRef(0, 0, i), kind="filtered") for i in range(outcomes)]
            kept = sum(one.kept for one in tally.sources.values()) + groups
            sources = {"data": SourceTally(kept=kept)}
            since = add_outcomes(tally.since_step, refs)
            tally = start_next_step(tally.model_copy(update={"since_step": since, "sources": sources}), groups)
            seen.append(min((groups + outcomes) / groups, 16.0))
            assert min(seen) - 1e-9 <= tally.issue_ratio <= max(seen) + 1e-9
        if len(seen) == 1:
            assert tally.issue_ratio == seen[0]


class TestLimits:
    """A step that has used up its prompts."""

    @pytest.mark.parametrize("staleness", [1, 2])
    def test_at_any_staleness_a_step_uses_up_no_more_than_its_limit_and_what_goes_on(self, staleness: int) -> None:
        job = Job(rules(prompts=4000, limit=20, staleness=staleness), share(20)).run(10)
        assert len(job.seals) == 10
        assert min(len(seal.groups) for seal in job.seals) < 8
        assert all(len(seal.outcomes) <= 20 + 8 * staleness for seal in job.seals)
        barren = Job(rules(prompts=4000, limit=20, staleness=staleness), nothing).run()
        assert barren.short is not None
        assert barren.short.groups == 0

    def test_train_smaller_seals_what_there_is(self) -> None:
        job = Job(rules(prompts=4000, limit=20), share(20)).run(10)
        assert len(job.seals) == 10
        sizes = [len(seal.groups) for seal in job.seals]
        assert min(sizes) < 8
        assert all(len(seal.groups) + len(seal.outcomes) <= 20 for seal in job.seals)
        assert {seal.padding for seal in job.seals} == {0}

    def test_pad_masked_says_in_the_seal_what_lacks(self) -> None:
        job = Job(rules(prompts=4000, limit=20, on_limit="pad_masked"), share(20)).run(10)
        assert all(len(seal.groups) + seal.padding == 8 for seal in job.seals)
        smaller = next(seal for seal in job.seals if seal.padding)
        assert smaller.padding_scale == pytest.approx(8 / len(smaller.groups))

    def test_fail_fails_with_the_counts_the_reason_and_what_to_do(self) -> None:
        job = Job(rules(prompts=4000, limit=20, on_limit="fail"), share(20)).run(10)
        assert job.short is not None
        said = shortage_reason(job.rules, job.head, job.short, job.log.values())
        kept = job.short.groups
        assert said.startswith(
            f"step {job.head.step + 1} has used up its 20 prompts (flow.max_prompts_per_step) with {kept} of 8 groups kept "
            f"({20 - kept} were filtered, 0 failed); most common reason ({20 - kept} times): all its rewards are the same; "
        )
        assert "flow.on_limit: train_smaller" in said

    @pytest.mark.parametrize("on_limit", ["train_smaller", "pad_masked", "fail"])
    def test_without_any_group_every_choice_is_a_failure(self, on_limit: str) -> None:
        job = Job(rules(prompts=4000, limit=20, on_limit=on_limit), nothing).run()
        assert job.short == DataExhausted(0, job.short.outcomes if job.short else ())
        assert job.short is not None
        said = shortage_reason(job.rules, job.head, job.short, job.log.values())
        assert "there is nothing to train on" in said
        assert "gcore samples" not in said, "of a job without a step there are none"
        later = job.head.model_copy(update={"step": 3})
        assert "(gcore samples)" in shortage_reason(job.rules, later, job.short, job.log.values())

    def test_the_count_survives_what_is_written_down_meanwhile(self) -> None:
        """The windows are smaller than the limit, so that outcomes are accounted for on the way to it."""
        job = Job(rules(prompts=4000, window=2, limit=30), nothing).run()
        assert job.short is not None
        assert job.head.tally.since_step.ended >= 16
        assert job.head.tally.since_step.ended + len(job.short.outcomes) == 30
        assert "has used up its 30 prompts" in shortage_reason(job.rules, job.head, job.short, job.log.values())

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_windows_that_hold_no_more_are_a_limit_too_and_end_as_the_spec_says(self, staleness: int) -> None:
        small = rules(prompts=4000, window=2, staleness=staleness)
        smaller = Job(small, share(20)).run(10)
        assert {seal.padding for seal in smaller.seals} == {0}
        padded = Job(replace(small, on_limit="pad_masked"), share(20)).run(10)
        assert all(len(seal.groups) + seal.padding == 8 for seal in padded.seals)
        assert all(min(len(seal.groups) for seal in job.seals) < 8 for job in (smaller, padded))
        failed = Job(replace(small, on_limit="fail"), share(20)).run(10)
        assert failed.short is not None
        said = shortage_reason(failed.rules, failed.head, failed.short, failed.log.values())
        assert said.startswith("step 2 has used up the prompts in the shards' windows (data.window), ")
        assert f" in all, with {failed.short.groups} of 8 groups kept (" in said
        assert "raise data.window or data.shards" in said

    def test_a_rest_of_an_epoch_is_no_limit(self) -> None:
        job = Job(rules(prompts=20, on_limit="fail", epochs=1), share(90)).run()
        assert job.short is None
        assert 0 < len(job.seals[-1].groups) < 8

    def test_a_limit_that_is_not_reached_changes_nothing(self) -> None:
        free, limited = (Job(rules(prompts=4000, limit=limit), share(50)).run(10) for limit in (None, 80))
        assert [s.groups for s in free.seals] == [s.groups for s in limited.seals]

    def test_a_seal_that_is_given_up_forgets_what_lacked(self) -> None:
        job = Job(rules(prompts=4000, limit=20, on_limit="pad_masked"), share(20)).run(10)
        padded = next(seal for seal in job.seals if seal.padding)
        opened = chain.reseal_slot(padded.model_copy(update={"state": SealState.SEALED}), "b")
        assert (opened.padding, opened.last, opened.planned_steps) == (0, False, None)


class TestEpochs:
    """A job that goes by prompts ends exactly when each of them has its outcome."""

    @given(
        st.integers(0, 100),
        st.integers(1, 3),
        st.integers(9, 60),
        st.integers(1, 9),
        st.integers(1, 5),
        st.integers(0, 2),
    )
    def test_it_ends_when_every_prompt_is_terminal_and_not_before(
        self, percent: int, epochs: int, prompts: int, quota: int, window: int, staleness: int
    ) -> None:
        constants = rules(prompts=prompts, window=window, quota=quota, epochs=epochs, staleness=staleness)
        job = Job(constants, share(percent)).run()
        everything_ended = job.head.cursors.terminal_count == epochs * prompts
        assert everything_ended
        assert prompts_left(job.rules, job.head) == 0
        assert all(e.ref.data_epoch < epochs for entry in job.log.values() for e in entry.delta)
        assert [seal.last for seal in job.seals] == [False] * (len(job.seals) - 1) + [True] * bool(job.seals)
        trained = sum(len(seal.groups) for seal in job.seals)
        kept = sum(
            share(percent)(PromptRef(e, s, q))
            for e in range(epochs)
            for s in range(4)
            for q in range(job.rules.shape.lengths[s])
        )
        assert trained == kept

    def test_the_last_partial_quota_makes_a_smaller_last_step(self) -> None:
        job = Job(rules(prompts=20, epochs=1), everything).run()
        assert [len(seal.groups) for seal in job.seals] == [8, 8, 4]
        assert [seal.padding for seal in job.seals] == [0, 0, 0]

    def test_a_rest_that_is_all_filtered_ends_in_an_empty_last_step(self) -> None:
        job = Job(rules(prompts=40, epochs=1), lambda ref: ref.seq < 4).run()
        assert [len(seal.groups) for seal in job.seals] == [8, 8, 0]
        assert job.seals[-1].last
        assert len(job.seals[-1].outcomes) == 24

    def test_a_rest_longer_than_one_entry_holds_ends_in_a_last_step_too(self) -> None:
        job = Job(rules(prompts=4000, window=1000, epochs=1), lambda ref: ref.seq < 4).run()
        assert job.seals[-1].last
        assert not job.seals[-1].groups
        assert job.head.cursors.terminal_count == 4000

    def test_a_job_of_which_nothing_was_trained_has_no_last_step(self) -> None:
        job = Job(rules(prompts=40, epochs=1), nothing).run()
        assert job.seals == []
        assert job.head.step == 0
        assert is_over(job.rules, job.head)

    def test_the_end_comes_before_the_limit(self) -> None:
        job = Job(rules(prompts=36, epochs=1, limit=20, on_limit="fail"), lambda ref: ref.seq < 4).run()
        assert job.short is None
        assert job.seals[-1].last

    def test_how_many_steps_there_will_be_is_known_at_the_end_and_estimated_before(self) -> None:
        job = Job(rules(prompts=400, epochs=2), share(30))
        first = planned_steps(job.rules, job.head)
        assert first == 100
        job.run()
        assert planned_steps(job.rules, job.head) == job.head.step == job.seals[-1].planned_steps
        late = [seal.planned_steps for seal in job.seals[len(job.seals) // 2 :]]
        assert all(abs(planned - job.head.step) <= 0.5 * job.head.step for planned in late if planned is not None)

    def test_a_job_that_goes_by_steps_ends_in_its_last_step(self) -> None:
        job = Job(rules(prompts=20, steps=5), share(60)).run()
        assert [seal.last for seal in job.seals] == [False] * 4 + [True]
        assert {seal.planned_steps for seal in job.seals} == {5}

    def test_a_prompt_beyond_the_epochs_is_a_violation(self) -> None:
        job = Job(rules(prompts=20, steps=5), everything).run()
        found = audit_records(replace(job.rules, steps=None, epochs=1), job.head, job.log, job.receipts)
        assert any("beyond the job's 1 data epoch" in violation for violation in found.violations)
