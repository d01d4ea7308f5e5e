"""The audit proves a good chain and refutes every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from controllers.storage.run_folder import localize_mirror
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.audit.audit import AuditInputs, audit_records
from gcore.ledger.audit.receipts import Receipt
from gcore.ledger.chain import NOTHING_SEEN, ChainWriter, HighWater, entry_digest
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import EndedRef, Head, LogEntry, Offer, OfferedGroup, Seal, SealState, Tally
from gcore.ledger.records.job import JobPhase, JobRecord
from gcore.ledger.selection import OffersView, SealStep, StreamRules, choose_seal, refs_in_order
from gcore.ledger.transactions import Versioned
from gcore.store.keys import JobKeys
from gcore.types import PromptRef, Token, Version

RULES = StreamRules(shard_lengths(40, 4), 8, 4)


@dataclass(frozen=True)
class Run:
    head: Head
    log: dict[int, LogEntry]
    receipts: tuple[Receipt, ...]


def group(ref: PromptRef, version: Version) -> OfferedGroup:
    return OfferedGroup(ref=ref, digest=f"d{ref}", prompt_tokens=3, response_tokens=(2, 2), versions=(version,))


def ready_seal(run: Run) -> Seal:
    """The next step of four groups and a filtered ref, READY for two ranks."""
    refs = list(refs_in_order(RULES, run.head, ()))[:5]
    offer = Offer(
        incarnation="n0.a",
        groups=tuple(group(ref, run.head.version) for ref in refs[1:]),
        outcomes=(EndedRef(ref=refs[0], kind="filtered", reason="constant"),),
    )
    chosen = choose_seal(RULES, run.head, (), OffersView.collect(RULES, run.head, [offer]))
    assert isinstance(chosen, SealStep)
    return chain.ready_slot(chain.seal_slot(None, run.head, chosen, world_size=2, mini_batches=1, sealer="n0.a"))


def step(run: Run, nonce: str) -> Run:
    """That step sealed and committed, and the ranks' receipts."""
    seal = ready_seal(run)
    advance = chain.commit_entry(run.head, seal, RULES.shape, ChainWriter("n0.a", nonce), keep_cursors=True)
    receipts = tuple(
        Receipt(seal.token, run.head.world, rank, {ref: frozenset(one) for ref, one in share.items()})
        for rank, share in chain.seal_shares(seal).items()
    )
    return Run(advance.head, {**run.log, advance.head.seq: advance.entry}, run.receipts + receipts)


def good_run(seen: HighWater = NOTHING_SEEN) -> Run:
    """Three steps, a rollback to the second, two more. `seen`: the highest lineage and number of which there was anything."""
    base = chain.base_entry(4, "w0", ChainWriter("n0.a", "n0"))
    run = Run(base.head, {0: base.entry}, ())
    for nonce in ("n1", "n2", "n3"):
        run = step(run, nonce)
    back = chain.rollback_entry(run.head, run.log[2], "w1", ChainWriter("n1.b", "n4"), "a rank died", seen=seen)
    run = replace(run, head=back.head, log={**run.log, back.head.seq: back.entry})
    for nonce in ("n5", "n6"):
        run = step(run, nonce)
    return run


def check(run: Run) -> tuple[str, ...]:
    return audit_records(RULES, run.head, run.log, run.receipts).violations


def test_a_good_run_with_a_rollback_is_clean_and_counted() -> None:
    found = audit_records(RULES, good_run().head, good_run().log, good_run().receipts)
    assert found.clean
    assert (found.steps, found.trained, found.filtered, found.lineages) == (4, 16, 4, 1)
    assert found.groups_by_holder == {"n0.a": 16}


def test_a_run_whose_store_was_put_back_and_skips_the_lineages_that_were_lost_is_clean() -> None:
    run = good_run(HighWater(lineage=4))
    assert run.head.lineage == 5
    assert audit_records(RULES, run.head, run.log, run.receipts).clean
    again = run.log[4].model_copy(update={"lineage": 0})
    found = audit_records(RULES, run.head, {**run.log, 4: again}, run.receipts)
    assert any("has lineage 0, expected 1" in one for one in found.violations)


def entry(run: Run, seq: int, **changes: object) -> Run:
    return replace(run, log={**run.log, seq: run.log[seq].model_copy(update=changes)})


def doubled(run: Run) -> Run:
    again = run.log[6].delta[:-1] + (run.log[5].delta[-1],)
    return entry(run, 6, delta=again)


DAMAGE: dict[str, tuple[Callable[[Run], Run], str]] = {
    "an entry is missing": (lambda r: replace(r, log={s: e for s, e in r.log.items() if s != 5}), "entry 5 is missing"),
    "a prompt is trained twice": (doubled, "ended twice"),
    "a step is left out": (lambda r: entry(r, 6, step=9), "expected 4"),
    "an entry points at another parent": (lambda r: entry(r, 5, parent=1), "expected"),
    "an entry points forward": (lambda r: entry(r, 5, parent=6), "which is impossible"),
    "head has other cursors": (
        lambda r: replace(r, head=r.head.model_copy(update={"cursors": r.log[2].cursors})),
        "cursors are not the sum",
    ),
    "head is at another step": (lambda r: replace(r, head=r.head.model_copy(update={"step": 7})), "head is at step 7"),
    "head was written by another": (lambda r: replace(r, head=r.head.model_copy(update={"nonce": "x"})), "different"),
    "a group is too old": (
        lambda r: entry(
            r, 6, delta=(r.log[6].delta[0].model_copy(update={"versions": (Version(0, 1),)}), *r.log[6].delta[1:])
        ),
        "was generated by 0.1",
    ),
    "a group is of a cut-off lineage": (
        lambda r: entry(
            r, 6, delta=(r.log[6].delta[0].model_copy(update={"versions": (Version(0, 3),)}), *r.log[6].delta[1:])
        ),
        "was generated by 0.3",
    ),
    "no rank left a receipt": (lambda r: replace(r, receipts=r.receipts[:-2]), "no rank left a receipt"),
    "the ranks trained on something else": (
        lambda r: replace(
            r, receipts=r.receipts[:-1] + (replace(r.receipts[-1], samples={PromptRef(9, 0, 0): frozenset({0})}),)
        ),
        "was trained on but not committed",
    ),
    "a sample was trained twice": (
        lambda r: replace(r, receipts=(*r.receipts, r.receipts[-1])),
        "were trained at step 4",
    ),
    "the receipts are of another world": (
        lambda r: replace(r, receipts=tuple(replace(x, world="w9") for x in r.receipts)),
        "no rank left a receipt",
    ),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refuted(damage: Callable[[Run], Run], expected: str) -> None:
    violations = check(damage(good_run()))
    assert any(expected in violation for violation in violations), violations


def test_a_rank_that_trained_on_half_of_a_group_only_is_refuted() -> None:
    run = good_run()
    last = run.receipts[-1]
    idle = replace(run.receipts[-2], samples={})
    half = replace(run, receipts=(*run.receipts[:-2], idle, last))
    refs = sorted(last.samples)
    assert check(half) == tuple(f"only samples [1] of 2 of prompt {ref} were trained at step 4" for ref in refs)


def test_a_missing_receipt_is_one_finding_that_names_the_prompts_and_not_one_for_each_of_its_samples() -> None:
    run = good_run()
    lost = run.receipts[-2]
    (finding,) = audit_records(RULES, run.head, run.log, (*run.receipts[:-2], run.receipts[-1])).findings
    assert set(finding.refs) == set(lost.samples)
    told = ", ".join(map(str, sorted(lost.samples)))
    assert finding.sentence == (
        f"rank 0 left no receipt for step 4 (token {lost.token}); samples of {told} are in no other receipt"
    )


def test_beside_a_missing_receipt_what_else_is_wrong_is_still_told() -> None:
    run = good_run()
    last = run.receipts[-1]
    refs = sorted(last.samples)
    strange = replace(last, samples={**last.samples, refs[0]: frozenset({1, 5})})
    said = check(replace(run, receipts=(*run.receipts[:-2], strange)))
    assert f"samples [1, 5] of 2 of prompt {refs[0]} were trained at step 4" in said
    nothing = replace(last, samples={ref: last.samples[ref] for ref in refs[1:]})
    (finding,) = audit_records(RULES, run.head, run.log, (*run.receipts[:-2], nothing)).findings
    assert set(finding.refs) == set(refs), "also of what no rank trained"


def test_missing_entries_in_a_row_are_one_finding() -> None:
    run = good_run()

    def missing(*seqs: int) -> list[str]:
        there = replace(run, log={seq: entry for seq, entry in run.log.items() if seq not in seqs})
        return [violation for violation in check(there) if "missing" in violation]

    assert missing(1, 2, 3) == ["log entries 1 to 3 are missing"]
    assert missing(1, 3) == ["log entry 1 is missing", "log entry 3 is missing"]
    assert missing(4, 5, 6) == ["log entries 4 to 6 are missing"], "up to head"
    assert missing(6) == ["log entry 6 is missing"]


def test_a_tally_that_is_not_the_sum_of_its_chain_is_found() -> None:
    run = good_run()
    forgetful = run.head.model_copy(update={"tally": Tally()})
    said = audit_records(RULES, forgetful, run.log, run.receipts).violations
    assert any(violation.startswith("head's tally counts 0 prompts trained") for violation in said)


def test_a_chain_without_digests_or_tallies_is_no_older_one() -> None:
    """The first version that was released writes both everywhere."""
    run = good_run()
    without = {seq: entry.model_copy(update={"parent_digest": ""}) for seq, entry in run.log.items()}
    without[0] = without[0].model_copy(update={"tally": None})
    said = audit_records(RULES, run.head.model_copy(update={"digest": ""}), without, run.receipts).violations
    assert said == (
        *(f"log entry {seq} has no digest of its parent" for seq in range(1, 7)),
        "head has no digest of its log entry 6",
        "log entry 0 (base) has no tally",
    )


def test_an_entry_that_still_adds_up_is_not_what_head_or_its_child_names() -> None:
    run = good_run()
    for seq, said in (
        (6, "log entry 6 was changed after head was written with it"),
        (5, "log entry 5 was changed"),
    ):
        other = run.log[seq].model_copy(update={"stats": {"reward": 1.0}})
        (violation,) = check(replace(run, log={**run.log, seq: other}))
        assert violation.startswith(said)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_is_as_old_as_the_spec_allows_and_no_older(staleness: int) -> None:
    run, rules = good_run(), replace(RULES, staleness=staleness)
    newest = run.log[6]
    for age in (staleness, staleness + 1):
        made = Version(1 if age == 0 else 0, 3 - age)
        older = tuple(
            one.model_copy(update={"versions": (made,)}) if one.kind == "trained" else one for one in newest.delta
        )
        entry = newest.model_copy(update={"delta": older})
        head = run.head.model_copy(update={"digest": entry_digest(entry)})
        found = audit_records(rules, head, {**run.log, 6: entry}, run.receipts).findings
        assert {finding.kind for finding in found} == ({"version"} if age > staleness else set())


@pytest.mark.parametrize("steps", [4, 5])
def test_a_job_of_so_many_steps_has_succeeded_when_it_has_made_them(steps: int) -> None:
    run = good_run()
    ended = AuditInputs(phase=JobPhase.SUCCEEDED)
    found = audit_records(replace(RULES, steps=steps), run.head, run.log, run.receipts, ended).violations
    assert found == (() if steps == 4 else ("the job has succeeded, but head is at step 4 of 5",))


def beyond(run: Run, token: Token, world: str) -> tuple[str, ...]:
    """What is said of one more receipt."""
    more = Receipt(token, world, 0, {PromptRef(0, 0, 9): frozenset({0})})
    return audit_records(RULES, run.head, run.log, (*run.receipts, more)).violations


def test_a_world_that_ended_may_have_trained_the_step_after_its_last_and_no_other() -> None:
    run = good_run()
    assert beyond(run, Token(0, 4, 1), "w0") == ()
    (violation,) = beyond(run, Token(0, 5, 1), "w0")
    assert violation == (
        "ranks of world w0 left receipts for step 5 (token 0.5.1), which no log entry names: that world ended after step 3"
    )


def test_heads_world_may_have_trained_the_step_of_a_ready_seal_only() -> None:
    run = good_run()
    (violation,) = beyond(run, Token(1, 5, 1), "w1")
    assert violation.endswith("(token 1.5.1), which no log entry names: head is at step 4")
    again = step(run, "n7")
    open_step = replace(again, head=run.head, log=run.log)
    seal = ready_seal(run)
    ready = AuditInputs(seals=[seal])
    assert audit_records(RULES, run.head, run.log, open_step.receipts, ready).violations == ()
    sealed = AuditInputs(seals=[seal.model_copy(update={"state": SealState.SEALED})])
    assert len(audit_records(RULES, run.head, run.log, open_step.receipts, sealed).violations) == 1


def test_receipts_written_during_the_audit_are_no_violation() -> None:
    """The job goes on meanwhile: only receipts from before head was read must be named by what was read."""
    run = good_run()
    ahead = step(run, "n7")
    known = frozenset((one.world, one.token) for one in run.receipts)
    assert audit_records(RULES, run.head, run.log, ahead.receipts, AuditInputs(known=known)).clean
    assert not audit_records(RULES, run.head, run.log, ahead.receipts).clean


def test_of_a_store_that_was_restored_the_lost_lineages_may_have_trained_anything() -> None:
    run = good_run(HighWater(lineage=4, entry=20))
    assert run.head.lineage == 5
    for token in (Token(0, 9, 1), Token(2, 1, 1), Token(4, 30, 2)):
        assert beyond(run, token, "w0" if token.lineage == 0 else "lost") == ()
    assert len(beyond(run, Token(0, 2, 7), "w0")) == 2, "of a step before what was lost"
    assert len(beyond(run, Token(7, 2, 1), "lost")) == 1


def test_all_nodes_of_a_job_compute_one_digest_of_it_although_each_has_its_own_folder() -> None:
    spec = {"storage": {"copies": 2}}
    job = JobRecord(uid="u", name="j", spec=spec, run_dir="/first/runs/j-u", created=1.0, prompts=40)
    here = localize_mirror(JobMirror(JobKeys("u"), job=Versioned(job, 1)), Path("/second/runs"))
    assert here.job_record.run_dir == "/second/runs/j-u"
    assert chain.job_digest(here.job_record) == chain.job_digest(job)
    assert chain.job_digest(job.model_copy(update={"prompts": 41})) != chain.job_digest(job)
