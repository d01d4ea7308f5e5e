"""Conversations of several turns: the tokens equal those of transformers, for every form of template and end tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError

MARKS = (
    *(
        "<s>",
        "</s>",
        "<eos>",
        "<eot>",
        "<eom>",
        "<|im_start|>",
        "<|im_end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
    ),
    *(
        "<|observation|>",
        "<|end|>",
        "<h>",
        "</h>",
        "[INST]",
        "[/INST]",
        "<|turn|>",
        "<|endoftext|>",
        "<response>",
        "</response>",
    ),
)


@dataclass(frozen=True)
class Shape:
    """A template in the manner of a family of models. `ends`: its end tokens, those of `generation_config.json`; `closes`: the one that it
    writes behind an answer, empty for none."""

    template: str
    closes: str
    ends: tuple[str, ...] = ("<eos>",)
    variables: dict[str, Any] = field(default_factory=dict)


# Written for these tests.
SHAPES = {
    "marked turns": Shape(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "a new line before the end": Shape(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "headers": Shape(
        "{{ bos_token }}{% for m in messages %}{{ '<h>' + m['role'] + '</h>\n\n' + m['content'] | trim + '<eot>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}",
        "<eot>",
        ("<eos>", "<eom>", "<eot>"),
    ),
    "the date of a template": Shape(
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        "{{ bos_token + '<h>system</h>Today Date: ' + date_string + '<eot>' }}"
        "{% for m in messages %}{{ '<h>' + m['role'] + '</h>' + m['content'] + '<eot>' }}{% endfor %}"
        "{{ '<h>assistant</h>' if add_generation_prompt }}",
        "<eot>",
        ("<eos>", "<eot>"),
        {"date_string": "1 Jan 2026"},
    ),
    "the model's role": Shape(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
        "{{ '<h>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<eot>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<h>model\n' }}{% endif %}",
        "<eot>",
        ("<eos>", "<eot>"),
    ),
    "brackets": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        "<eos>",
    ),
    "brackets without spaces": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
        "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
        "<eos>",
        ("</s>", "<eos>"),
    ),
    "the role of the next turn ends one": Shape(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|user|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "roles on lines": Shape(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        "<eos>",
    ),
    "roles with an end": Shape(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
        "<|end|>",
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "words for roles": Shape(
        "A chat. {% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}",
        "</s>",
        ("<eos>", "</s>"),
    ),
    "titles": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
        "{% else %}{{ '### Response:\n' + m.content + '<|endoftext|>\n\n' }}{% endif %}{% endfor %}"
        "{{ '### Response:\n' if add_generation_prompt }}",
        "<|endoftext|>",
        ("<|endoftext|>",),
    ),
    "no end": Shape("{% for m in messages %}{{ m.content + '\n' }}{% endfor %}", ""),
    "an end within a frame": Shape(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|turn|><|user|>' + m.content + '<eot>' }}"
        "{% else %}{{ '<|turn|><|assistant|><response>' + m.content + '</response><eot>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|><|assistant|>' }}{% endif %}",
        "<eot>",
        ("<eot>", "<eos>"),
    ),
    "thinking switched off": Shape(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '/no ' }}{% endif %}{% endif %}",
        "<|im_end|>",
        ("<|im_end|>",),
        {"enable_thinking": True},
    ),
    "marked for training": Shape(
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content + '<eot>' }}{% endgeneration %}"
        "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}",
        "<eot>",
        ("<eos>", "<eot>"),
    ),
    "the clock, asked for": Shape(
        "<|system|>{{ strftime_now('%d %B %Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|end|>",
        ("<|end|>", "<eos>"),
        {"strftime_now": "2026-01-01"},
    ),
    "the clock, if there is one": Shape(
        "<|system|>{{ strftime_now('%Y-%m-%d') if strftime_now is defined else 'then' }}{% for m in messages %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|end|>",
        ("<|end|>", "<eos>"),
        {"strftime_now": "2026-02-28T13:00"},
    ),
    "texts and parts": Shape(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<eot>",
        ("<eos>", "<eot>"),
    ),
    "options as objects": Shape(
        "{% set ns = namespace(n=0) %}{{ '<|system|>' + (options | tojson) if options }}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "<|{{ m.role }}|>{{ ns.n }}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "</s>",
        ("</s>", "<eos>"),
        {"options": {"tools": ["python", "browser"], "effort": 3}},
    ),
}


def write_model(folder: Path, ends: tuple[str, ...]) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is 12 + 34 = 46\n\n user assistant system model Today Date"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "eos_token_id": tokenizer.token_to_id("<eos>")})
    )
    ids = [tokenizer.token_to_id(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[0] if len(ids) == 1 else ids}))
    return folder


@dataclass(frozen=True, repr=False)
class Pair:
    """One shape, rendered here and by transformers."""

    shape: Shape
    ours: PromptRenderer
    theirs: Any

    def text(self, messages: list[dict[str, Any]]) -> str:
        """What transformers makes of it, on the day that the shape names."""
        variables = dict(self.shape.variables)
        template = self.shape.template
        if (day := variables.pop("strftime_now", None)) is not None:
            shown = datetime.fromisoformat(day)
            template = re.sub(r"strftime_now\('(.*?)'\)", lambda call: f"'{shown.strftime(call[1])}'", template)
        text: str = self.theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, chat_template=template, **variables
        )
        return text

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.theirs(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    from transformers import AutoTokenizer

    found = {}
    for name, shape in SHAPES.items():
        folder = write_model(tmp_path_factory.mktemp("model"), shape.ends)
        (folder / "chat_template.jinja").write_text(shape.template)
        ours = PromptRenderer.load(folder, chat=True, variables=shape.variables)
        found[name] = Pair(shape, ours, AutoTokenizer.from_pretrained(str(folder)))
    return found


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]\ue000\ue001"), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=12, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), last=WORDS)
def test_the_tokens_of_several_turns_are_those_of_transformers(
    pairs: dict[str, Pair], name: str, turns: list[tuple[str, str]], last: str
) -> None:
    pair = pairs[name]
    messages: list[dict[str, Any]] = []
    tokens: tuple[int, ...] = ()
    shown, said = "", ""
    for number, (question, answer) in enumerate([*turns, (last, "")]):
        messages.append({"role": "user", "content": question})
        whole = pair.text(messages)
        if number == 0:
            tokens = pair.ours.encode(pair.ours.render(messages))
            assert tokens == pair.ids(whole)
        else:
            # What the model said: all that the template writes between the opening of an answer and its end token.
            place = (
                whole.index(pair.shape.closes, len(shown)) + len(pair.shape.closes)
                if pair.shape.closes
                else len(shown + said)
            )
            generated = pair.ids(whole[len(shown) : place])
            behind = pair.ours.continued(messages, len(messages) - 2, {}, said=generated)
            added = pair.ours.encode_behind(tokens + generated, behind)
            assert not pair.shape.closes or added == pair.ids(whole[place:]), (
                "behind an end token the whole is cut there too"
            )
            tokens += generated + added
        assert pair.ours.tokenizer.spell(tokens) == whole
        messages.append({"role": "assistant", "content": answer})
        shown, said = whole, answer


@pytest.mark.parametrize("name", SHAPES)
def test_an_observation_stands_behind_an_answer_as_the_template_writes_it(pairs: dict[str, Pair], name: str) -> None:
    ours, shape = pairs[name].ours, pairs[name].shape
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "46"},
        {"role": "user", "content": "a"},
    ]
    if not shape.closes:
        assert ours.behind(messages[2:], {}, said=ours.encode("46")) == "\na\n"
        return
    whole = pairs[name].text(messages)
    place = whole.index(shape.closes, whole.index("46")) + len(shape.closes)
    said = ours.encode(whole[whole.index("46") : place])
    assert ours.behind(messages[2:], {}, said=said).replace("2a", "3a") == whole[place:]


def test_the_end_of_a_turn_stands_once_for_every_end_token_of_the_model(pairs: dict[str, Pair]) -> None:
    ours = pairs["headers"].ours
    behind = "<h>user</h>\n\na<eot><h>assistant</h>\n\n"
    for end in ("<eos>", "<eom>", "<eot>"):
        assert ours.behind([{"role": "user", "content": "a"}], {}, said=ours.encode("46" + end)) == behind
    assert ours.behind([{"role": "user", "content": "a"}], {}, said=ours.encode("46")) == "<eot>" + behind


def test_an_end_token_that_opens_the_next_turn_is_left_out_only_where_the_answer_has_it(pairs: dict[str, Pair]) -> None:
    ours = pairs["the role of the next turn ends one"].ours
    told = [{"role": "observation", "content": "x"}]
    assert ours.behind(told, {}, said=ours.encode("46<|observation|>")) == "\nx<|assistant|>\n"
    for other in ("<|user|>", "<|endoftext|>"):
        assert ours.behind(told, {}, said=ours.encode("46" + other)) == "<|observation|>\nx<|assistant|>\n"


def test_texts_are_without_end_tokens_even_if_the_tokenizer_does_not_call_them_special(tmp_path: Path) -> None:
    folder = write_model(tmp_path, ("<eos>", "<eot>"))
    tree = json.loads((folder / "tokenizer.json").read_text())
    for token in tree["added_tokens"]:
        token["special"] = token["content"] != "<eot>"
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    ours = ModelTokenizer.load(folder)
    assert ours.decode(ours.encode("46<eot>", add_special_tokens=False)) == "46"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("headers", "<eot>"),
        ("brackets", "<eos>"),
        ("marked turns", "<|im_end|>"),
        ("no end", "<eos>"),
        ("words for roles", "</s>"),
    ],
)
def test_a_demonstration_ends_as_the_template_ends_an_answer(pairs: dict[str, Pair], name: str, end: str) -> None:
    ours = pairs[name].ours
    found = ours.answer_end({})
    assert found is not None
    assert ours.tokenizer.spell((found,)) == end


# The content of a message.

TEXTS_ONLY = "{% for m in messages %}<|{{ m.role }}|>{{ m.content + '<eot>' }}{% endfor %}<|assistant|>"
PARTS_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}<eot>{% endfor %}<|assistant|>"
)
SYSTEM_TEXT_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<eot>{% endfor %}<|assistant|>"
)
BOTH = SHAPES["texts and parts"].template


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), ("<eos>", "<eot>"))


def load(folder: Path, template: str, **more: Any) -> PromptRenderer:
    (folder / "own.jinja").write_text(template)
    return PromptRenderer.load(folder, chat=True, template=str(folder / "own.jinja"), **more)


@pytest.mark.parametrize("template", [TEXTS_ONLY, PARTS_ONLY, SYSTEM_TEXT_ONLY, BOTH])
def test_a_text_and_a_list_of_text_parts_are_the_same_prompt(folder: Path, template: str) -> None:
    ours = load(folder, template, system="s")
    expected = "<|system|>s<eot><|user|>12+34<eot><|assistant|>"
    assert ours.render("12+34") == expected
    assert ours.render([{"role": "user", "content": parts("12+", "34")}]) == expected
    whole = [{"role": "system", "content": parts("s")}, {"role": "user", "content": "12+34"}]
    assert ours.render(whole) == expected
    told = [{"role": "tool", "content": parts("x"), "name": "f"}]
    end = ours.encode("46<eot>")
    assert (
        ours.behind(told, {}, said=end)
        == ours.behind([{**told[0], "content": "x"}], {}, said=end)
        == "<|tool|>x<eot><|assistant|>"
    )


def test_a_template_that_reads_both_gets_the_content_as_it_was_written(folder: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": parts(" a ", " b ")}]
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        messages, chat_template=BOTH, tokenize=False, add_generation_prompt=True
    )
    assert load(folder, BOTH).render(messages) == theirs == "<|user|>ab<eot><|assistant|>"


# Variables.


def test_a_variable_that_no_template_reads_is_refused_with_those_that_it_reads(folder: Path) -> None:
    template = "{% if enable_thinking %}t{% endif %}{{ messages[0].content }}"
    assert load(folder, template, variables={"enable_thinking": True}).render("x") == "tx"
    assert load(folder, template).render("x") == "x"
    with pytest.raises(
        DataError, match=r"does not read the variable 'enable_thinkin', did you mean .*enable_thinking"
    ) as caught:
        load(folder, template, variables={"enable_thinkin": True})
    assert "the template reads enable_thinking" in str(caught.value)


def test_a_template_that_asks_for_the_date_names_the_variable_to_set(folder: Path) -> None:
    template = "{{ strftime_now('%d %B %Y') }} {{ messages[0].content }}"
    with pytest.raises(DataError, match=r"template_variables: {strftime_now: 2026-01-01}"):
        load(folder, template).render("x")
    assert load(folder, template, variables={"strftime_now": "2026-01-01"}).render("x") == "01 January 2026 x"
    with pytest.raises(DataError, match="not a date"):
        load(folder, template, variables={"strftime_now": "today"})


def test_variables_need_a_chat_template(folder: Path) -> None:
    with pytest.raises(DataError, match="`template_variables` is set"):
        PromptRenderer.load(folder, chat=False, variables={"enable_thinking": False})


def test_a_tool_template_counts_as_a_reader_of_variables(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ style }}{{ messages[0].content }}")
    ours = PromptRenderer.load(folder, chat=True, variables={"style": "short "})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert (ours.render("x"), ours.render("x", {"tools": tools})) == ("x", "short x")
