"""Conversations of agents as tokens: generated tokens stay unchanged, and a changed history is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gcore.data.renderer import ChatForm, PromptRenderer
from gcore.data.templates import compile_template
from gcore.data.tokenizer import ModelTokenizer
from gcore.reward.api import RewardError
from gcore.rollout.agents.api import AgentRequestRefused
from gcore.rollout.agents.chat_protocol import (
    HARMLESS,
    ChatCompletion,
    ChatRequest,
    SamplingRules,
    encode_answer,
    encode_refusal,
    encode_stream,
    format_answer,
    parse_message,
    parse_request,
)
from gcore.rollout.agents.session import Dialogue
from gcore.rollout.postprocess import align_prompts
from gcore.types import Sample, Version, VersionSpan

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
RULES = SamplingRules(temperature=(1.0,), top_p=(1.0,), most=64)
VERSION = Version(0, 1)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\ue000"), min_size=1, max_size=12)
GENERATED = st.tuples(st.lists(st.integers(2, 330), min_size=1, max_size=8), st.booleans())


def tokenizer() -> ModelTokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=331, special_tokens=[END, START], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["what is 12 + 34 = 46, assistant user tool system"] * 9, trainer)
    made.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    return ModelTokenizer(made, special_tokens={"eos_token": END}, settings={}, max_length=None)


TOKENIZER = tokenizer()


def renderer(template: str = CHATML) -> PromptRenderer:
    form = compile_template(template, "test")
    return PromptRenderer(TOKENIZER, ChatForm(form, form), where="test")


def asked(*messages: Mapping[str, Any], **more: Any) -> ChatRequest:
    return parse_request(json.dumps({"messages": messages, **more}).encode(), RULES)


def made(ids: tuple[int, ...]) -> Sample:
    return Sample(ids, (-1.0,) * len(ids), "", "stop", (VersionSpan(VERSION, 0, len(ids)),))


def said(dialogue: Dialogue, question: ChatRequest, ids: tuple[int, ...]) -> dict[str, Any]:
    """One turn, as it is served: what the agent is sent."""
    shown = dialogue.shown(question)
    sample = made(ids)
    text = dialogue.text_of(sample, shown)
    answer = format_answer(text, "call", tools=bool(question.tools))
    dialogue.answered(question, shown, sample, text, answer)
    return answer


def ids_of(drawn: tuple[list[int], bool]) -> tuple[int, ...]:
    numbers, ended = drawn
    return (*numbers, 0) if ended else tuple(numbers)


@settings(max_examples=60, deadline=None)
@given(
    template=st.sampled_from([CHATML, PLAIN]),
    first=WORDS,
    turns=st.lists(st.tuples(GENERATED, st.sampled_from(["user", "tool", "system"]), WORDS), min_size=1, max_size=4),
)
def test_generated_tokens_stay_unchanged_and_the_rest_follows_the_template(
    template: str, first: str, turns: list[tuple[tuple[list[int], bool], str, str]]
) -> None:
    ours = renderer(template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    dialogue = Dialogue(ours, asked(*messages))
    assert dialogue.before == ours.encode(ours.render(messages))
    generated = []
    for drawn, role, words in turns:
        question = asked(*messages)
        assert dialogue.turns == 0 or dialogue.goes_on(question)
        generated.append(ids_of(drawn))
        answer = said(dialogue, question, generated[-1])
        assert dialogue.token_ids[-len(generated[-1]) :] == generated[-1]
        messages += [answer, {"role": role, "content": words}]
    sample = dialogue.sample("stop")
    own, at = [], 0
    for start, end in (*sample.observed, (len(sample.token_ids),) * 2):
        own.append(sample.token_ids[at:start])
        at = end
    assert [one for one in own if one] == generated, "nothing that was generated was tokenized again"
    assert sample.prompt_ids == dialogue.before
    assert all(sample.logprobs[i] == 0 for start, end in sample.observed for i in range(start, end))
    assert sample.spans == (VersionSpan(VERSION, 0, len(sample.token_ids)),)
    spoken, at = "", 0
    for start, end in (*sample.observed_text, (len(sample.text),) * 2):
        assert at <= start <= end
        spoken += sample.text[at:start]
        at = end
    assert spoken == "".join(answer["content"] or "" for answer in messages[1::2]), "the rest is what the model said"
    # Where the tokens are whole characters, the conversation reads as the template writes it at once, special tokens aside.
    if "\ufffd" not in sample.text and not any("\ufffd" in str(m["content"]) for m in messages):
        at_once = ours.render([*messages[:-1]]).replace(START, "").replace(END, "")
        opening = "assistant\n" if template == CHATML else ""
        read = ours.decode(dialogue.token_ids)
        assert (read + ("\n" + opening if template == CHATML else "")).replace(START, "").replace(END, "") == at_once


def test_the_end_of_an_answer_stands_there_once() -> None:
    for ids in ((60, 61, 0), (60, 61)):
        ours = renderer()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        dialogue = Dialogue(ours, asked(*messages))
        answer = said(dialogue, asked(*messages), ids)
        shown = dialogue.shown(asked(*messages, answer, {"role": "user", "content": "b"}))
        assert (ids + shown.ids).count(0) == 2, "of the answer, and of the message behind it"


def test_a_template_that_leaves_out_the_thinking_of_past_turns_is_not_followed() -> None:
    forgets = CHATML.replace("+ m.content }}", "+ m.content.split('</think>')[-1] }}")
    ours, first = renderer(forgets), {"role": "user", "content": "a"}
    dialogue = Dialogue(ours, asked(first))
    thought = ours.encode("<think>so and so</think>46")
    answer = said(dialogue, asked(first), thought)
    second = asked(first, answer, {"role": "user", "content": "b"})
    assert "so and so" not in ours.render(second.messages)
    said(dialogue, second, (60, 0))
    assert dialogue.sample("stop").token_ids[: len(thought)] == thought
    assert "so and so</think>46\nuser\nb\nassistant\n" in ours.decode(dialogue.token_ids)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_calls_are_told_apart_and_come_back_as_they_were_sent() -> None:
    ours = renderer()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+2"}]
    dialogue = Dialogue(ours, asked(*messages, tools=TOOLS))
    assert '"name": "add"' in ours.decode(dialogue.before)
    text = 'I ask. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answer = said(dialogue, asked(*messages, tools=TOOLS), ours.encode(text))
    (call,) = answer["tool_calls"]
    assert answer["content"] == "I ask. "
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    sent_back = answer | {
        "refusal": None,
        "tool_calls": [call | {"function": call["function"] | {"arguments": '{"a":1,"b":2}'}}],
    }
    told = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    again = asked(*messages, sent_back, told, tools=TOOLS)
    assert dialogue.goes_on(again)
    assert dialogue.shown(again).text == "\ntool\n3\nassistant\n"
    assert "its tools" in dialogue.changed(asked(*messages, sent_back, told))


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("no call", 0, "no call"),
        ("<tool_call>{oops}</tool_call>", 0, "<tool_call>{oops}</tool_call>"),
        ('<tool_call>{"name": 3}</tool_call>', 0, '<tool_call>{"name": 3}</tool_call>'),
        ('<tool_call>{"name": "a"}', 0, '<tool_call>{"name": "a"}'),
        ('<tool_call>\n{"name": "a"}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>', 2, None),
    ],
)
def test_calls_that_are_none_stay_text(text: str, calls: int, content: str | None) -> None:
    answer = format_answer(text, "x", tools=True)
    assert len(answer.get("tool_calls", ())) == calls
    assert answer["content"] == content
    assert format_answer(text, "x", tools=False)["content"] == text


def test_an_edited_history_is_told_apart_from_one_that_goes_on() -> None:
    question = asked({"role": "system", "content": "s"}, {"role": "user", "content": "a"})
    dialogue = Dialogue(renderer(), question)
    answer = said(dialogue, question, (60, 61, 0))
    new = {"role": "user", "content": "b"}
    parts = [{"type": "text", "text": "a"}]
    assert dialogue.goes_on(asked({"role": "system", "content": "s"}, {"role": "user", "content": parts}, answer, new))
    edited = [
        (asked({"role": "system", "content": "t"}, {"role": "user", "content": "a"}, answer, new), "message 0"),
        (asked({"role": "user", "content": "a"}, answer, new), "message 0"),
        (
            asked({"role": "system", "content": "s"}, {"role": "user", "content": "a"}, answer | {"content": "?"}, new),
            "message 2",
        ),
        (
            asked({"role": "system", "content": "s"}, {"role": "user", "content": "a"}),
            "has 2 messages, but the conversation has 3",
        ),
    ]
    for one, words in edited:
        assert not dialogue.goes_on(one)
        assert words in dialogue.changed(one)


@pytest.mark.parametrize(
    ("template", "how"),
    [
        ("{{ messages[0].content }}", "leaves out"),
        (CHATML + "{{ messages[1].content if messages | length > 1 else '' }}", "writes more than once"),
        (
            CHATML.replace(
                "{% for m", "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}{% for m", 1
            ),
            "no",
        ),
    ],
)
def test_a_template_that_does_not_show_where_an_answer_ends_is_refused(template: str, how: str) -> None:
    first = {"role": "user", "content": "a"}
    dialogue = Dialogue(renderer(template), asked(first))
    answer = said(dialogue, asked(first), (60, 0))
    with pytest.raises(AgentRequestRefused, match=how) as caught:
        dialogue.shown(asked(first, answer, {"role": "user", "content": "b"}))
    assert caught.value.status == 400


# What may be asked for.


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"{", "not_json", "not JSON"),
        (b"[" * 100_000, "not_json", "not JSON"),
        (b"[]", "not_json", "list"),
        ({}, "bad_messages", "not a list"),
        ({"messages": []}, "bad_messages", "not a list"),
        ({"messages": [3]}, "bad_messages", "message 0"),
        ({"messages": [{"role": "function", "content": "x"}]}, "bad_messages", "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_messages", "neither text nor a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_messages", "part"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "bad_messages", "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "bad_messages", "assistant"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "user"}]},
            "bad_messages",
            "function name",
        ),
        ({"temperature": 0.2}, "unsupported_parameter", "the job samples with 1"),
        ({"temperature": "hot"}, "unsupported_parameter", "temperature"),
        ({"top_p": 0.5}, "unsupported_parameter", "top_p"),
        ({"max_tokens": 65}, "unsupported_parameter", "rollout.max_new_tokens is 64"),
        ({"max_completion_tokens": 0}, "unsupported_parameter", "positive integer"),
        ({"n": 2}, "unsupported_parameter", "n 2"),
        ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
        ({"logprobs": True}, "unsupported_parameter", "logprobs"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "function"),
        ({"stop": [""]}, "unsupported_parameter", "stop"),
        ({"stop": 3}, "unsupported_parameter", "stop"),
        ({"temprature": 1.0}, "unsupported_parameter", "temprature"),
    ],
)
def test_unsupported_requests_are_refused_with_the_reason(body: Any, code: str, words: str) -> None:
    messages = {"messages": [{"role": "user", "content": "x"}]}
    raw = (
        body
        if isinstance(body, bytes)
        else json.dumps(body if not body or "messages" in body else messages | body).encode()
    )
    with pytest.raises(AgentRequestRefused, match=words) as caught:
        parse_request(raw, RULES)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert json.loads(encode_refusal(caught.value))["error"]["code"] == code


def test_neutral_and_ignored_parameters_are_accepted() -> None:
    user = {"role": "user", "content": "x"}
    plain = asked(user)
    nothing = {
        "n": 1,
        "temperature": 1,
        "top_p": 1.0,
        "logit_bias": None,
        "tool_choice": "auto",
        "logprobs": False,
        "stop": None,
    }
    assert asked(user, **nothing, **dict.fromkeys(HARMLESS - {"model"}, "any")) == plain
    assert asked(user, max_tokens=64, stop="x").most == 64
    rules = SamplingRules((0.0, 1.0), (1.0,), 64, frozenset({"temperature", "max_tokens", "logprobs"}))
    body = {"messages": [user], "temperature": 0.1, "max_tokens": 4096, "logprobs": True, "top_logprobs": 5}
    assert parse_request(json.dumps(body).encode(), rules) == plain
    assert parse_request(json.dumps({"messages": [user], "max_tokens": 5}).encode(), rules).most == 5
    greedy = SamplingRules((0.0, 0.7), (1.0,), 64)
    for temperature in (0, 0.7):
        assert parse_request(json.dumps({"messages": [user], "temperature": temperature}).encode(), greedy) == plain


@given(st.binary(max_size=40) | st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "messages", "stop", "tools", "user"]), inner, max_size=4)).map(lambda tree: json.dumps(tree).encode()))  # fmt: skip
def test_request_is_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(AgentRequestRefused):
        assert parse_request(raw, RULES).messages


# What is sent.


def test_an_answer_and_a_stream_of_it_have_openais_fields() -> None:
    message = format_answer('<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>', "c", tools=True)
    answer = ChatCompletion("chatcmpl-1", "gpt-4o", 7, message, "tool_calls", 5, 3)
    told = json.loads(encode_answer(answer))
    assert told.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (told["object"], told["model"]) == ("chat.completion", "gpt-4o")
    (choice,) = told["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0] == {
        "id": "c-0",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": "é"}'},
    }
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    lines = encode_stream(answer, usage=True).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    first, last, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-2])
    assert {first["object"], last["object"], usage["object"]} == {"chat.completion.chunk"}
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 8)


# The prompt of a group.


def told_first(*prompt_ids: int, observed: tuple[tuple[int, int], ...] = ()) -> Sample:
    return Sample(
        (7, 8, 9), (-1.0,) * 3, "789", "stop", (VersionSpan(VERSION, 0, 3),), observed=observed, prompt_ids=prompt_ids
    )


def test_the_prompt_of_a_group_is_what_all_its_questions_begin_with() -> None:
    prompt, (one, other) = align_prompts((5,), [told_first(1, 2, 3), told_first(1, 2, 4, 4, observed=((1, 2),))])
    assert prompt == (1, 2)
    assert (one.token_ids, one.observed, one.spans) == ((3, 7, 8, 9), ((0, 1),), (VersionSpan(VERSION, 0, 4),))
    assert (other.token_ids, other.observed) == ((4, 4, 7, 8, 9), ((0, 2), (3, 4)))
    assert other.logprobs == (0.0, 0.0, -1.0, -1.0, -1.0)
    assert {one.prompt_ids, other.prompt_ids} == {None}
    same, (first, second) = align_prompts((5,), [told_first(1, 2), told_first(1, 2)])
    assert same == (1, 2)
    assert first.token_ids == second.token_ids == (7, 8, 9)


def test_a_group_without_agents_is_left_as_it_is_and_questions_with_nothing_in_common_have_no_prompt() -> None:
    plain = made((1, 2))
    assert align_prompts((5,), [plain, plain]) == ((5,), (plain, plain))
    with pytest.raises(RewardError, match="no common prompt"):
        align_prompts((5,), [told_first(1), told_first(2)])


def test_a_message_of_the_assistant_counts_by_what_it_says() -> None:
    sent = {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "tool_calls": None}
    assert parse_message(sent, 0) == {"role": "assistant", "content": ""}
    assert parse_message({"role": "user", "content": "x", "name": "n", "extra": 1}, 0) == {
        "role": "user",
        "content": "x",
        "name": "n",
    }
