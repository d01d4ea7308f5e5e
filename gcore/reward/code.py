"""Reward for programs: run the Python code in a response against the entry's tests in a sandbox
(`gcore.worker.sandbox.box`).

There are two kinds of tests. Statements (`assert f(2) == 4`) run after the program in its namespace and process: they
can call what it defines, but a program can be written to make them pass. Input/output pairs run in one process each,
and the printed output is compared outside the sandbox. Both are accepted in the formats of common datasets.
"""

from __future__ import annotations

import ast
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gcore.config.reward import RewardSpec
from gcore.reward.api import (
    RewardError,
    RewardResult,
    answer_field,
    number_option,
    refuse_unknown,
    truth_option,
    word_option,
)
from gcore.system.clock import SystemClock
from gcore.types import entry_value
from gcore.worker.sandbox.box import ProgramSandbox, SandboxError

OPTIONS = ("timeout_s", "memory_mb", "value", "before", "packages", "most_tests")
TIMEOUT_S, MEMORY_MB, MOST_TESTS = 5.0, 512, 100

ROOM_S = 1.0
"""Seconds reserved for scoring in addition to the programs' own time (`timeout_s`)."""

LEAST_MEMORY_MB = 64

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ProgramChecks:
    """Tests of a program: `statements`, or `pairs` of input and expected output."""

    statements: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def count(self) -> int:
        """Number of tests."""
        return len(self.statements) + len(self.pairs)


@dataclass(frozen=True, slots=True)
class _Settings:
    timeout_s: float
    memory_mb: int
    packages: bool


class CodeReward:
    """Reward for the program in the response: all tests passed, or the share of passed tests.

    The program is the last block between ``` fences, or the whole response without one. The answer field contains the
    tests: a statement or a list of them, as in MBPP and HumanEval; a list of {"input": ..., "output": ...}, or
    {"inputs": [...], "outputs": [...]}, as in APPS and CodeContests; or any of these as a JSON string.

    Options: `timeout_s` (5), for all tests of a response together; `memory_mb` (512); `value`: "all" (default: 1.0 if
    all tests pass, else 0.0) or "share"; `before`: the field whose text is put before the program (HumanEval's prompt);
    `packages` (false): whether it may import packages installed with gcore; `most_tests` (100): maximum number of
    tests, the first ones are run. Parts: `passed`, the share of passed tests; `ran`: whether the program itself
    finished. Raises RewardError for tests that cannot be parsed, and if the sandbox does not work here.
    """

    def __init__(self) -> None:
        self._boxes: dict[_Settings, ProgramSandbox] = {}

    def start(self, spec: RewardSpec) -> None:
        """Verify that the sandbox works here. Raises RewardError."""
        if threading.current_thread() is not threading.main_thread():
            raise RewardError("reward 'code' works only in the main thread", fix="Use RewardPool or RewardTrial")
        self._box(_settings(spec))

    def check(self, fields: Mapping[str, Any], spec: RewardSpec) -> None:
        """Raise RewardError if the entry's tests cannot be parsed."""
        parse_checks(answer_field(fields, spec), spec.answer, MOST_TESTS)
        program_prefix(fields, spec)

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """Score a response; see the class."""
        settings = _settings(spec)
        every = word_option(spec, "value", "all", ("all", "share")) == "all"
        most = int(number_option(spec, "most_tests", MOST_TESTS, least=1, whole=True))
        tests = parse_checks(answer_field(fields, spec), spec.answer, most)
        program = program_prefix(fields, spec) + extract_program(response)
        passed, ran = self._passed(self._box(settings), program, tests, settings.timeout_s)
        share = passed / tests.count
        value = float(passed == tests.count) if every else share
        return RewardResult(value, (("passed", share), ("ran", float(ran))))

    def _box(self, settings: _Settings) -> ProgramSandbox:
        if settings not in self._boxes:
            box = ProgramSandbox(settings.memory_mb, packages=settings.packages)
            try:
                box.prove()
            except SandboxError as error:
                raise RewardError(error.what, fix=error.fix) from error
            self._boxes[settings] = box
        return self._boxes[settings]

    def _passed(self, box: ProgramSandbox, program: str, tests: ProgramChecks, timeout_s: float) -> tuple[int, bool]:
        """Run the tests; return the number of passed ones, and whether the program finished without an error."""
        if tests.statements:
            done = box.run(program, tests.statements, timeout_s=timeout_s)
            _check(done.refused)
            return sum(done.passed), not done.error
        clock = SystemClock()
        deadline = clock.monotonic() + timeout_s
        passed, ran = 0, True
        for given, expected in tests.pairs:
            left = deadline - clock.monotonic()
            if left <= 0:
                return passed, False
            done = box.run(program, given=given, timeout_s=left)
            _check(done.refused)
            ran = ran and not done.error
            passed += not done.error and _lines(done.output) == _lines(expected)
        return passed, ran


code = CodeReward()


def extract_program(response: str) -> str:
    """The last fenced Python block, or the whole response."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1]) if blocks else str(response)


def program_prefix(fields: Mapping[str, Any], spec: RewardSpec) -> str:
    """Text that the option `before` puts before the program. Raises RewardError."""
    name = spec.options.get("before")
    if name is None:
        return ""
    text = entry_value(fields, str(name))
    if not isinstance(text, str):
        raise RewardError(f"the prompt's entry has no text in field {name!r}", fix="Correct reward.options.before")
    return text


def parse_checks(answer: Any, field: str, most: int) -> ProgramChecks:
    """Parse the first `most` tests from the entry's answer field. Raises RewardError if it has none, or an invalid one."""
    found = _tests(_parsed(answer))
    if found is None or found.count == 0:
        shown = json.dumps(answer, ensure_ascii=False)[:100]
        raise RewardError(
            f"the answer {shown} in field {field!r} has no tests",
            fix='Use statements, or a list of {"input": ..., "output": ...}; see docs/use/rewards.md',
        )
    for statement in found.statements[:most]:
        if (why := _cannot_tell(statement)) is not None:
            raise RewardError(
                f"the test {json.dumps(statement, ensure_ascii=False)[:100]} in field {field!r} {why}",
                fix="Write an assertion, such as assert f(2) == 4; a function that checks must also be called",
            )
    return ProgramChecks(found.statements[:most], found.pairs[:most])


@lru_cache(maxsize=4096)
def _cannot_tell(statement: str) -> str | None:
    """Why a statement tests nothing, because every program or none would pass it; None if it may test something."""
    try:
        tree = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not valid Python"
    open_: list[ast.AST] = [tree]
    while open_:
        node = open_.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Call):
            return None
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            open_ += ast.iter_child_nodes(node)
    return "asserts and calls nothing, so every program would pass it"


def _parsed(answer: Any) -> Any:
    """Decode a JSON string with tests; other values are returned unchanged."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(answer)
        except ValueError:
            return answer
    return answer


def _tests(answer: Any) -> ProgramChecks | None:
    match answer:
        case str() if answer.strip():
            return ProgramChecks(statements=(answer,))
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            return ProgramChecks(
                pairs=tuple((_text(one), _text(other)) for one, other in zip(inputs, outputs, strict=True))
            )
        case list() if all(isinstance(one, str) and one.strip() for one in answer):
            return ProgramChecks(statements=tuple(answer))
        case list() if all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in answer):
            return ProgramChecks(pairs=tuple((_text(one["input"]), _text(one["output"])) for one in answer))
    return None


def _text(value: Any) -> str:
    """An input or output, which some datasets write as a list of lines."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in value)
    return str(value)


def _lines(text: str) -> list[str]:
    """Lines of an output for comparison, without trailing white space and surrounding empty lines."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _settings(spec: RewardSpec) -> _Settings:
    refuse_unknown(spec, OPTIONS)
    timeout_s = number_option(spec, "timeout_s", min(TIMEOUT_S, spec.timeout_s - ROOM_S), least=0.1)
    if timeout_s + ROOM_S > spec.timeout_s:
        raise RewardError(
            f"reward.options.timeout_s is {timeout_s:g}, too close to reward.timeout_s ({spec.timeout_s:g})",
            fix=f"Set reward.timeout_s to at least {timeout_s + ROOM_S:g}",
        )
    memory_mb = int(number_option(spec, "memory_mb", MEMORY_MB, least=LEAST_MEMORY_MB, whole=True))
    return _Settings(timeout_s, memory_mb, truth_option(spec, "packages", False))


def _check(refused: str) -> None:
    """Raise RewardError if the sandbox refused to start a program. `refused`: the reason, or empty."""
    if refused:
        raise RewardError(f"the program could not be run ({refused})", fix="See docs/use/rewards.md")
