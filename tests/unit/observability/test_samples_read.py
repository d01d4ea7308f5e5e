"""Reading samples: lookup, error messages, and output on a terminal and in a pipe."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import FakeJobs, Script
from rich.console import Console

from controllers.api.edge.errors import BadFields
from controllers.api.run_reader import find_samples, samples_of_folder
from controllers.cli.commands.streams import samples
from controllers.cli.output import Output, as_json
from controllers.cli.view.data import clip_text, groups_tree, show_groups
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.spec import SamplesSpec
from gcore.data.order import Cursors
from gcore.errors import GcoreError, Unreachable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head, Lineage
from gcore.ledger.records.job import JobRecord, KeptPicture
from gcore.ledger.transactions import Versioned
from gcore.observability import samples as folder
from gcore.observability.samples import (
    KeptAdvantage,
    KeptGroup,
    KeptSample,
    KeptText,
    NoSamples,
    find_version,
    select_groups,
    sort_responses,
    step_status,
)
from gcore.store.keys import JobKeys
from gcore.types import PromptRef, Version


def head(step: int, *bases: int) -> Head:
    """`bases`: the steps to which rollbacks went."""
    lineages = (0, *bases)
    return Head(
        seq=step, parent=None, lineage=len(bases), step=step, cursors=Cursors.start(2), world="w", nonce="n",
        lineages=tuple(Lineage(number=n, base_step=base) for n, base in enumerate(lineages)),
    )  # fmt: skip


def sample(text: str, reward: float) -> KeptSample:
    return KeptSample(
        response=KeptText(text=text), tokens=3, reward=reward, parts=(("right", reward), ("format", 0.5)),
        finish_reason="stop", versions=("0.4",),
    )  # fmt: skip


def group(shard: int, *rewards: float, source: str = "sums", prompt: str = "1+1=", text: str = "two") -> KeptGroup:
    return KeptGroup(
        ref=PromptRef(0, shard, 0), digest=f"d{shard}", source=source, prompt=KeptText(text=prompt), prompt_tokens=4,
        answer="2", holder="node-0.ab", samples=tuple(sample(f"{text} {n}", reward) for n, reward in enumerate(rewards)),
    )  # fmt: skip


@pytest.mark.parametrize("order", [99, -1])
async def test_an_order_that_is_none_is_refused_and_not_taken_for_another(tmp_path: Path, order: int) -> None:
    request = pb.GetSamplesRequest(job="j", order=order)  # type: ignore[arg-type]
    with pytest.raises(
        BadFields, match=f"order: {order} is not a sample order. Use SAMPLE_ORDER_UNSPECIFIED"
    ) as caught:
        samples_of_folder(tmp_path, request)
    assert [one.field for one in caught.value.violations] == ["order"]


KEPT = [Version(0, 1), Version(0, 5), Version(0, 6), Version(0, 7), Version(1, 6)]


@pytest.mark.parametrize(
    ("now", "step", "expected"),
    [
        (head(6, 5), None, Version(1, 6)),
        (head(6, 5), 7, Version(0, 7)),
        (head(6, 5), 6, Version(1, 6)),
        (head(5, 5), None, Version(0, 5)),
        (head(0, 0), None, Version(1, 6)),
    ],
    ids=["newest on the chain", "cut off", "in two lineages", "under way is not the newest", "none is on the chain"],
)
def test_a_step_is_found_in_its_newest_lineage_and_the_default_is_the_newest_committed(
    now: Head, step: int | None, expected: Version
) -> None:
    assert find_version(KEPT, now, SamplesSpec(), step) == expected


@pytest.mark.parametrize(
    ("kept", "now", "spec", "step", "words"),
    [
        (KEPT, head(6, 5), SamplesSpec(), 9, "step 9 has not been trained yet; the newest committed step is 6. There are samples of steps 1, 5-7; steps after 6 are not committed"),
        (KEPT, head(8, 7), SamplesSpec(), 9, "the newest committed step is 8. There are samples of steps 1, 5-7"),
        (KEPT, head(6, 5), SamplesSpec(every=5), 3, "the samples of step 3 are not kept: samples.every is 5"),
        (KEPT[1:], head(9), SamplesSpec(keep=4), 2, "the samples of step 2 were removed: samples.keep is 4. There are samples of steps 5-7"),
        (KEPT, head(9), SamplesSpec(), 8, "step 8 has no samples: the nodes that held them died, or could not write them"),
        (KEPT, head(9), SamplesSpec(), 0, "there is no step 0; steps are counted from 1"),
        ([], None, SamplesSpec(), None, "no step has been trained yet"),
        ([], head(0), SamplesSpec(), 4, "no step has been trained yet"),
        ([], head(9), SamplesSpec(groups=0), 4, "the job keeps no samples, because samples.groups is 0"),
        ([], head(9), SamplesSpec(), None, "the job has no samples"),
        ([], head(9), SamplesSpec(), 3, "There are no samples at all"),
    ],
)  # fmt: skip
def test_missing_samples_error_says_why_and_which_exist(
    kept: list[Version], now: Head | None, spec: SamplesSpec, step: int | None, words: str
) -> None:
    with pytest.raises(NoSamples, match=re.escape(words)):
        find_version(kept, now, spec, step)


def test_many_kept_steps_are_told_in_few_words() -> None:
    with pytest.raises(NoSamples) as told:
        find_version([Version(0, step) for step in range(10, 1000, 10)], head(2000), SamplesSpec(), 999)
    assert len(str(told.value)) < 250
    assert "990" in str(told.value)


def test_a_step_stands_as_the_chain_says() -> None:
    now = head(6, 5)
    assert step_status(now, Version(1, 6)) == "committed"
    assert step_status(now, Version(0, 5)) == "committed"
    assert step_status(now, Version(1, 7)) == "under way"
    assert step_status(now, Version(0, 6)) == "cut off"


GROUPS = [group(2, 0.0, 1.0), group(0, 1.0, 1.0, source="words"), group(1, 0.0, 0.25)]


def test_the_best_and_the_worst_come_first_with_their_responses_in_the_same_order() -> None:
    best, worst = select_groups(GROUPS, order="best"), select_groups(GROUPS, order="worst", limit=1)
    assert [g.ref.shard for g in best.groups] == [0, 2, 1]
    assert [[r.index for r in sort_responses(g, {}, "best")] for g in best.groups] == [[0, 1], [1, 0], [1, 0]]
    assert [(g.ref.shard, [r.index for r in sort_responses(g, {}, "worst")]) for g in worst.groups] == [(1, [0, 1])]
    assert worst.of == 3
    assert [g.ref.shard for g in select_groups(GROUPS).groups] == [0, 1, 2]


def test_one_source_is_picked_and_an_unknown_one_is_told_with_those_there_are() -> None:
    assert [g.ref.shard for g in select_groups(GROUPS, source="sums").groups] == [1, 2]
    with pytest.raises(
        NoSamples, match=r"this step has no group of source 'sum'\. There are groups of 'sums', 'words'"
    ):
        select_groups(GROUPS, source="sum")


def test_of_a_job_that_ended_before_its_first_step_nobody_is_asked_to_wait() -> None:
    with pytest.raises(NoSamples, match="ended before its first step") as refused:
        find_version([], head(0), SamplesSpec(), None, ended=True)
    assert refused.value.fix is None


def stored(run_dir: Path) -> JobMirror:
    folder.write_samples(
        run_dir, Version(0, 3), "node-0.ab", [group(0, 0.0, 1.0, prompt="a\x1b[2J\nb", text="\x1b]0;evil\x07[red]two")]
    )
    folder.write_samples(run_dir, Version(0, 3), "node-1.cd", [group(1, 0.5, 1.0)])
    folder.write_samples(run_dir, Version(0, 3), "advantages-0", [KeptAdvantage(digest="d0", sample=0, mean=-0.7)])
    folder.write_samples(
        run_dir, Version(0, 3), "advantages-1", [KeptAdvantage(digest="d0", sample=1, mean=0.7, least=0.1, most=1.2)]
    )
    job = JobRecord(uid="u1", name="sums", spec={}, run_dir=str(run_dir), created=0.0, prompts=9)
    return JobMirror(JobKeys("u1"), job=Versioned(job, 1), head=Versioned(head(3), 1))


async def found(run_dir: Path, **request: Any) -> list[pb.SampleGroup]:
    return list(await find_samples(stored(run_dir), pb.GetSamplesRequest(job="sums", **request)))


async def test_a_controller_joins_what_holders_and_ranks_wrote(tmp_path: Path) -> None:
    first, second = await found(tmp_path)
    assert (first.step, first.lineage, first.of, first.standing) == (3, 0, 2, pb.STEP_STANDING_COMMITTED)
    low, high = first.responses
    assert (low.advantage, low.HasField("advantage_least")) == (-0.7, False)
    assert (high.advantage, high.advantage_least, high.advantage_most) == (0.7, 0.1, 1.2)
    assert {part.name: part.value for part in high.parts} == {"right": 1.0, "format": 0.5}
    assert not any(response.HasField("advantage") for response in second.responses)
    assert [g.ref for g in await found(tmp_path, step=3, limit=1, order=pb.SAMPLE_ORDER_BEST)] == ["0/1/0"]


async def test_of_a_step_no_more_is_held_than_the_group_that_is_being_told(tmp_path: Path) -> None:
    """A reader that stops keeps no texts in the daemon, and gets an error if they were removed meanwhile."""
    groups = await find_samples(stored(tmp_path), pb.GetSamplesRequest(job="sums"))
    assert next(groups).ref == "0/0/0"
    shutil.rmtree(folder.step_folder(tmp_path, Version(0, 3)))
    with pytest.raises(GcoreError, match="removed while they were read"):
        next(groups)


async def test_a_controller_says_that_a_step_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoSamples, match="step 4 has not been trained yet"):
        await found(tmp_path, step=4)


def test_where_no_cluster_is_up_the_samples_of_an_ended_run_are_read_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "home" / "runs" / "sums-u1"
    stored(run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"job": "sums", "uid": "u1", "checkpoint": ""}))
    samples("sums", home=tmp_path / "home", output=Output.JSON)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["of"], shown["standing"]) == (3, 2, "unknown")
    assert shown["groups"][0]["responses"][1]["advantage"] == 0.7
    with pytest.raises(NoSamples, match=r"step 4 has no samples\. There are samples of step 3"):
        samples("sums", step=[4], home=tmp_path / "home")
    with pytest.raises(
        NoSamples, match=r"step 2 has no samples\. Samples of earlier steps are removed: samples\.keep .* step 3"
    ):
        samples("sums", step=[2], home=tmp_path / "home")
    with pytest.raises(Unreachable, match="no finished job 'words'"):
        samples("words", home=tmp_path / "home")


def test_json_has_null_for_what_is_no_number() -> None:
    assert json.loads(as_json({"a": [1.5, float("nan")], "b": {"c": float("-inf")}})) == {
        "a": [1.5, None],
        "b": {"c": None},
    }


def test_control_characters_are_spelt_out_and_lines_stay() -> None:
    assert clip_text("a\x1b[31m\r\nb\u202e", 99) == "a\\x1b[31m\\r\nb\\u202e"
    assert clip_text("abcdef", 4, more=3) == "abcd… (5 more characters)"


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("width", [20, 60, 200])
async def test_nothing_that_a_model_wrote_reaches_a_terminal_as_it_is(
    tmp_path: Path, terminal: bool, width: int
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    show_groups(console, await found(tmp_path))
    text = out.getvalue()
    assert not set(re.sub(r"\n", "", text)) & {chr(n) for n in range(32)}
    if width > 40:
        assert "\\x1b]0;evil\\x07[red]two 0" in re.sub(r"[│\s]+", " ", text)


async def test_a_terminal_shows_responses_side_by_side_with_what_they_are_worth(tmp_path: Path) -> None:
    out = io.StringIO()
    show_groups(Console(file=out, force_terminal=True, width=120, color_system=None), await found(tmp_path))
    text = out.getvalue()
    assert "step 3, lineage 0: 2 of 2 kept prompts" in text
    (row,) = [line for line in text.splitlines() if "advantage -0.700" in line]
    assert "reward 0, advantage -0.700" in row
    assert "reward 1, advantage +0.700 (+0.100 to +1.200)" in row
    assert "right 1, format 0.5, stop, 3 tokens, by 0.4" in text
    assert "answer: 2" in text
    assert "advantage not kept" in text


async def test_json_has_everything(tmp_path: Path) -> None:
    tree = json.loads(json.dumps(groups_tree(await found(tmp_path))))
    assert (tree["step"], tree["of"], tree["standing"]) == (3, 2, "committed")
    first = tree["groups"][0]
    assert first["prompt"] == "a\x1b[2J\nb"
    assert first["responses"][1]["advantage_most"] == 1.2
    assert tree["groups"][1]["responses"][0]["advantage"] is None


async def test_a_picture_is_named_by_its_file_or_if_it_was_deleted_by_its_sha256(tmp_path: Path) -> None:
    there, gone = "ab" * 32, "cd" * 32
    pictures = tuple(KeptPicture(sha256=name, size=8, height=32, width=48) for name in (there, gone))
    seen = group(0, 1.0).model_copy(update={"pictures": pictures})
    folder.write_samples(tmp_path, Version(0, 3), "node-0.ab", [seen])
    file = folder.step_folder(tmp_path, Version(0, 3)) / f"{there}.png"
    file.touch()
    groups = list(samples_of_folder(tmp_path, pb.GetSamplesRequest(job="sums")))
    assert [one["file"] for one in groups_tree(groups)["groups"][0]["pictures"]] == [str(file), ""]
    for terminal in (False, True):
        out = io.StringIO()
        show_groups(Console(file=out, force_terminal=terminal, width=400, color_system=None), groups)
        assert f"picture: {file} (48 x 32 pixels)" in out.getvalue()
        assert f"picture: sha256:{gone}, deleted (48 x 32 pixels)" in out.getvalue()


async def test_pictures_of_tools_are_named_behind_their_response(tmp_path: Path) -> None:
    there, gone = "ab" * 32, "cd" * 32
    pictures = tuple(KeptPicture(sha256=name, size=8, height=32, width=48) for name in (there, gone))
    seen = group(0, 0.0, 1.0)
    second = seen.samples[1].model_copy(update={"pictures": pictures})
    seen = seen.model_copy(update={"samples": (seen.samples[0], second)})
    folder.write_samples(tmp_path, Version(0, 3), "node-0.ab", [seen])
    file = folder.step_folder(tmp_path, Version(0, 3)) / f"{there}.png"
    file.touch()
    groups = list(samples_of_folder(tmp_path, pb.GetSamplesRequest(job="sums", order=pb.SAMPLE_ORDER_BEST)))
    (tree,) = groups_tree(groups)["groups"]
    assert [(one["index"], [shown["file"] for shown in one["pictures"]]) for one in tree["responses"]] == [
        (1, [str(file), ""]),
        (0, []),
    ]
    for terminal in (False, True):
        out = io.StringIO()
        show_groups(Console(file=out, force_terminal=terminal, width=1000, color_system=None), groups)
        behind = out.getvalue().partition("two 1")[2]
        assert f"picture: {file} (48 x 32 pixels)" in behind
        assert f"picture: sha256:{gone}, deleted (48 x 32 pixels)" in behind


async def test_a_generated_picture_is_shown_in_place_of_a_text_with_steps_and_without_tokens(tmp_path: Path) -> None:
    there, gone = "ab" * 32, "cd" * 32
    pictures = (KeptPicture(sha256=name, size=8, height=32, width=48) for name in (there, gone))
    made = tuple(
        one.model_copy(update={"picture": picture, "steps": 5, "tokens": 0, "response": KeptText(text="")})
        for one, picture in zip(group(0, 0.0, 1.0).samples, pictures, strict=True)
    )
    shown = group(0).model_copy(update={"samples": made})
    folder.write_samples(tmp_path, Version(0, 3), "node-0.ab", [shown])
    file = folder.step_folder(tmp_path, Version(0, 3)) / f"{there}.png"
    file.touch()
    groups = list(samples_of_folder(tmp_path, pb.GetSamplesRequest(job="colours")))
    (tree,) = groups_tree(groups)["groups"]
    assert [(one["picture"]["file"], one["steps"], one["tokens"]) for one in tree["responses"]] == [
        (str(file), 5, 0),
        ("", 5, 0),
    ]
    assert [one["pictures"] for one in tree["responses"]] == [[], []]
    for terminal in (False, True):
        out = io.StringIO()
        show_groups(Console(file=out, force_terminal=terminal, width=1000, color_system=None), groups)
        text = out.getvalue()
        assert "format 0.5, stop, 5 denoising steps, by 0.4" in text
        assert "token" not in text
        assert f"picture: {file} (48 x 32 pixels)" in text
        assert f"picture: sha256:{gone}, deleted (48 x 32 pixels)" in text


async def test_a_text_has_no_generated_picture(tmp_path: Path) -> None:
    tree = groups_tree(await found(tmp_path))
    assert {(one["picture"], one["steps"]) for group in tree["groups"] for one in group["responses"]} == {(None, 0)}


async def gcore(*words: str | bytes) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controllers.cli.main", *words, env={**os.environ, "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_asks_for_what_was_typed_and_prints_what_comes(tmp_path: Path) -> None:
    script = Script(pb.Job(uid="u1", name="sums"), samples=await found(tmp_path))
    server = await FakeJobs(script).start()
    try:
        words = ("samples", "sums", "--address", server.address)
        code, out, err = await gcore(*words, "--step", "3", "--source", "sums", "--best", "--limit", "7")
        assert (code, err) == (0, "")
        assert "response 1: reward 1, advantage +0.700 (+0.100 to +1.200)" in out
        (asked,) = script.asked_samples
        assert (asked.step, asked.source, asked.order, asked.limit) == (3, "sums", pb.SAMPLE_ORDER_BEST, 7)
        code, out, _ = await gcore(*words, "-o", "json")
        assert json.loads(out)["groups"][0]["ref"] == "0/0/0"
        assert not script.asked_samples[1].HasField("step")
        code, _, err = await gcore(*words, "--best", "--worst")
        assert (code, err) == (2, "gcore: --best and --worst exclude each other. Give only one of them\n")
        code, _, err = await gcore("samples", "other", "--address", server.address)
        assert code == 2
        assert len(err.splitlines()) == 1
    finally:
        await server.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["sums", "--limit", "99999999999"], "'--limit'", id="more prompts than counted"),
        pytest.param(["sums", "--step", "9" * 30], "'--step'", id="a step of thirty digits"),
        pytest.param(["sums", "--step", "-1"], "'--step'", id="a step before the first"),
        pytest.param(["sums", "--source", b"\xff"], r"'\udcff' is not valid UTF-8", id="a source of no text"),
        pytest.param([b"sums\xff"], r"'sums\udcff' is not valid UTF-8", id="a job of no text"),
    ],
)
async def test_a_command_that_cannot_be_sent_is_told_and_raises_nothing(words: list[str | bytes], said: str) -> None:
    code, _, err = await gcore("samples", *words, "--address", "127.0.0.1:1")
    assert code == 2
    assert said in err
    assert "Traceback" not in err
