"""Environments: the syntax and execution of calls, and the assembly and end of a response of several turns."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from documents import ROOT, blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.config.rollout import EnvironmentSpec
from gcore.errors import DataError
from gcore.plugins import PluginFault
from gcore.rollout.environments.api import (
    BadArgument,
    CheckedEnvironment,
    Done,
    EnvironmentFault,
    Observation,
    Said,
    Setting,
    Turn,
    find_environment,
)
from gcore.rollout.environments.episode import (
    EpisodeLimits,
    EpisodePictures,
    EpisodeSetting,
    ShownTokens,
    Transcript,
    play_episode,
)
from gcore.rollout.environments.pool import try_environment
from gcore.rollout.environments.tools import (
    CallFormat,
    JsonCallFormat,
    TagCallFormat,
    ToolCall,
    ToolEnvironment,
    calculator,
    call_format,
)
from gcore.system.concurrency import END_S
from gcore.testing import FakeClock
from gcore.types import FinishReason, Medium, PictureRef, Sample, Version, VersionSpan, range_problem

OLD, NEW = Version(0, 1), Version(0, 2)


# The calculator.


@pytest.mark.parametrize(
    ("sum_", "result"),
    [
        ("1+2", "3"),
        (" 123 * 456 ", "56088"),
        ("-(2-5)*4", "12"),
        ("1/3", "0.333333333333"),
        ("2/4", "0.5"),
        ("0.1+0.2", "0.3"),
        ("--3", "3"),
        ("-1/10000000000000", "0"),
        ("2*(3+4)*(5-6)", "-14"),
        (".5*4", "2"),
    ],
)
def test_sums_are_worked_out_exactly(sum_: str, result: str) -> None:
    assert calculator(sum_) == result


@pytest.mark.parametrize(
    ("sum_", "words"),
    [
        ("", "sum is incomplete"),
        ("1+", "sum is incomplete"),
        ("1/0", "divided by zero"),
        ("(1", "not closed"),
        ("1)", "after a complete sum"),
        ("1 2", "after a complete sum"),
        ("__import__('os')", "not allowed in a sum"),
        ("2**9", "where a number should be"),
        ("9" * 65, "more than 64 digits"),
        ("9" * 300, "300 characters"),
        ("(" * 100 + "1", "nested more than"),
        ("-" * 100 + "1", "nested more than"),
        ("٣+٤", "not allowed in a sum"),
        ("9" * 40 + "*" + "9" * 40, "more than 64 digits"),
    ],
)
def test_invalid_sums_are_reported_to_the_model(sum_: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        calculator(sum_)


@settings(deadline=None)
@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        max_leaves=6,
    )
)
def test_whole_sums_come_to_what_they_come_to(sum_: str) -> None:
    assert calculator(sum_) == str(eval(sum_))


@given(st.text(max_size=40))
def test_any_text_has_a_result_or_is_none(text: str) -> None:
    with contextlib.suppress(BadArgument):
        Fraction(calculator(text))


# How calls are written.


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("so <<1+2>>", "1+2"),
        ("a < b <<1+2>>\n", "1+2"),
        ("<<<<7>>", "7"),
        ("no call", None),
        ("an end without a beginning>>", None),
        ("<<no end", None),
        ("<<>>", ""),
    ],
)
def test_a_call_stands_between_two_texts(text: str, argument: str | None) -> None:
    call = TagCallFormat("calculator", "<<", ">>").call(text)
    assert (call.argument if call is not None else None) == argument


def test_the_result_is_put_behind_the_call() -> None:
    form = TagCallFormat("calculator", "<<", "=", "", ">>")
    call = form.call("<<1+2=")
    assert call is not None
    assert (call.argument, form.result(call, Said("3")).text, form.stop) == ("1+2", "3>>", "=")


@pytest.mark.parametrize(
    ("inner", "argument", "problem"),
    [
        ('{"name": "calculator", "arguments": {"sum": "1+2"}}', "1+2", ""),
        ('{"name": "calculator", "arguments": "1+2"}', "1+2", ""),
        ('{"name": "calculator", "arguments": {"a": 1, "b": 2}}', '{"a": 1, "b": 2}', ""),
        ('{"name": "calculator"}', "{}", ""),
        ("12", "", 'no object with a "name"'),
        ("{", "", "no JSON"),
        ('{"name": "calculater"}', "", "there is no tool 'calculater'; there are calculator"),
    ],
)
def test_a_call_in_json_names_its_tool(inner: str, argument: str, problem: str) -> None:
    call = JsonCallFormat(("calculator",), chat=True).call(f"I see.\n<tool_call>\n{inner}\n</tool_call>")
    assert call is not None
    assert call.argument == argument
    assert problem in call.problem
    assert bool(problem) == bool(call.problem)


def test_a_tool_that_fails_is_told_of_in_words_or_in_those_that_the_spec_has_for_it() -> None:
    call, failed = ToolCall("calculator", "1+"), Said("error: it ends in the middle", failed=True)
    assert TagCallFormat("calculator", "<<", ">>").result(call, failed).text == failed.text
    assert TagCallFormat("calculator", "<<", ">>", "[", "]", "=").result(call, failed).text == "[=]"
    assert JsonCallFormat(("calculator",), chat=False).result(call, failed).text.count(failed.text) == 1


def test_results_of_json_calls_are_messages_where_there_are_any() -> None:
    call = JsonCallFormat(("calculator",), chat=True).call(
        '<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>'
    )
    assert call is not None
    message = {"role": "tool", "name": "calculator", "content": "1"}
    assert JsonCallFormat(("calculator",), chat=True).result(call, Said("1")) == Observation(messages=(message,))
    assert "<tool_response>\n1\n" in JsonCallFormat(("calculator",), chat=False).result(call, Said("1")).text


@pytest.mark.parametrize(
    ("options", "tools", "words"),
    [
        ({"form": "xml"}, ("a",), "unknown form 'xml'"),
        ({"form": "json", "open": "<"}, ("a",), "no option 'open'"),
        ({"form": "tags", "opne": "<"}, ("a",), "no option 'opne'"),
        ({"form": "tags", "open": ""}, ("a",), "not a text"),
        ({"form": "tags", "open": "|", "close": "|"}, ("a",), "both"),
        ({"form": "tags", "after": 3}, ("a",), "not a text"),
        ({"form": "tags"}, ("a", "b"), "one tool, but 2"),
        ({}, (), "has no tool"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], tools: tuple[str, ...], words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        call_format(options, tools, chat=False)


def test_a_name_that_nobody_provides_is_answered_with_the_nearest() -> None:
    assert find_environment("tools") is ToolEnvironment
    with pytest.raises(PluginFault, match="no environment is called 'tolls'"):
        find_environment("tolls")


# What a response is made of.


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[bool, int, Version]]:
    """(whether the model made it, how many tokens, with which version), the model's first turn among them."""
    found = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.sampled_from([OLD, NEW])), max_size=8))
    return [(own, max(size, 1) if own else size, version) for own, size, version in [*found, (True, 2, NEW)]]


@given(pieces())
def test_a_transcript_holds_every_token_once_under_a_version_and_knows_which_the_model_made(
    made: list[tuple[bool, int, Version]],
) -> None:
    whole, tokens, own = Transcript(), [], []
    for number, (is_own, size, version) in enumerate(made):
        ids = tuple(range(100 * number, 100 * number + size))
        text = chr(97 + number) * size
        if is_own:
            whole.turn(Sample(ids, (-0.5,) * size, text, "stop", (VersionSpan(version, 0, size),)), text)
        else:
            whole.observe(ShownTokens(ids, text, ids))
        tokens += ids
        own += [is_own] * size
    sample = whole.sample("stop")
    assert list(sample.token_ids) == tokens
    assert sample.own_tokens == sum(own) == whole.own_tokens
    assert range_problem(sample.observed, len(tokens)) == ""
    assert [not any(s <= at < e for s, e in sample.observed) for at in range(len(tokens))] == own
    assert [p == 0.0 for p in sample.logprobs] == [not one for one in own]
    assert "".join(sample.text[s:e] for s, e in sample.observed_text) == "".join(
        chr(97 + number) * size for number, (is_own, size, _) in enumerate(made) if not is_own
    )
    assert [span.start for span in sample.spans] == [0, *(span.end for span in sample.spans[:-1])]
    assert sample.spans[-1].end == len(tokens)


# Turn after turn.


class Letters:
    """A token is a character; 0 ends an answer."""

    chat = False

    def behind(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], *, said: Sequence[int]) -> str:
        return f"{'' if said[-1:] == (0,) else '.'}[{messages[0]['content']}]"

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        if "\x00" in text:
            raise DataError("it cannot be said")
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(one) for one in ids if one)


class Model:
    """Says one line after the other; what is behind its stop text was never drawn."""

    def __init__(self, *lines: str, cut: bool = False) -> None:
        self.lines, self.asked = list(lines), list[tuple[str, int, int]]()
        self._cut = cut

    async def __call__(self, whole: Transcript, most: int) -> Sample:
        self.asked.append((Letters().decode(whole.request_ids), most, whole.turns + 1))
        line = self.lines.pop(0)
        ids = tuple(map(ord, line)) if line.endswith(">>") else (*map(ord, line), 0)
        reason: FinishReason = "length" if len(ids) > most else "stop"
        ids = ids[:most]
        return Sample(ids, (-1.0,) * len(ids), "not looked at", reason, (VersionSpan(OLD, 0, len(ids)),))


class OneTool:
    names = ("calculator",)

    async def call(self, name: str, argument: str) -> Said:
        return Said(calculator(argument))


def scene(**limits: Any) -> EpisodeSetting:
    return EpisodeSetting(
        (ord("?"),),
        {},
        Letters(),
        EpisodeLimits(**{"turns": 4, "own": 100, "room": 200, "step_s": 5.0} | limits),
        FakeClock(),
    )


def checked(maker: Any = ToolEnvironment, **options: Any) -> CheckedEnvironment:
    options = options or ({"form": "tags"} if maker is ToolEnvironment else {})
    return CheckedEnvironment("mine", maker, Setting(options, {}, 1, OneTool()))


PICTURES = (PictureRef("/t/1-0", "ab" * 32, 32, 32, 32, 32, 90),) * 2


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (TagCallFormat("crop", "<", ">", before="[", after="]"), "[a\ufffc\ufffc]"),
        (JsonCallFormat(("crop",), chat=False), "\n<tool_response>\na\ufffc\ufffc\n</tool_response>\n"),
    ],
)
def test_the_pictures_of_a_tool_follow_its_text(form: CallFormat, shown: str) -> None:
    found = form.result(ToolCall("crop", ""), Said("a\ufffc", pictures=PICTURES))
    assert found == Observation(shown, pictures=PICTURES)
    assert form.result(ToolCall("crop", ""), Said("a\ufffc")).text == shown.replace("\ufffc\ufffc", "\ufffc")


def test_the_pictures_of_a_tool_are_parts_of_its_message() -> None:
    found = JsonCallFormat(("crop",), chat=True).result(ToolCall("crop", ""), Said("a", pictures=PICTURES))
    (message,) = found.messages
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]
    assert found.pictures == PICTURES


class Rule:
    """Stands for a model's rule: a placeholder is "@", and each picture has two of them for each 32 rows."""

    picture_text = "(@)"

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        return height, width

    def expand(self, short_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        left = list(sizes)
        if short_ids.count(ord("@")) != len(left):
            raise DataError("another number of placeholders")
        return tuple(
            one for token in short_ids for one in ([token] * (left.pop(0)[0] // 16) if token == ord("@") else [token])
        )

    def request_ids(self, short_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(short_ids)


def seeing(most: int = 2, **limits: Any) -> tuple[EpisodeSetting, list[PictureRef]]:
    stored: list[PictureRef] = []

    async def store(picture: PictureRef) -> Medium:
        stored.append(picture)
        return Medium("picture", picture.sha256, picture.size, (picture.height, picture.width, 3), "uint8")

    rule: Any = Rule()
    return replace(scene(**limits), pictures=EpisodePictures(rule, most, 1 << 20, store)), stored


async def test_the_placeholders_of_a_picture_are_observed_and_the_engine_gets_one_of_them() -> None:
    large = PICTURES[0]._replace(height=64)
    shown = [Observation(), Observation("x\ufffcy", pictures=[large]), Done()]
    model, (where, stored) = Model("ab", "c"), seeing()
    sample = await play_episode(checked(Game, shown=shown), model, where)
    assert Letters().decode(sample.token_ids) == "abx(@@@@)yc"
    assert model.asked[1][0] == "abx(@)y"
    assert sample.observed == ((3, 11),)
    assert sample.own_tokens == 5
    assert sample.logprobs[3:11] == (0.0,) * 8
    assert stored == [large._replace(target_height=64)]
    assert [one.shape for one in sample.media] == [(64, 32, 3)]


async def test_a_picture_for_which_there_is_no_room_is_not_stored() -> None:
    shown = [Observation(), Observation("\ufffc", pictures=[PICTURES[0]._replace(height=1600)]), Done()]
    where, stored = seeing(room=50)
    sample = await play_episode(checked(Game, shown=shown), Model("ab"), where)
    assert (sample.finish_reason, sample.media, stored) == ("length", (), [])


@pytest.mark.parametrize(
    ("shown", "most", "words"),
    [
        (Observation("no place", pictures=PICTURES[:1]), 2, "another number of placeholders"),
        (Observation("a placeholder @ of its own"), 2, "another number of placeholders"),
        (Observation("\ufffc", pictures=PICTURES[:1]), 0, "the job allows none"),
        (Observation("\ufffc", pictures=[b"bytes"]), 2, "not those of a tool"),  # type: ignore[list-item]
    ],
)
async def test_an_observation_whose_pictures_have_no_place_is_refused(
    shown: Observation, most: int, words: str
) -> None:
    where, stored = seeing(most)
    with pytest.raises(EnvironmentFault, match=words):
        await play_episode(checked(Game, shown=[Observation(), shown, Done()]), Model("ab"), where)
    assert stored == []


async def test_a_call_is_answered_behind_it_and_the_model_goes_on() -> None:
    model = Model("12*3 is <<12*3>>", ", so 36")
    sample = await play_episode(checked(), model, scene())
    assert sample.text == "12*3 is <<12*3>>36, so 36"
    assert sample.observed_text == ((16, 18),)
    assert sample.observed == ((16, 18),)
    assert sample.finish_reason == "stop"
    assert sample.token_ids[-1] == 0
    assert model.asked == [("", 100, 1), ("12*3 is <<12*3>>36", 84, 2)]
    assert sample.reward_parts == ()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        pytest.param({"turns": 1}, "<<1+1>>", id="turns"),
        pytest.param({"turns": 2}, "<<1+1>>2<<2+2>>", id="two turns"),
        pytest.param({"own": 7}, "<<1+1>>", id="own tokens"),
        pytest.param({"own": 9}, "<<1+1>>2<<", id="own tokens in the middle of a turn"),
        pytest.param({"room": 8}, "<<1+1>>", id="an observation that does not fit"),
        pytest.param({"room": 9}, "<<1+1>>2<", id="all tokens"),
    ],
)
async def test_a_response_that_meets_a_limit_is_cut_off_there(limits: dict[str, int], text: str) -> None:
    sample = await play_episode(checked(), Model("<<1+1>>", "<<2+2>>", "<<3+3>>", "4"), scene(**limits))
    assert sample.text == text
    assert sample.finish_reason == "length"


class Game:
    """Returns the given observations, and is done after the last."""

    def __init__(self, setting: Setting) -> None:
        self.shown: list[Any] = list(setting.options["shown"])  # type: ignore[call-overload]
        self.closed = 0
        games.append(self)

    async def reset(self) -> Any:
        return self._next()

    async def step(self, turn: Turn) -> Any:
        self.turn = turn
        return self._next()

    def _next(self) -> Any:
        one = self.shown.pop(0)
        if isinstance(one, BaseException):
            raise one
        return one

    async def close(self) -> None:
        self.closed += 1


games: list[Game] = []


async def test_long_observation_is_tokenized_in_a_thread_and_only_up_to_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, seen = Letters.encode_behind, list[tuple[int, bool]]()

    def told(self: Letters, before: Sequence[int], text: str) -> tuple[int, ...]:
        seen.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(self, before, text)

    monkeypatch.setattr(Letters, "encode_behind", told)
    shown = [Observation(), Observation("a" * 5000), Observation("b" * 1_000_000)]
    sample = await play_episode(checked(Game, shown=shown), Model("one", "two"), scene(room=6000))
    assert (sample.finish_reason, len(sample.token_ids)) == ("length", 5008)
    assert seen == [(5000, False), (16 * (6000 - 5008), False)]
    with pytest.raises(
        EnvironmentFault, match="before the first turn has more than 200 tokens, but a response has at most 200"
    ):
        await play_episode(checked(Game, shown=[Observation("c" * 1_000_000)]), Model(), scene())


async def test_first_observation_is_part_of_the_response() -> None:
    sample = await play_episode(
        checked(Game, shown=[Observation("go: "), Observation(" and? "), Done(0.5)]), Model("a", "b"), scene()
    )
    assert sample.text == "go: a and? b"
    assert sample.observed_text == ((0, 4), (5, 11))
    assert sample.observed == ((0, 4), (6, 12))  # an end token stands behind "a"
    assert sample.spans == (VersionSpan(OLD, 0, len(sample.token_ids)),)
    assert sample.reward_parts == (("environment", 0.5),)
    assert games[-1].closed == 1
    assert games[-1].turn == Turn("b", 2, "stop", 2)


async def test_messages_are_written_by_the_template_which_closes_an_answer_that_has_no_end() -> None:
    told = Observation(messages=({"role": "user", "content": "x"},))
    for line, text in (("a", "a[x]b"), ("a>>", "a>>.[x]b")):
        chatting = Letters()
        chatting.chat = True
        where = replace(scene(), renderer=chatting)
        sample = await play_episode(checked(Game, shown=[Observation(), told, Done()]), Model(line, "b"), where)
        assert sample.text == text


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ([ValueError("no")], "raised ValueError: no in reset"),
        ([Observation(), KeyError("k")], "raised KeyError: 'k' in step, after turn 1"),
        ([Observation(), "text"], "returned a str from step"),
        ([Observation(), Observation()], "returned an empty observation"),
        ([Observation("a", ({"role": "user", "content": "b"},))], "both text and messages"),
        ([Observation(messages=({"role": "user", "content": "b"},))], "before the first turn"),
        ([Observation(), Observation(messages=({"role": "user", "content": "b"},))], "prompts are plain text"),
        ([Observation(), Done(float("nan"))], "not finite"),
        ([Observation(), Done("much")], "returned the reward 'much'"),
        ([Observation("\x00")], "cannot be said"),
        ([Observation("x" * 300)], "before the first turn has 300 tokens"),
        ([Observation(), SystemExit(1)], "raised SystemExit"),
        ([Observation(), asyncio.CancelledError("not mine")], "raised CancelledError: not mine in step, after turn 1"),
    ],
)
async def test_an_environment_that_does_what_it_must_not_has_failed_and_is_closed(shown: list[Any], words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        await play_episode(checked(Game, shown=shown), Model("a", "b"), scene())
    assert games[-1].closed == 1


async def test_a_tool_that_cannot_be_had_is_not_blamed_on_the_environment() -> None:
    with pytest.raises(PluginFault, match="no tool"):
        await play_episode(
            checked(Game, shown=[Observation(), PluginFault("no tool is called so")]), Model("a"), scene()
        )


async def test_an_environment_that_takes_too_long_has_failed() -> None:
    class Slow(Game):
        async def step(self, turn: Turn) -> Any:
            await asyncio.Event().wait()

    clock = FakeClock()
    playing = asyncio.create_task(
        play_episode(checked(Slow, shown=[Observation()]), Model("a"), replace(scene(step_s=3.0), clock=clock))
    )
    await clock.settle()
    await clock.advance(3.5)
    with pytest.raises(EnvironmentFault, match="longer than 3 s"):
        await playing
    assert games[-1].closed == 1


class Deaf(Game):
    """Swallows cancellations in the given methods."""

    def __init__(self, setting: Setting) -> None:
        self.where = str(setting.options["where"])

    async def reset(self) -> Any:
        return await self._stay("reset") or Observation()

    async def step(self, turn: Turn) -> Any:
        return await self._stay("step")

    async def close(self) -> None:
        await self._stay("close")

    async def _stay(self, where: str) -> None:
        while where in self.where:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


async def test_an_environment_that_does_not_end_when_it_is_told_to_is_left_to_itself() -> None:
    clock = FakeClock()
    where = replace(scene(step_s=3.0), clock=clock)
    playing = asyncio.create_task(play_episode(checked(Deaf, where="step and close"), Model("a"), where))
    await clock.settle()
    await clock.advance(3.0)
    await clock.advance(END_S - 0.1)
    assert not playing.done()
    await clock.advance(0.2)  # now it is closed, which goes the same way
    await clock.advance(3.0)
    await clock.advance(END_S)
    with pytest.raises(EnvironmentFault, match="longer than 3 s, and does not end when it is cancelled"):
        await playing


def test_uncancellable_environment_is_refused_without_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gcore.system.concurrency.END_S", 0.1)
    monkeypatch.setattr("gcore.rollout.environments.pool.find_environment", lambda name: Deaf)
    for method in ("reset", "close"):
        spec = EnvironmentSpec(name="deaf", step_timeout_s=0.1, options={"where": method})
        with pytest.raises(PluginFault, match="does not end when it is cancelled"):
            try_environment(spec, {}, chat=False)


async def test_a_response_that_is_cancelled_within_its_environment_is_cancelled_and_no_fault_of_it() -> None:
    class Slow(Game):
        async def step(self, turn: Turn) -> Any:
            await asyncio.Event().wait()

    clock = FakeClock()
    where = replace(scene(), clock=clock)
    playing = asyncio.create_task(play_episode(checked(Slow, shown=[Observation()]), Model("a"), where))
    await clock.settle()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert games[-1].closed == 1


def test_an_environment_that_cannot_be_made_has_failed() -> None:
    with pytest.raises(EnvironmentFault, match=r"raised KeyError.*when it was created"):
        checked(Game, other=1)

    def cancels(setting: Setting) -> Any:
        raise asyncio.CancelledError

    with pytest.raises(EnvironmentFault, match="raised CancelledError when it was created"):
        checked(cancels)

    class Stops(Game):
        stop = ("",)

    with pytest.raises(EnvironmentFault, match="not a tuple of texts"):
        checked(Stops, shown=[])


def test_environment_cannot_change_its_shared_entry_and_options() -> None:
    fields, options = {"answer": 7, "steps": [1, {"of": 2}]}, {"guesses": 5}

    def greedy(setting: Setting) -> Any:
        made: Any = setting
        made.options.pop("guesses")
        made.fields.pop("answer")
        made.fields["steps"][1]["of"] = 3
        return Game(Setting({"shown": []}, {}, 1, OneTool()))

    CheckedEnvironment("mine", greedy, Setting(options, fields, 1, OneTool()))
    assert (fields, options) == ({"answer": 7, "steps": [1, {"of": 2}]}, {"guesses": 5})


@pytest.mark.parametrize("method", ["reset", "step", "close"])
def test_an_environment_lacks_no_method_and_all_are_asynchronous(method: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"'mine' has no method {method!r}. Write `async def {method}`"):
        checked(type("Lacks", (Game,), {method: None}), shown=[])
    with pytest.raises(EnvironmentFault, match=f"'mine' has a {method!r} that is not async"):
        checked(type("Plain", (Game,), {method: lambda *given: None}), shown=[])
    inner = getattr(Game, method)
    wrapped = functools.wraps(inner)(lambda *given: inner(*given))
    checked(type("Wrapped", (Game,), {method: wrapped}), shown=[])


async def test_exception_before_the_first_await_is_an_environment_fault() -> None:
    @functools.wraps(Game.step)
    def step(self: Game, turn: Turn) -> Any:
        raise ValueError("at once")

    with pytest.raises(EnvironmentFault, match="raised ValueError: at once in step, after turn 1"):
        await play_episode(checked(type("Hasty", (Game,), {"step": step}), shown=[Observation()]), Model("a"), scene())


# The guide.


async def test_the_tool_and_the_environment_of_the_guide_do_what_it_says() -> None:
    found: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "use" / "environments.md", "python"):
        exec(compile(block.text, block.where, "exec", dont_inherit=True), found)
    assert found["days"]("2024-02") == "29"
    with pytest.raises(BadArgument, match="2024-02"):
        found["days"]("February")

    async def guess(*lines: str, **options: Any) -> Sample:
        setting = Setting(options, {"answer": 7}, 1, OneTool())
        model = Model(*lines)
        return await play_episode(CheckedEnvironment("game", found["HigherLower"], setting), model, scene(turns=9))

    won = await guess("5", "x", "7")
    assert won.text == "5higher\nxwrite a number\n7"
    assert won.reward_parts == (("environment", 1.0),)
    assert (await guess("5", "9", guesses=2)).reward_parts == (("environment", 0.0),)
    with pytest.raises(EnvironmentFault, match="no option 'guess'"):
        await guess("5", guess=2)


@pytest.mark.parametrize("chat", [False, True])
async def test_half_a_surrogate_pair_that_a_tool_echoes_is_spelt_out(chat: bool) -> None:
    class Echo(OneTool):
        names = ("calculator",)

        async def call(self, name: str, argument: str) -> Said:
            return Said(f"{argument} is no sum")

    environment = CheckedEnvironment("tools", ToolEnvironment, Setting({}, {}, 1, Echo(), chat))
    call = '<tool_call>{"name": "calculator", "arguments": {"sum": "\\ud83d"}}</tool_call>'
    shown = await environment.step(Turn(call, 9, "stop", 1), chat=chat)
    assert isinstance(shown, Observation)
    assert "\\ud83d is no sum" in (shown.messages[0]["content"] if chat else shown.text)


async def test_messages_are_spelt_out_however_deep_and_may_not_hold_themselves() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "\ud83d"}], "number": 3}
    itself: dict[str, Any] = {"role": "user"}
    itself["content"] = [itself]
    environment = checked(Game, shown=[Observation(messages=(parts,)), Observation(messages=(itself,))])
    shown = await environment.step(Turn("a", 1, "stop", 1), chat=True)
    assert shown == Observation(
        messages=({"role": "user", "content": [{"type": "text", "text": "\\ud83d"}], "number": 3},)
    )
    with pytest.raises(EnvironmentFault, match="that contain themselves"):
        await environment.step(Turn("a", 1, "stop", 2), chat=True)
