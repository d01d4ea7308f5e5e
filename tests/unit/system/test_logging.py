"""Log lines as JSON: their context fields, and exactly one object a line."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.system.daemon import (
    FORMAT_VARIABLE,
    LEVEL_VARIABLE,
    MOST_CHARACTERS,
    JsonFormatter,
    choose_log_format,
    log_environment,
    set_log_context,
    set_up_logging,
)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("gcore.test", logging.INFO, __file__, 1, message, values, None)


@given(st.text(), st.dictionaries(st.sampled_from(["job", "worker"]), st.text()))
def test_log_line_is_one_object_with_its_message(message: str, fixed: dict[str, str]) -> None:
    line = JsonFormatter(fixed).format(record("%s", message))
    assert "\n" not in line
    tree = json.loads(line)
    assert tree["message"] == message
    assert fixed.items() <= tree.items()
    assert (tree["level"], tree["logger"]) == ("INFO", "gcore.test")
    assert tree["time"].endswith("Z")


def test_a_defects_trace_is_in_the_line_and_long_messages_are_cut() -> None:
    said = record("x" * (2 * MOST_CHARACTERS))
    try:
        raise KeyError("why")
    except KeyError as error:
        said.exc_info = (KeyError, error, error.__traceback__)
    tree = json.loads(JsonFormatter({}).format(said))
    assert len(tree["message"]) == MOST_CHARACTERS
    assert tree["trace"].endswith("KeyError: 'why'")


async def test_a_line_is_about_the_job_whose_task_writes_it() -> None:
    stream = io.StringIO()
    set_up_logging({"controller": "node-1"}, environment={FORMAT_VARIABLE: "json"}, stream=stream)

    async def deeper(name: str) -> None:
        await asyncio.sleep(0)
        logging.getLogger("gcore.test").info("done by %s", name)

    async def work(name: str, step: list[int]) -> None:
        set_log_context(lambda: {"job": name, "step": step[0]})
        await asyncio.create_task(deeper(name))
        step[0] += 1
        await deeper(name)

    await asyncio.gather(work("one", [3]), work("other", [7]))
    logging.getLogger("gcore.test").info("nobody's")
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(t["job"], t["step"]) for t in told[:-1]] == [("one", 3), ("other", 7), ("one", 4), ("other", 8)]
    assert "job" not in told[-1]
    assert {t["controller"] for t in told} == {"node-1"}


def test_a_process_writes_as_its_environment_says_and_of_what_it_was_started_for() -> None:
    stream = io.StringIO()
    environment = {
        LEVEL_VARIABLE: "warning",
        **log_environment({"worker": "w1", "job": "j", "rank": 0, "role": "", "x": None}),
    }
    choose_log_format("json", environment)
    choose_log_format("text", environment)
    set_up_logging(environment=environment, stream=stream)
    logging.getLogger("a").info("not told")
    logging.getLogger("a").warning("told")
    (line,) = stream.getvalue().splitlines()
    assert {"worker": "w1", "job": "j", "rank": 0, "message": "told"}.items() <= json.loads(line).items()


@pytest.mark.parametrize("said", ["not json", "[1]", '"x"', "{"])
def test_logging_context_may_be_any_text(said: str) -> None:
    stream = io.StringIO()
    set_up_logging(
        environment={FORMAT_VARIABLE: "json", "GCORE_LOG_ABOUT": said, LEVEL_VARIABLE: "loud"}, stream=stream
    )
    logging.getLogger("a").info("told")
    assert json.loads(stream.getvalue())["message"] == "told"


def test_without_a_word_lines_are_for_people() -> None:
    stream = io.StringIO()
    set_up_logging(environment={}, stream=stream)
    logging.getLogger("a").info("told")
    assert stream.getvalue().endswith(" INFO a: told\n")


def test_logs_do_not_contain_each_http_request() -> None:
    stream = io.StringIO()
    set_up_logging(environment={}, stream=stream)
    logging.getLogger("httpx").info("HTTP Request: POST http://127.0.0.1/jobs/job/fetch")
    assert stream.getvalue() == ""
