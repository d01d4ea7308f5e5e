"""Samples for users: the selected groups, the time of writing, the files' contents, and their removal."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from controllers.flow.group_buffer import GroupBuffer
from controllers.telemetry.run_recorder import SampleWriter
from gcore.config.spec import SamplesSpec
from gcore.data.order import Cursors
from gcore.ledger.balance import SampleSlot
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head, Lineage, LogEntry, Seal, SealedGroup, SealState
from gcore.ledger.transactions import Versioned
from gcore.observability import samples as folder
from gcore.observability.samples import KeptAdvantage, KeptText, choose_groups, find_picture, make_kept_group
from gcore.store.keys import JobKeys
from gcore.train.batching import BatchIndex
from gcore.train.step import show_advantages
from gcore.types import DenoisingTrajectory, Group, Medium, Prompt, PromptRef, Sample, Version, VersionSpan

ME = "node-0.abc"


def group(shard: int, seq: int = 0, reward: float = 1.0) -> Group:
    samples = tuple(
        Sample(
            (1, 2),
            (-0.1, -0.2),
            f"answer {i}",
            "stop",
            (VersionSpan(Version(0, 0), 0, 2),),
            reward * i,
            (("right", float(i)),),
        )
        for i in range(2)
    )
    return Group(PromptRef(0, shard, seq), (5, 6), samples, "sums")


def sealed(one: Group, holder: str = ME) -> SealedGroup:
    return SealedGroup(
        ref=one.ref, digest=one.digest(), prompt_tokens=2, response_tokens=(2, 2), versions=one.versions, holder=holder
    )


def seal(groups: list[SealedGroup], state: SealState = SealState.SEALED, step: int = 1, attempt: int = 1) -> Seal:
    return Seal(
        lineage=0,
        step=step,
        attempt=attempt,
        state=state,
        world="w",
        world_size=1,
        mini_batches=1,
        groups=tuple(groups),
    )


def mirror(*seals: Seal, step: int = 0, lineage: int = 0, log: tuple[LogEntry, ...] = ()) -> JobMirror:
    head = Head(
        seq=step, parent=None, lineage=lineage, step=step, cursors=Cursors.start(2),
        lineages=(Lineage(number=0, base_step=0),), world="w", nonce="n",
    )  # fmt: skip
    return JobMirror(
        JobKeys("u"),
        head=Versioned(head, 1),
        seals={s.step: Versioned(s, 1) for s in seals},
        log={e.seq: Versioned(e, 1) for e in log},
    )


class Source:
    """Shows the ref as the prompt."""

    source = SimpleNamespace(reward=SimpleNamespace(answer="answer"))

    def unfiltered(self, entry: int, ref: PromptRef) -> Prompt:
        return Prompt(ref, f"prompt {ref}", (5, 6), {"answer": entry}, "sums")


class Told(list[str]):
    """The warnings for users."""

    async def __call__(self, topic: str, sentence: str) -> None:
        self.append(f"{topic}: {sentence}")


def keeper(run_dir: Path, warn: Told | None = None, blobs: Path | None = None, **spec: int) -> SampleWriter:
    one = SampleWriter(ME, Told() if warn is None else warn)
    stream: Any = SimpleNamespace(found=lambda ref: (Source(), 7))
    job: Any = SimpleNamespace(samples=SamplesSpec(**spec))
    one.open(job, stream, run_dir, blobs)
    return one


def holding(*groups: Group) -> GroupBuffer:
    found = GroupBuffer()
    for one in groups:
        found.add_group(one)
    return found


def committed(one: Seal) -> LogEntry:
    return LogEntry(
        seq=one.step, parent=0, kind="train", lineage=0, step=one.step, world="w", nonce="n", token=one.token
    )


async def test_held_groups_of_a_ready_batch_are_written_with_prompt_and_answer(tmp_path: Path) -> None:
    one, other = group(0), group(1)
    held, both = holding(one), [sealed(one), sealed(other, "node-1.def")]
    samples = keeper(tmp_path)
    samples.note(mirror(seal(both)), held.group)
    await samples.write()
    assert folder.kept_steps(tmp_path) == []
    samples.note(mirror(seal(both, SealState.READY)), held.group)
    await samples.write()
    (kept,) = folder.read_groups(tmp_path, Version(0, 1))
    assert (kept.prompt.text, kept.answer, kept.source, kept.holder) == ("prompt 0/0/0", "7", "sums", ME)
    assert [s.response.text for s in kept.samples] == ["answer 0", "answer 1"]
    assert [dict(s.parts) for s in kept.samples] == [{"right": 0.0}, {"right": 1.0}]
    assert {s.versions for s in kept.samples} == {("0.0",)}


async def test_a_batch_whose_commit_comes_with_its_ready_is_written_too(tmp_path: Path) -> None:
    one = group(0)
    batch = seal([sealed(one)])
    samples = keeper(tmp_path)
    samples.note(mirror(batch), holding(one).group)
    samples.note(mirror(step=1, log=(committed(batch),)), GroupBuffer().group)
    await samples.write()
    assert folder.kept_steps(tmp_path) == [Version(0, 1)]


async def test_a_batch_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    one, other = group(0), group(1)
    samples = keeper(tmp_path)
    samples.note(mirror(seal([sealed(one)])), holding(one, other).group)
    again = seal([sealed(other)], SealState.READY, attempt=2)
    samples.note(mirror(again), holding(one, other).group)
    samples.note(mirror(step=1, log=(committed(again),)), GroupBuffer().group)
    await samples.write()
    assert [kept.ref.shard for kept in folder.read_groups(tmp_path, Version(0, 1))] == [1]


async def test_a_rollback_forgets_what_was_sealed(tmp_path: Path) -> None:
    one = group(0)
    samples = keeper(tmp_path)
    samples.note(mirror(seal([sealed(one)])), holding(one).group)
    samples.note(mirror(lineage=1), GroupBuffer().group)
    samples.note(mirror(seal([sealed(one)], SealState.READY), lineage=1), GroupBuffer().group)
    await samples.write()
    assert folder.kept_steps(tmp_path) == []


async def test_steps_that_are_not_due_leave_nothing_and_the_oldest_go(tmp_path: Path) -> None:
    samples = keeper(tmp_path, every=2, keep=2)
    for step in range(1, 9):
        one = group(0, step)
        batch = seal([sealed(one)], SealState.READY, step)
        samples.note(mirror(batch, step=step - 1), holding(one).group)
        await samples.write()
    assert folder.kept_steps(tmp_path) == [Version(0, 6), Version(0, 8)]


PNG, JPEG = b"\x89PNG" + bytes(600_000), b"\xff\xd8\xff\xe0" + bytes(600_000)


def stored_picture(blobs: Path, content: bytes) -> Medium:
    """Put a picture into the job's folder in a blob store."""
    name = hashlib.sha256(content).hexdigest()
    (blobs / name[:2]).mkdir(parents=True, exist_ok=True)
    (blobs / name[:2] / name).write_bytes(content)
    return Medium("picture", name, len(content), (32, 48, 3), "uint8")


async def keep_step(samples: SampleWriter, step: int, *media: Medium) -> None:
    one = replace(group(0, step), media=media)
    samples.note(mirror(seal([sealed(one)], SealState.READY, step), step=step - 1), holding(one).group)
    await samples.write()


async def test_pictures_are_linked_into_the_folder_of_their_step(tmp_path: Path) -> None:
    run_dir, blobs = tmp_path / "run", tmp_path / "blobs"
    png, jpeg = stored_picture(blobs, PNG), stored_picture(blobs, JPEG)
    gone = png._replace(sha256="ab" * 32)
    samples = keeper(run_dir, blobs=blobs)
    await keep_step(samples, 1, png, jpeg, gone)
    (kept,) = folder.read_groups(run_dir, Version(0, 1))
    assert [(one.sha256, one.height, one.width) for one in kept.pictures] == [
        (one.sha256, 32, 48) for one in (png, jpeg, gone)
    ]
    files = [find_picture(run_dir, Version(0, 1), one.sha256) for one in kept.pictures]
    assert [None if file is None else file.suffix for file in files] == [".png", ".jpg", None]
    assert files[0] is not None
    assert files[0].samefile(blobs / png.sha256[:2] / png.sha256)
    shutil.rmtree(blobs)
    assert files[0].read_bytes() == PNG


async def test_pictures_of_tools_are_kept_with_their_response(tmp_path: Path) -> None:
    run_dir, blobs = tmp_path / "run", tmp_path / "blobs"
    png, jpeg = stored_picture(blobs, PNG), stored_picture(blobs, JPEG)
    one = replace(group(0, 1), media=(png,))
    first, second = one.samples
    first = Sample(output=first.output._replace(media=(jpeg, png)), finish_reason="stop")
    one = replace(one, samples=(first, second))
    samples = keeper(run_dir, blobs=blobs, picture_mib=2)
    samples.note(mirror(seal([sealed(one)], SealState.READY, 1), step=0), holding(one).group)
    await samples.write()
    (kept,) = folder.read_groups(run_dir, Version(0, 1))
    assert [[picture.sha256 for picture in sample.pictures] for sample in kept.samples] == [
        [jpeg.sha256, png.sha256],
        [],
    ]
    assert [picture.sha256 for picture in kept.all_pictures] == [png.sha256, jpeg.sha256, png.sha256]
    file = find_picture(run_dir, Version(0, 1), jpeg.sha256)
    assert file is not None
    assert file.samefile(blobs / jpeg.sha256[:2] / jpeg.sha256)
    samples = keeper(run_dir, blobs=blobs, picture_mib=1)
    two = replace(group(0, 2), media=(stored_picture(blobs, PNG + bytes(300_000)),))
    samples.note(mirror(seal([sealed(two)], SealState.READY, 2), step=1), holding(two).group)
    await samples.write()
    assert find_picture(run_dir, Version(0, 1), jpeg.sha256) is None, "the bound counts pictures of tools"


def test_a_kept_sample_of_an_older_schema_version_has_no_pictures_of_tools() -> None:
    medium = Medium("picture", "ab" * 32, 8, (2, 2, 3), "uint8")
    plain = group(0).samples[0]
    shown = Sample(output=plain.output._replace(media=(medium,)), finish_reason="stop")
    kept = make_kept_group(replace(group(0), samples=(shown,)), "d", "p", "", ME, 100)
    assert folder.KeptGroup.decode(kept.encode()) == kept
    assert b"pictures" not in kept.encode(2)


def picture_group(shard: int, seq: int, *pictures: Medium) -> Group:
    """A group whose samples are generated pictures, each with the states and embeddings that train ranks need."""
    states = Medium("trajectory", "ee" * 32, 4096, (5, 3, 8, 8), "float32")
    span = VersionSpan(Version(0, 0), 0, 3)
    made = tuple(
        Sample(
            output=DenoisingTrajectory((1, 4, 7), (1.0, 0.5, 0.0), (-0.1,) * 3, (span,), 7, (states, picture)),
            finish_reason="stop",
            reward=float(n),
        )
        for n, picture in enumerate(pictures)
    )
    return Group(PromptRef(0, shard, seq), (5, 6), made, "colours")


def generated(blobs: Path, number: int, size: int = 1000) -> Medium:
    """A generated picture in the blob store."""
    return stored_picture(blobs, b"\x89PNG" + number.to_bytes(4, "big") + bytes(size - 8))._replace(kind="decoded")


async def keep_groups(samples: SampleWriter, step: int, *groups: Group) -> None:
    batch = seal([sealed(one) for one in groups], SealState.READY, step)
    samples.note(mirror(batch, step=step - 1), holding(*groups).group)
    await samples.write()


async def test_generated_pictures_are_kept_with_steps_and_without_tokens(tmp_path: Path) -> None:
    run_dir, blobs = tmp_path / "run", tmp_path / "blobs"
    pictures = [generated(blobs, n) for n in range(2)]
    await keep_groups(keeper(run_dir, blobs=blobs), 1, picture_group(0, 0, *pictures))
    (kept,) = folder.read_groups(run_dir, Version(0, 1))
    assert [(one.picture.sha256, one.steps, one.tokens) for one in kept.samples if one.picture is not None] == [
        (one.sha256, 3, 0) for one in pictures
    ]
    assert [one.response.text for one in kept.samples] == ["", ""]
    assert [one.pictures for one in kept.samples] == [(), ()], "these are of tools"
    for one in pictures:
        file = find_picture(run_dir, Version(0, 1), one.sha256)
        assert file is not None
        assert file.samefile(blobs / one.sha256[:2] / one.sha256)
    assert len(list(run_dir.rglob("*.png"))) == 2, "the states are not kept"
    assert folder.KeptGroup.decode(kept.encode()) == kept
    assert b"picture" not in kept.encode(2)
    assert b"steps" not in kept.encode(2)


async def test_a_step_keeps_whole_groups_of_generated_pictures_within_its_share(tmp_path: Path) -> None:
    """Otherwise the newest step would take the whole bound, and its groups would lack pictures at random."""
    run_dir, blobs = tmp_path / "run", tmp_path / "blobs"
    samples = keeper(run_dir, blobs=blobs, picture_mib=1)
    for step in range(1, 5):
        numbers = [[10 * step + 2 * group, 10 * step + 2 * group + 1] for group in range(4)]
        groups = [
            picture_group(n, step, *(generated(blobs, one, 30_000) for one in pair)) for n, pair in enumerate(numbers)
        ]
        await keep_groups(samples, step, *groups)
    for step in range(1, 5):
        kept = folder.read_groups(run_dir, Version(0, step))
        found = [
            [find_picture(run_dir, Version(0, step), one.sha256) is not None for one in group.generated]
            for group in kept
        ]
        # The share is 128 KiB, and a group has 60,000 bytes.
        assert found == [[True, True], [False, False], [True, True], [False, False]]


async def test_a_step_keeps_at_least_one_group_of_generated_pictures(tmp_path: Path) -> None:
    run_dir, blobs = tmp_path / "run", tmp_path / "blobs"
    groups = [picture_group(n, 1, generated(blobs, n, 200_000)) for n in range(3)]
    await keep_groups(keeper(run_dir, blobs=blobs, picture_mib=1), 1, *groups)
    assert len(list(run_dir.rglob("*.png"))) == 1


async def test_pictures_of_another_file_system_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    picture = stored_picture(tmp_path / "blobs", PNG)
    await keep_step(keeper(tmp_path, blobs=tmp_path / "blobs"), 1, picture)
    file = find_picture(tmp_path, Version(0, 1), picture.sha256)
    assert file is not None
    assert file.read_bytes() == PNG


async def test_pictures_beyond_their_bound_are_deleted_from_the_oldest_steps(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    png, jpeg = stored_picture(blobs, PNG), stored_picture(blobs, JPEG)
    samples = keeper(tmp_path, blobs=blobs, picture_mib=1)
    await keep_step(samples, 1, png)
    await keep_step(samples, 2, jpeg)
    assert find_picture(tmp_path, Version(0, 1), png.sha256) is None
    assert find_picture(tmp_path, Version(0, 2), jpeg.sha256) is not None
    (kept,) = folder.read_groups(tmp_path, Version(0, 1))
    assert kept.pictures[0].sha256 == png.sha256


async def test_a_bound_of_0_keeps_no_pictures(tmp_path: Path) -> None:
    picture = stored_picture(tmp_path / "blobs", PNG)
    await keep_step(keeper(tmp_path, blobs=tmp_path / "blobs", picture_mib=0), 1, picture)
    assert find_picture(tmp_path, Version(0, 1), picture.sha256) is None


async def test_a_folder_that_takes_nothing_disturbs_nobody_and_is_told_of_once(tmp_path: Path) -> None:
    in_the_way = tmp_path / "samples"
    in_the_way.write_text("in the way")
    told = Told()
    samples = keeper(tmp_path, told)

    async def keep(step: int) -> None:
        one = group(0, step)
        samples.note(mirror(seal([sealed(one)], SealState.READY, step), step=step - 1), holding(one).group)
        await samples.write()

    await keep(1)
    await keep(2)
    (first,) = told
    assert first.startswith("samples: the samples of step 1 were not written: [Errno")
    in_the_way.unlink()
    await keep(3)
    assert folder.kept_steps(tmp_path) == [Version(0, 3)]
    shutil.rmtree(in_the_way)
    in_the_way.write_text("again")
    await keep(4)
    assert len(told) == 2


def test_a_step_that_is_removed_while_it_is_read_has_no_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = Version(0, 1)
    folder.write_samples(tmp_path, version, ME, [make_kept_group(group(0), "d", "1+1", "2", ME, 100)])
    listed = folder._files(tmp_path, version, advantages=False)
    assert len(folder.read_groups(tmp_path, version)) == 1
    shutil.rmtree(folder.step_folder(tmp_path, version))
    monkeypatch.setattr(folder, "_files", lambda run_dir, version, advantages: listed)
    assert folder.read_groups(tmp_path, version) == []
    assert folder.list_groups(tmp_path, version) == []


def test_groups_are_listed_without_their_texts_and_read_one_by_one(tmp_path: Path) -> None:
    version, groups = (
        Version(0, 1),
        [make_kept_group(group(shard), f"d{shard}", "1+1", "2", ME, 100) for shard in range(4)],
    )
    folder.write_samples(tmp_path, version, "b", groups[2:])
    folder.write_samples(tmp_path, version, "a", [*groups[:2], groups[2]])
    listed = folder.list_groups(tmp_path, version)
    assert [folder.read_group(one) for one in listed] == folder.read_groups(tmp_path, version) == groups


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=60), st.integers(0, 20))
def test_every_holder_keeps_at_most_so_many_in_order_and_none_twice(holders: list[str], limit: int) -> None:
    groups = [sealed(group(0, seq), holder) for seq, holder in enumerate(holders)]
    taken = choose_groups(seal(groups), limit)
    assert [g.ref.seq for g in taken] == sorted({g.ref.seq for g in taken})
    for holder in set(holders):
        assert sum(g.holder == holder for g in taken) == min(limit, holders.count(holder))


def test_chosen_groups_are_spread_over_the_step() -> None:
    groups = [sealed(group(0, seq)) for seq in range(100)]
    assert [g.ref.seq for g in choose_groups(seal(groups), 4)] == [0, 25, 50, 75]


def test_a_long_text_is_cut_and_says_by_how_much() -> None:
    assert KeptText.of("abcdef", 4) == KeptText(text="abcd", more=2)
    assert KeptText.of("abc", 4) == KeptText(text="abc")
    assert KeptText.of("\ud800x", 9).text == "\\ud800x"


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    one = make_kept_group(group(0), group(0).digest(), "p", "a", ME, 100)
    folder.write_samples(tmp_path, Version(0, 1), ME, [one])
    file = folder.step_folder(tmp_path, Version(0, 1)) / f"{ME}.jsonl"
    file.write_bytes(b"no json\n" + file.read_bytes())
    assert folder.read_groups(tmp_path, Version(0, 1)) == [one]


def step_of(groups: list[Group], batches: dict[BatchIndex, Any], number: int = 1) -> Any:
    work = SimpleNamespace(seal=seal([sealed(g) for g in groups], SealState.READY, number), rank=3)
    return SimpleNamespace(work=work, places=lambda: iter(batches), at=lambda place: batches[place])


def advantages(run_dir: Path, one: Group) -> dict[int, KeptAdvantage]:
    return folder.parse_advantages(folder.list_advantages(run_dir, Version(0, 1))[one.digest()])


def test_ranks_write_the_mean_advantage_and_its_range_where_it_differs_over_tokens(tmp_path: Path) -> None:
    one = group(0)
    scored = torch.tensor([[True, True, False], [True, True, True]])
    slots = (SampleSlot(0, 0), SampleSlot(0, 1))
    batches = {
        BatchIndex(0, 0): SimpleNamespace(slots=slots, scored=scored),
        BatchIndex(0, 1): SimpleNamespace(slots=(), scored=scored[:1]),
    }
    values = {BatchIndex(0, 0): torch.tensor([[0.5, 0.5, 9.0], [-1.0, 0.0, 4.0]]), BatchIndex(0, 1): torch.zeros(1, 1)}
    show_advantages(tmp_path, SamplesSpec(), step_of([one], batches), values)
    assert advantages(tmp_path, one) == {
        0: KeptAdvantage(digest=one.digest(), sample=0, mean=0.5),
        1: KeptAdvantage(digest=one.digest(), sample=1, mean=1.0, least=-1.0, most=4.0),
    }


def test_ranks_write_one_number_a_sample_where_the_advantage_is_the_samples(tmp_path: Path) -> None:
    one = group(0)
    slots = (SampleSlot(0, 1), SampleSlot(0, 0))
    scored = torch.tensor([[True, True], [False, False]])
    batches = {BatchIndex(0, 0): SimpleNamespace(slots=slots, scored=scored)}
    show_advantages(tmp_path, SamplesSpec(), step_of([one], batches), {BatchIndex(0, 0): torch.tensor([[0.25], [9.0]])})
    assert advantages(tmp_path, one) == {1: KeptAdvantage(digest=one.digest(), sample=1, mean=0.25)}


def test_ranks_write_nothing_of_a_step_that_is_not_due(tmp_path: Path) -> None:
    show_advantages(tmp_path, SamplesSpec(every=5), step_of([], {}, number=2), {})
    assert folder.kept_steps(tmp_path) == []
