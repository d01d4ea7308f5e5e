"""`gcore samples` of a job that generates pictures: several steps, held-out responses, and contact sheets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_jobs import FakeJobs, Script
from typer.testing import CliRunner

from controllers.cli.main import app
from controllers.cli.view.state import ViewState
from gcore.api.v1 import jobs_pb2 as pb
from gcore.media.pictures import encode_png
from gcore.observability.events import JobEvent

Run = Callable[..., tuple[int, str]]


def picture(folder: Path, number: int) -> str:
    file = folder / f"{number}.png"
    file.write_bytes(encode_png(np.full((8, 8, 3), number, np.uint8)))
    return str(file)


def group(prompt: str, *files: str) -> pb.SampleGroup:
    responses = [
        pb.SampleResponse(
            index=number, reward=number / 2, steps=5, picture=pb.SamplePicture(sha256="ab" * 32, file=file)
        )
        for number, file in enumerate(files)
    ]
    return pb.SampleGroup(ref="0/0/0", step=3, of=9, prompt=pb.SampleText(text=prompt), responses=responses)


def evaluation(sequence: int, step: int, accuracy: float, *files: str, **fields: Any) -> JobEvent:
    samples = [
        {
            "prompt": f"prompt {number}",
            "response": "",
            "answer": "",
            "reward": float(number),
            "correct": number >= 1,
            "picture": {"sha256": "ab" * 32, "file": file},
        }
        | fields
        for number, file in enumerate(files)
    ]
    data = {"step": step, "accuracy": accuracy, "count": 128, "samples": samples}
    return JobEvent(sequence, 0.0, "eval", data=data)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    found = Script(pb.Job(uid="u1", name="colours", state=pb.JOB_STATE_RUNNING, step=6))
    found.job.best.CopyFrom(pb.BestCheckpoint(step=4, metric="accuracy", value=0.9))
    found.samples = [group("red", *(picture(tmp_path, n) for n in range(3))), group("blue", "/away.png")]
    for sequence, (step, accuracy) in enumerate({0: 0.25, 2: 0.5, 4: 0.9, 6: 0.75}.items(), 1):
        found.events.append(
            evaluation(sequence, step, accuracy, *(picture(tmp_path, 10 * sequence + n) for n in range(2)))
        )
    return found


@pytest.fixture
async def run(script: Script) -> AsyncIterator[Callable[..., Any]]:
    import asyncio

    server = await FakeJobs(script).start()

    async def call(*words: str, code: int = 0) -> str:
        arguments = ["samples", "colours", "--address", server.address, *words]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert result.exit_code == code, result.output
        return result.output if code == 0 else str(result.exception)

    yield call
    await server.kill()


async def test_samples_of_several_steps_are_printed_one_after_the_other(run: Any, script: Script) -> None:
    text = await run("--step", "3", "--step", "5", "--step", "3")
    assert [one.step for one in script.asked_samples] == [3, 5]
    assert text.count("--- prompt 0/0/0 of the data") == 4
    assert "(empty)" not in text
    assert "5 denoising steps" in text
    one, several = (
        json.loads(await run("--step", "3", "-o", "json")),
        json.loads(await run("--step", "3", "--step", "5", "-o", "json")),
    )
    assert several == [one, one]


async def test_a_sheet_of_training_has_a_section_for_each_step(run: Any, script: Script, tmp_path: Path) -> None:
    from PIL import Image

    sheet = tmp_path / "sheet.png"
    assert await run("--step", "3", "--sheet", str(sheet)) == f"Drew 3 of 4 pictures in {sheet}.\n"
    one = Image.open(sheet).size
    told = await run("--step", "3", "--step", "5", "--limit", "7", "--sheet", str(sheet), "-o", "json")
    assert json.loads(told) == {"sheet": str(sheet), "pictures": 6}
    assert Image.open(sheet).size > one
    assert [one.limit for one in script.asked_samples] == [16, 7, 7]


async def test_a_sheet_without_readable_pictures_is_refused(run: Any, script: Script, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    script.samples = [group("blue", "/away.png")]
    assert "none of 1 pictures can be read on this machine. They were deleted" in await run(
        "--sheet", str(sheet), code=1
    )
    script.samples = [pb.SampleGroup(ref="0/0/0", step=3, responses=[pb.SampleResponse(text=pb.SampleText(text="4"))])]
    assert "job 'colours' has no generated pictures there" in await run("--sheet", str(sheet), code=1)
    assert not sheet.exists()


async def test_a_sheet_in_a_missing_folder_is_refused(run: Any, tmp_path: Path) -> None:
    assert "cannot write the sheet" in await run("--sheet", str(tmp_path / "missing" / "sheet.png"), code=1)


async def test_held_out_pictures_are_those_of_the_newest_evaluation_or_of_given_ones(run: Any) -> None:
    text = await run("--held-out")
    assert text.startswith("step 6: accuracy 75.0% on 128 held-out prompts, 2 of them shown\n--- prompt 0\n")
    assert "  response: incorrect, reward 0\n    picture: " in text
    assert "  response: correct, reward 1\n" in text
    trees = json.loads(await run("--held-out", "--step", "4", "--step", "0", "--limit", "1", "-o", "json"))
    assert [(tree["step"], len(tree["responses"])) for tree in trees] == [(0, 1), (4, 1)]
    assert Path(trees[0]["responses"][0]["picture"]).name == "10.png"
    said = await run("--held-out", "--step", "3", code=1)
    assert said == "there is no evaluation after step 3. There are evaluations after steps 0, 2, 4, 6"


async def test_a_held_out_sheet_has_the_first_the_best_and_the_newest_evaluation(
    run: Any, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gcore.observability import contact_sheet

    drawn: list[Any] = []
    draw = contact_sheet.draw_sheet
    monkeypatch.setattr(contact_sheet, "draw_sheet", lambda *given: drawn.append(given) or draw(*given))
    sheet = str(tmp_path / "sheet.png")
    assert await run("--held-out", "--sheet", sheet) == f"Drew 6 of 6 pictures in {sheet}.\n"
    await run("--held-out", "--sheet", sheet, "--step", "2")
    script.job.ClearField("best")
    await run("--held-out", "--sheet", sheet)
    titles = [given[1][0].title.partition("Accuracy: ")[2] for given in drawn]
    assert titles == [
        "25.0% after step 0, 90.0% after step 4, 75.0% after step 6",
        "50.0% after step 2",
        "25.0% after step 0, 75.0% after step 6",
    ]
    (card, _) = drawn[0][1][0].cards
    assert [(one.file.name, one.label) for one in card.pictures] == [
        ("10.png", "step 0: wrong"),
        ("30.png", "step 4: wrong"),
        ("40.png", "step 6: wrong"),
    ]


async def test_held_out_texts_are_printed_too_and_have_no_sheet(run: Any, script: Script, tmp_path: Path) -> None:
    script.events[:] = [evaluation(1, 0, 0.5, "", response="4", answer="5", picture=None, unscored="odd")]
    text = await run("--held-out")
    assert text.endswith("--- prompt 0\n  answer: 5\n  response: not scored: odd\n    4\n")
    assert "has no generated pictures" in await run("--held-out", "--sheet", str(tmp_path / "s.png"), code=1)


async def test_a_job_before_its_first_evaluation_has_no_held_out_responses(run: Any, script: Script) -> None:
    script.events.clear()
    assert "the job has no evaluation yet" in await run("--held-out", code=1)


@pytest.mark.parametrize("words", [["--best"], ["--worst"], ["--source", "s"]])
async def test_options_of_training_are_refused_for_held_out_responses(run: Any, words: list[str]) -> None:
    assert "--held-out shows what an evaluation displays" in await run("--held-out", *words, code=1)


def test_an_evaluation_with_fewer_responses_is_otherwise_the_same() -> None:
    (point,) = ViewState().apply(evaluation(1, 2, 0.5, "a", "b", "c")).evals
    assert [len(point.limited(limit).samples) for limit in (0, 2, 9)] == [3, 2, 3]
    assert point.limited(1).accuracy == point.accuracy
