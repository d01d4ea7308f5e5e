"""Damage to a job's records that an audit must find, with its kind and the affected prompts (none where an entry, a step or a record
is damaged and no prompt).

Each corruption takes a `Scene`, any job with at least two committed steps, some entries in the archive and receipts, and edits
the store or the folder as a person could. All other records stay as they were, except where a simpler check
would find the damage first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gcore.data.order import Cursors, ShardCursor
from gcore.ledger.audit.chain import MOST_REFS, Kind
from gcore.ledger.chain import entry_digest
from gcore.ledger.records.chain import Checkpoint, Checkpoints, EndedRef, Head, Lineage, LogEntry, Seal, SealState
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.selection import StreamRules, resumable_checkpoints, rules_of
from gcore.types import PromptRef, Token, Version


@dataclass
class Scene:
    """A job's keys without their prefix, and its run's folder."""

    records: dict[str, bytes]
    run_dir: Path

    @property
    def head(self) -> Head:
        return Head.decode(self.records["head"])

    def put_head(self, **changes: Any) -> None:
        self.records["head"] = self.head.model_copy(update=changes).encode()

    @property
    def rules(self) -> StreamRules:
        return rules_of(JobRecord.decode(self.records["job"]))

    def apart(self, told: Cursors, true: Cursors) -> tuple[PromptRef, ...]:
        """The first prompts that have ended by one of them only; a shard that `told` lacks has ended nothing."""
        shape, refs = self.rules.shape, []
        for number, mine in enumerate(true.shards):
            other = told.shards[number] if number < len(told.shards) else ShardCursor()
            first = min(mine.low_water, other.low_water)
            refs += [
                shape.ref(number, position)
                for position in range(first, first + FAR)
                if mine.is_terminal(position) != other.is_terminal(position)
            ]
        return tuple(refs[:MOST_REFS])

    @property
    def log(self) -> dict[int, LogEntry]:
        """The job's keys in the store."""
        return {int(key[4:]): LogEntry.decode(value) for key, value in self.records.items() if key.startswith("log/")}

    def put_entry(self, entry: LogEntry, **changes: Any) -> None:
        """Under its old number, whatever it says."""
        self.records[f"log/{entry.seq:012d}"] = entry.model_copy(update=changes).encode()

    @property
    def trained(self) -> list[LogEntry]:
        """The steps of the final lineage that the store still has, newest first."""
        found, seq, log = [], self.head.seq, self.log
        while seq in log and log[seq].parent is not None:
            if log[seq].kind == "train":
                found.append(log[seq])
            seq = log[seq].parent or 0
        return found

    def receipts_of(self, entry: LogEntry) -> list[tuple[Path, int, dict[str, Any]]]:
        """File, line and content of each rank's receipt for a step."""
        found = []
        for file in sorted((self.run_dir / "receipts").glob(f"{entry.world}-*.jsonl")):
            for number, line in enumerate(file.read_text().splitlines()):
                tree = json.loads(line)
                if tree["token"] == str(entry.token):
                    found.append((file, number, tree))
        return found

    def edit_receipt(
        self, entry: LogEntry, edit: Callable[[dict[str, Any]], dict[str, Any] | None], rank: int = 0
    ) -> None:
        file, number, tree = self.receipts_of(entry)[rank]
        lines = file.read_text().splitlines()
        changed = edit(tree)
        lines[number : number + 1] = [] if changed is None else [json.dumps(changed, separators=(",", ":"))]
        file.write_text("".join(line + "\n" for line in lines))

    @property
    def archived(self) -> tuple[Path, list[LogEntry]]:
        """The first archive file and its entries."""
        file = min((self.run_dir / "log").glob("*.jsonl"))
        return file, [LogEntry.decode(line) for line in file.read_bytes().splitlines()]

    def put_archived(self, entries: list[LogEntry]) -> None:
        self.archived[0].write_bytes(b"".join(entry.encode() + b"\n" for entry in entries))


FAR = 1000
"""Positions of a shard in which damaged cursors are compared with the true ones."""
About = Literal["prompts", "an entry", "a step", "a record"]


@dataclass(frozen=True)
class Refuted:
    """What the audit must say at least: one finding of this kind, which has the words and names exactly these prompts.

    `about`: what else it is about; then it names no prompt, for none is at fault, or which are cannot be known.
    """

    kind: Kind
    refs: tuple[PromptRef, ...] = ()
    words: str = ""
    about: About = "prompts"

    def __post_init__(self) -> None:
        assert bool(self.refs) == (self.about == "prompts"), "a finding is about prompts, or says about what else"


def with_ref(one: EndedRef, ref: PromptRef) -> EndedRef:
    return one.model_copy(update={"ref": ref})


def first_trained(entry: LogEntry) -> EndedRef:
    return next(one for one in entry.delta if one.kind == "trained")


def swapped(entry: LogEntry, new: EndedRef) -> tuple[EndedRef, ...]:
    old = first_trained(entry)
    return tuple(new if one is old else one for one in entry.delta)


def entry_removed(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    del scene.records[f"log/{entry.seq:012d}"]
    return Refuted("chain", words=f"log entry {entry.seq} is missing", about="an entry")


def archived_line_removed(scene: Scene) -> Refuted:
    _, entries = scene.archived
    scene.put_archived(entries[1:])
    return Refuted("chain", words=f"log entry {entries[0].seq} is missing", about="an entry")


def archived_line_changed(scene: Scene) -> Refuted:
    """So that everything still adds up."""
    _, entries = scene.archived
    number = next(n for n, entry in enumerate(entries) if entry.delta)
    one = entries[number].delta[-1].model_copy(update={"holder": "somebody.else"})
    entries[number] = entries[number].model_copy(update={"delta": (*entries[number].delta[:-1], one)})
    scene.put_archived(entries)
    return Refuted("chain", words=f"log entry {entries[number].seq} was changed", about="an entry")


def archived_in_two_forms(scene: Scene) -> Refuted:
    file, entries = scene.archived
    other = entries[0].model_copy(update={"reason": "another"})
    file.with_name("zz.jsonl").write_bytes(other.encode() + b"\n")
    return Refuted("record", words=f"log entry {other.seq} was archived in two different versions", about="a record")


def outcome_taken_away(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    gone = first_trained(entry)
    scene.put_entry(entry, delta=tuple(one for one in entry.delta if one is not gone))
    return Refuted("cursors", (gone.ref,), "cursors are not the sum")


def ended_twice(scene: Scene) -> Refuted:
    newest, before = scene.trained[:2]
    ref = first_trained(before).ref
    scene.put_entry(newest, delta=swapped(newest, with_ref(first_trained(newest), ref)))
    return Refuted("outcome", (ref,), f"ended twice: in entries {before.seq} and {newest.seq}")


def ref_replaced(scene: Scene) -> Refuted:
    """By one that is far ahead of what may be issued."""
    entry = scene.trained[0]
    old = first_trained(entry)
    ref = PromptRef(old.ref.data_epoch + 10**6, old.ref.shard, old.ref.seq)
    scene.put_entry(entry, delta=swapped(entry, with_ref(old, ref)))
    return Refuted("outcome", (ref,), f"prompt {ref} ended in entry {entry.seq}")


def ref_of_no_prompt(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    old = first_trained(entry)
    ref = PromptRef(0, old.ref.shard, 10**9)
    scene.put_entry(entry, delta=swapped(entry, with_ref(old, ref)))
    return Refuted("outcome", (ref,), "but the job has no such prompt")


def kind_changed(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    old = first_trained(entry)
    scene.put_entry(entry, delta=swapped(entry, old.model_copy(update={"kind": "filtered", "reason": "constant"})))
    return Refuted("receipt", (old.ref,), "was trained on but not committed")


def step_skipped(scene: Scene) -> Refuted:
    """By head as well."""
    entry = scene.trained[0]
    assert scene.head.seq == entry.seq
    scene.put_entry(entry, step=entry.step + 1)
    scene.put_head(step=entry.step + 1)
    return Refuted("step", words=f"expected {entry.step}", about="a step")


def version_from_nowhere(scene: Scene) -> Refuted:
    """A state that the chain never went through: a later step of the first lineage, or of its own."""
    entry = scene.trained[0]
    strange = Version(0, entry.step + 7)
    old = first_trained(entry)
    scene.put_entry(entry, delta=swapped(entry, old.model_copy(update={"versions": (strange,)})))
    return Refuted("version", (old.ref,), f"was generated by {strange}")


def version_too_old(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    old = first_trained(entry)
    scene.put_entry(entry, delta=swapped(entry, old.model_copy(update={"versions": (Version(0, 0),)})))
    return Refuted("version", (old.ref,), "was generated by 0.0")


def parent_changed(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    scene.put_entry(entry, parent=0)
    return Refuted("chain", words=f"has parent 0, expected {entry.seq - 1}", about="an entry")


def other_transaction(scene: Scene) -> Refuted:
    """A writer that should have lost has written its entry over head's."""
    entry = scene.trained[0]
    scene.put_entry(entry, nonce="another")
    return Refuted("chain", words="were written by different transactions", about="an entry")


def cursors_ahead(scene: Scene) -> Refuted:
    """A prompt counts as ended that was never started."""
    head = scene.head
    shard = head.cursors.shards[0]
    changed = ShardCursor(shard.low_water, shard.beyond | 1 << 63)
    return Refuted("balance", put_cursors(scene, (changed, *head.cursors.shards[1:])), "prompts were issued")


def put_cursors(scene: Scene, shards: tuple[ShardCursor, ...]) -> tuple[PromptRef, ...]:
    """Into head; the prompts that have ended by these, or by the true ones, only."""
    true, told = scene.head.cursors, Cursors(shards)
    scene.put_head(cursors=told)
    return scene.apart(told, true)


def cursors_behind(scene: Scene) -> Refuted:
    """A prompt that was trained would be issued again."""
    entry = scene.trained[0]
    ref = max(one.ref for one in entry.delta if one.kind == "trained" and one.ref.shard == entry.delta[-1].ref.shard)
    head = scene.head
    assert ref.data_epoch == 0
    cursors = list(head.cursors.shards)
    cursors[ref.shard] = ShardCursor(
        ref.seq,
        cursors[ref.shard].beyond >> (ref.seq - cursors[ref.shard].low_water)
        if ref.seq > cursors[ref.shard].low_water
        else 0,
    )
    refs = put_cursors(scene, tuple(cursors))
    assert ref in refs
    return Refuted("cursors", refs, "cursors are not the sum")


def kept_cursors_changed(scene: Scene) -> Refuted:
    entry = next(entry for entry in scene.log.values() if entry.cursors is not None and entry.kind == "train")
    assert entry.cursors is not None
    shard = entry.cursors.shards[0]
    changed = Cursors((ShardCursor(shard.low_water + 1), *entry.cursors.shards[1:]))
    scene.put_entry(entry, cursors=changed)
    return Refuted(
        "cursors", scene.apart(changed, entry.cursors), f"the cursors in log entry {entry.seq} are not the sum"
    )


def tally_changed(scene: Scene) -> Refuted:
    head = scene.head
    name, one = next(iter(head.tally.sources.items()))
    sources = {**head.tally.sources, name: one.model_copy(update={"kept": one.kept + 1})}
    scene.put_head(tally=head.tally.model_copy(update={"sources": sources}))
    return Refuted("tally", words="head's tally counts", about="a record")


def lineages_changed(scene: Scene) -> Refuted:
    head = scene.head
    extra = Lineage(number=head.lineage, base_step=99)
    scene.put_head(lineages=(*head.lineages[:-1], extra))
    return Refuted("chain", words="lineages differ from those that the rollbacks in the log began", about="a record")


def head_set_back(scene: Scene) -> Refuted:
    """To what it was a step before, all of a piece: a commit was lost."""
    newest = scene.trained[0]
    scene.put_head(seq=newest.seq - 1)
    return Refuted("chain", tuple(one.ref for one in newest.delta), f"log entry {newest.seq} is beyond head")


def receipt_removed(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    tree = scene.receipts_of(entry)[0][2]
    refs = trained_by(tree)
    scene.edit_receipt(entry, lambda tree: None)
    words = f"rank {tree['rank']} left no receipt" if entry.ranks != 1 else "no rank left a receipt"
    return Refuted("receipt", refs, words)


def trained_by(receipt: dict[str, Any]) -> tuple[PromptRef, ...]:
    """The prompts of which a rank says that it trained samples."""
    return tuple(PromptRef.parse(name) for name, _, samples in receipt["groups"] if samples)


def receipt_of_another_group(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    ref = PromptRef.parse(scene.receipts_of(entry)[0][2]["groups"][0][0])

    def edit(tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, "groups": [[tree["groups"][0][0], "f" * 32, tree["groups"][0][2]], *tree["groups"][1:]]}

    scene.edit_receipt(entry, edit)
    return Refuted("receipt", (ref,), f"trained on group {'f' * 32}")


def receipt_of_another_token(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    token = entry.token
    assert token is not None
    other = Token(token.lineage, token.step, token.attempt + 1)
    refs = trained_by(scene.receipts_of(entry)[0][2])
    scene.edit_receipt(entry, lambda tree: {**tree, "token": str(other)})
    return Refuted("receipt", refs, f"under two tokens, {token} and {other}" if entry.ranks != 1 else "no rank left")


def receipt_twice(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    file, number, tree = scene.receipts_of(entry)[0]
    lines = file.read_text().splitlines()
    file.write_text("".join(line + "\n" for line in [*lines, lines[number]]))
    return Refuted("receipt", trained_by(tree), f"rank {tree['rank']} left several receipts")


def sample_left_out(scene: Scene) -> Refuted:
    """The last of a group: those that are left still look whole."""
    entry = scene.trained[0]
    ref = first_trained(entry).ref
    papers = scene.receipts_of(entry)
    last = max(max(samples) for _, _, tree in papers for name, _, samples in tree["groups"] if name == str(ref))

    def edit(tree: dict[str, Any]) -> dict[str, Any]:
        groups = [[n, d, [s for s in samples if n != str(ref) or s != last]] for n, d, samples in tree["groups"]]
        return {**tree, "groups": groups}

    for rank in range(len(papers)):
        scene.edit_receipt(entry, edit, rank)
    return Refuted("receipt", (ref,), f"of prompt {ref} were trained at step {entry.step}")


def sealed_again(scene: Scene) -> Refuted:
    """An open seal that holds what has been trained."""
    head, entry = scene.head, scene.trained[0]
    one = first_trained(entry)
    seal = Seal(
        lineage=head.lineage, step=head.step + 1, attempt=9, state=SealState.SEALED, world=head.world, world_size=1,
        mini_batches=1, outcomes=(EndedRef(ref=one.ref, kind="failed", reason="again"),),
    )  # fmt: skip
    scene.records[f"seal/{seal.step:012d}"] = seal.encode()
    return Refuted("open", (one.ref,), "which already has an outcome")


def seal_of_another_lineage(scene: Scene) -> Refuted:
    head = scene.head
    ref = first_trained(scene.trained[0]).ref
    seal = Seal(
        lineage=head.lineage + 1, step=head.step + 1, attempt=1, state=SealState.SEALED, world=head.world, world_size=1,
        mini_batches=1, outcomes=(EndedRef(ref=ref, kind="failed", reason="of a world that is gone"),),
    )  # fmt: skip
    scene.records[f"seal/{seal.step:012d}"] = seal.encode()
    return Refuted("open", (ref,), f"has lineage {head.lineage + 1}")


def checkpoint_of_another_step(scene: Scene) -> Refuted:
    known = Checkpoints.decode(scene.records["ckpts"])
    newest = next(one for one in resumable_checkpoints(scene.head, known.entries) if one.file)
    changed = tuple(one.model_copy(update={"step": one.step + 1}) if one == newest else one for one in known.entries)
    scene.records["ckpts"] = Checkpoints(entries=changed).encode()
    return Refuted("checkpoint", words=f"names log entry {newest.seq}", about="a record")


def half_a_record(scene: Scene) -> Refuted:
    scene.records["head"] = scene.records["head"][:-20]
    return Refuted("record", words="this gcore cannot read the head", about="a record")


def absurd_head(scene: Scene) -> Refuted:
    """A number that no memory could count up to."""
    last = scene.head.seq
    scene.put_head(seq=10**15)
    return Refuted("chain", words=f"log entries {last + 1} to {10**15} are missing", about="an entry")


def absurd_ref(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    old = first_trained(entry)
    ref = PromptRef(10**15, old.ref.shard, old.ref.seq)
    scene.put_entry(entry, delta=swapped(entry, with_ref(old, ref)))
    return Refuted("outcome", (ref,), f"prompt {ref} ended in entry {entry.seq}")


def absurd_cursors(scene: Scene) -> Refuted:
    refs = put_cursors(scene, (ShardCursor(10**15), *scene.head.cursors.shards[1:]))
    return Refuted("balance", refs, "prompts were issued")


def shards_lost(scene: Scene) -> Refuted:
    shards = scene.head.cursors.shards
    return Refuted("cursors", put_cursors(scene, shards[:-1]), f"head has cursors of {len(shards) - 1} shards")


def said_to_have_succeeded(scene: Scene) -> Refuted:
    """Though the newest step is gone, with everything that names it."""
    newest, before = scene.trained[:2]
    assert newest.parent == before.seq == scene.head.seq - 1
    head = scene.head
    taken = [one.ref for one in newest.delta]
    cursors = list(head.cursors.shards)
    for ref in sorted(taken, reverse=True):
        shard = cursors[ref.shard]
        bits = (1 << shard.low_water) - 1 | shard.beyond << shard.low_water
        bits &= ~(1 << ref.seq)
        low = (~bits & (bits + 1)).bit_length() - 1
        cursors[ref.shard] = ShardCursor(low, bits >> low)
    del scene.records[f"log/{newest.seq:012d}"]
    for key in [key for key in scene.records if key.startswith("seal/")]:
        del scene.records[key]
    scene.put_head(
        seq=before.seq, parent=before.parent, step=before.step, nonce=before.nonce, cursors=Cursors(tuple(cursors)),
        digest="",
    )  # fmt: skip
    scene.records["state"] = JobStatus(phase=JobPhase.SUCCEEDED, reason="all is done").encode()
    rules, words = scene.rules, "the job has succeeded, but"
    if rules.epochs is None:
        return Refuted("end", words=words, about="a step")
    whole = Cursors(tuple(ShardCursor(rules.epochs * length) for length in rules.shape.lengths))
    return Refuted("end", scene.apart(scene.head.cursors, whole), words)


def head_removed(scene: Scene) -> Refuted:
    """Of a job that has ended, so that it could pass for one that never began."""
    del scene.records["head"]
    scene.records["state"] = JobStatus(phase=JobPhase.SUCCEEDED, reason="all is done").encode()
    return Refuted("record", words="log entries", about="a record")


def head_and_log_removed(scene: Scene) -> Refuted:
    """The receipts, the archive and the checkpoints are left."""
    for key in [key for key in scene.records if key in ("head", "ckpts") or key.startswith(("log/", "seal/", "eval/"))]:
        del scene.records[key]
    for file in (scene.run_dir / "log").glob("*.jsonl"):
        file.unlink()
    scene.records["state"] = JobStatus(phase=JobPhase.CANCELLED, reason="nobody wanted it").encode()
    return Refuted("record", words="receipts", about="a record")


def state_removed(scene: Scene) -> Refuted:
    del scene.records["state"]
    return Refuted("record", words="state is missing", about="a record")


def said_to_be_pending(scene: Scene) -> Refuted:
    scene.records["state"] = JobStatus(phase=JobPhase.PENDING).encode()
    return Refuted("record", words="state is PENDING", about="a record")


def trained_beyond_head(scene: Scene) -> Refuted:
    """By every rank, in head's own world, and no seal is READY."""
    entry = scene.trained[0]
    assert entry.token is not None
    return _receipts_under(scene, entry, entry.token._replace(step=scene.head.step + 1), "which no log entry names")


def trained_in_no_lineage(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    assert entry.token is not None
    return _receipts_under(scene, entry, entry.token._replace(lineage=scene.head.lineage + 5), "has no such world")


def _receipts_under(scene: Scene, entry: LogEntry, token: Token, words: str) -> Refuted:
    """The receipts of a step once more, under another token and with prompts of their own."""
    refs: set[PromptRef] = set()
    for file, _, tree in scene.receipts_of(entry):
        refs.update(map(PromptRef.parse, (name for name, _, _ in tree["groups"])))
        with file.open("a") as lines:
            lines.write(json.dumps({**tree, "token": str(token)}, separators=(",", ":")) + "\n")
    return Refuted("receipt", tuple(sorted(refs)), words)


def head_names_no_entry(scene: Scene) -> Refuted:
    """And its entry says something else that adds up."""
    entry = scene.trained[0]
    scene.put_entry(entry, stats={"reward": 1.0})
    scene.put_head(digest="")
    return Refuted("chain", words=f"head has no digest of its log entry {entry.seq}", about="an entry")


def entry_names_no_parent(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    scene.put_entry(entry, parent_digest="")
    return Refuted("chain", words=f"log entry {entry.seq} has no digest of its parent", about="an entry")


def group_without_content(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    old = first_trained(entry)
    scene.put_entry(entry, delta=swapped(entry, old.model_copy(update={"digest": ""})))
    return Refuted("receipt", (old.ref,), "has no digest")


def ranks_not_told(scene: Scene) -> Refuted:
    entry = scene.trained[0]
    scene.put_entry(entry, ranks=None)
    return Refuted("receipt", words="has no number of ranks", about="an entry")


def _registered(scene: Scene) -> tuple[Checkpoint, ...]:
    entries = Checkpoints.decode(scene.records["ckpts"]).entries
    assert len(entries) > 2
    return entries


def checkpoints_swapped(scene: Scene) -> Refuted:
    first, one, other, *rest = _registered(scene)
    scene.records["ckpts"] = Checkpoints(entries=(first, other, one, *rest)).encode()
    return Refuted("checkpoint", words="is listed after", about="a record")


def checkpoint_doubled(scene: Scene) -> Refuted:
    entries = _registered(scene)
    scene.records["ckpts"] = Checkpoints(entries=(*entries, entries[-1])).encode()
    return Refuted("checkpoint", words="is listed after", about="a record")


def checkpoint_elsewhere(scene: Scene) -> Refuted:
    """A path that climbs out of the run's folder."""
    *entries, newest = _registered(scene)
    there = newest.model_copy(update={"file": f"checkpoints/../../{newest.file}"})
    scene.records["ckpts"] = Checkpoints(entries=(*entries, there)).encode()
    return Refuted("checkpoint", words=f"has the wrong path, expected {newest.file}", about="a record")


def checkpoint_of_other_content(scene: Scene) -> Refuted:
    *entries, newest = _registered(scene)
    other = newest.model_copy(update={"digest": "0" * 64})
    scene.records["ckpts"] = Checkpoints(entries=(*entries, other)).encode()
    return Refuted("checkpoint", words="was registered with manifest 0000", about="a record")


def checkpoint_of_another_job(scene: Scene) -> Refuted:
    """Its folder, and the digest with it."""
    *entries, newest = _registered(scene)
    file = scene.run_dir / newest.file / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "job_uid": "f" * 12}, separators=(",", ":")))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    scene.records["ckpts"] = Checkpoints(entries=(*entries, newest.model_copy(update={"digest": digest}))).encode()
    return Refuted("checkpoint", words=f"of job {'f' * 12}", about="a record")


def job_of_no_possible_spec(scene: Scene) -> Refuted:
    job = JobRecord.decode(scene.records["job"])
    spec = {**job.spec, "rollout": {**job.spec["rollout"], "staleness": 3}}
    scene.records["job"] = job.model_copy(update={"spec": spec}).encode()
    return Refuted("record", words="describes no valid job", about="a record")


def job_changed(scene: Scene) -> Refuted:
    """To one of another seed, which would be as possible."""
    job = JobRecord.decode(scene.records["job"])
    spec = {**job.spec, "seed": 77}
    scene.records["job"] = job.model_copy(update={"spec": spec}).encode()
    return Refuted("record", words="the job's record was changed after log entry 0", about="a record")


def binding_dropped(scene: Scene) -> Refuted:
    """From the newest entry, with the digests to fit."""
    entry = scene.trained[0].model_copy(update={"job": "", "head": "", "shares": ""})
    scene.put_entry(entry)
    scene.put_head(digest=entry_digest(entry))
    return Refuted("chain", words=f"log entry {entry.seq} has no digest of the job's record", about="an entry")


def tokens_of_tally_changed(scene: Scene) -> Refuted:
    """Which no entry adds up to."""
    head = scene.head
    name, one = next(iter(head.tally.sources.items()))
    sources = {**head.tally.sources, name: one.model_copy(update={"tokens": one.tokens + 1})}
    scene.put_head(tally=head.tally.model_copy(update={"sources": sources}))
    return Refuted("chain", words=f"head was changed after log entry {head.seq} was written", about="an entry")


def shares_swapped(scene: Scene) -> Refuted:
    """Two ranks' receipts say that each trained the other's samples; each sample still counts once."""
    entry = scene.trained[0]
    papers = scene.receipts_of(entry)
    assert len(papers) > 1
    (_, _, one), (_, _, other) = papers[:2]
    scene.edit_receipt(entry, lambda tree: {**tree, "groups": other["groups"]}, 0)
    scene.edit_receipt(entry, lambda tree: {**tree, "groups": one["groups"]}, 1)
    return Refuted("receipt", words=f"trained other shares of step {entry.step}", about="a step")


CORRUPTIONS: tuple[Callable[[Scene], Refuted], ...] = (
    job_changed,
    binding_dropped,
    tokens_of_tally_changed,
    shares_swapped,
    head_removed,
    head_and_log_removed,
    state_removed,
    said_to_be_pending,
    trained_beyond_head,
    trained_in_no_lineage,
    head_names_no_entry,
    entry_names_no_parent,
    group_without_content,
    ranks_not_told,
    checkpoints_swapped,
    checkpoint_doubled,
    checkpoint_elsewhere,
    checkpoint_of_other_content,
    checkpoint_of_another_job,
    job_of_no_possible_spec,
    entry_removed,
    archived_line_removed,
    archived_line_changed,
    archived_in_two_forms,
    outcome_taken_away,
    ended_twice,
    ref_replaced,
    ref_of_no_prompt,
    kind_changed,
    step_skipped,
    version_from_nowhere,
    version_too_old,
    parent_changed,
    other_transaction,
    cursors_ahead,
    cursors_behind,
    kept_cursors_changed,
    tally_changed,
    lineages_changed,
    head_set_back,
    receipt_removed,
    receipt_of_another_group,
    receipt_of_another_token,
    receipt_twice,
    sample_left_out,
    sealed_again,
    seal_of_another_lineage,
    checkpoint_of_another_step,
    half_a_record,
    absurd_head,
    absurd_ref,
    absurd_cursors,
    shards_lost,
    said_to_have_succeeded,
)
