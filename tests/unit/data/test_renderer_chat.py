"""Templates, system messages and tool definitions: rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError

# Written for these tests, each in the manner of a family of models.
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
BRACKETS = """\
{{ bos_token }}{% set ns = namespace(system='') %}
{% if messages[0]['role'] == 'system' %}{% set ns.system = messages[0]['content'] %}{% endif %}
{% for m in messages if m['role'] != 'system' %}
{% if m['role'] == 'user' %}
{% if loop.last and tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson(indent=2) }} [/AVAILABLE_TOOLS]{% endif %}
[INST] {{ ns.system ~ '\\n\\n' if loop.first and ns.system else '' }}{{ m['content'] }} [/INST]
{% elif m['role'] == 'assistant' %}{{ ' ' + (m['content'] or '') + eos_token }}
{% endif %}
{% endfor %}"""
HEADERS = """\
{{- bos_token }}{%- for m in messages %}
{{- '<|h|>' + m['role'] + '<|/h|>\\n' }}
{%- if loop.first and tools is defined and tools %}{{- 'Use: ' }}
{%- for t in tools %}{{- t.function.name + (', ' if not loop.last else '.') }}{%- endfor %}{%- endif %}
{{- m['content'] | trim }}{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n' }}{%- endif %}"""
TEMPLATES = {"hermes": HERMES, "brackets": BRACKETS, "headers": HEADERS}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": 'Adds "two" <numbers> & returns ü',
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CHATS: dict[str, Any] = {
    "a string": "what is 12 + 34 ?",
    "one message": [{"role": "user", "content": "the sum, äöü 🙂"}],
    "a system message of its own": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "a developer's": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "several turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "tool_calls": None, "reasoning": "easy"},
        {"role": "user", "content": "two"},
    ],
    "a tool was called": [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "add"},
    ],
}
Maker = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> Maker:
    """A model folder with a byte-level tokenizer that adds `<s>` before plain text."""

    def make(template: str | None = None, *, settings: dict[str, Any] | None = None, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<s>", "<|im_end|>", "<|im_start|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(["user assistant system tool"], trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.save(str(folder / "tokenizer.json"))
        known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(known | (settings or {})))
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 128}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


def theirs(folder: Path, messages: Any, *, tools: Any = None, template: str | None = None) -> tuple[str, list[int]]:
    """What transformers makes of it: text and tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    options = {"tools": tools, "add_generation_prompt": True, "chat_template": template}
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    return text, list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **options)["input_ids"])


def ours(renderer: PromptRenderer, messages: Any, fields: dict[str, Any] | None = None) -> tuple[str, list[int]]:
    text = renderer.render(messages, fields)
    return text, list(renderer.encode(text))


def write_tools(folder: Path, tools: Any) -> str:
    path = folder / "tools.json"
    path.write_text(tools if isinstance(tools, str) else json.dumps(tools))
    return str(path)


# --- the same as transformers


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_chats_with_and_without_tools_agree_with_transformers(
    make_model: Maker, tmp_path: Path, template: str, chat: Any, tools: Any
) -> None:
    if template is HEADERS and chat is CHATS["a tool was called"]:
        chat = chat[:1]  # it takes no message without text, here as there
    folder = make_model(template)
    file = None if tools is None else write_tools(tmp_path, tools)
    renderer = PromptRenderer.load(folder, chat=True, tools=file)
    assert ours(renderer, chat) == theirs(folder, chat, tools=tools)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_sources_system_message_is_the_first_message(make_model: Maker, template: str) -> None:
    folder = make_model(template)
    renderer = PromptRenderer.load(folder, chat=True, system="be exact")
    with_system = [{"role": "system", "content": "be exact"}, {"role": "user", "content": "hello"}]
    assert ours(renderer, "hello") == theirs(folder, with_system)
    assert ours(renderer, with_system[1:]) == theirs(folder, with_system)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_entry_with_a_system_message_of_its_own_keeps_it(make_model: Maker, role: str) -> None:
    folder = make_model(HEADERS)
    chat = [{"role": role, "content": "be brief"}, {"role": "user", "content": "hello"}]
    text, _ = ours(PromptRenderer.load(folder, chat=True, system="be exact"), chat)
    assert text == theirs(folder, chat)[0]
    assert "be exact" not in text


def test_a_template_of_the_users_own_goes_before_the_models(make_model: Maker, tmp_path: Path) -> None:
    folder = make_model(HERMES)
    own = tmp_path / "own.jinja"
    own.write_text(HEADERS)
    renderer = PromptRenderer.load(folder, chat=True, template=str(own), tools=write_tools(tmp_path, TOOLS))
    assert ours(renderer, "hello") == theirs(folder, "hello", tools=TOOLS, template=HEADERS)
    without = make_model(None, name="without")
    assert PromptRenderer.load(without, chat=True, template=str(own)).render("hello").startswith("<s><|h|>user")


@pytest.mark.parametrize("place", ["a folder of templates", "a list in the configuration"])
def test_a_model_with_a_template_for_tools_uses_it_where_there_are_tools(
    make_model: Maker, tmp_path: Path, place: str
) -> None:
    if place == "a folder of templates":
        folder = make_model("plain")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(HERMES)
    else:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": HERMES}]
        folder = make_model(settings={"chat_template": named})
    with_tools = PromptRenderer.load(folder, chat=True, tools=write_tools(tmp_path, TOOLS))
    assert ours(with_tools, "hello") == theirs(folder, "hello", tools=TOOLS)
    assert with_tools.render("hello", {"tools": []}) == theirs(folder, "hello")[0] == "plain"


def test_a_leading_token_that_the_template_writes_is_not_added_again(make_model: Maker) -> None:
    folder = make_model(BRACKETS)
    chat, plain = PromptRenderer.load(folder, chat=True), PromptRenderer.load(folder, chat=False)
    assert [token == 0 for token in chat.encode(chat.render("hello"))].count(True) == 1
    assert [token == 0 for token in plain.encode("hello")] == [True] + [False] * (len(plain.encode("hello")) - 1)


# --- tools of an entry


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, TOOLS, id="none of its own"),
        pytest.param({"tools": None}, TOOLS, id="null"),
        pytest.param({"tools": "null"}, TOOLS, id="null as text"),
        pytest.param({"tools": TOOLS[1:]}, TOOLS[1:], id="its own"),
        pytest.param({"tools": json.dumps(TOOLS[1:])}, TOOLS[1:], id="its own as text"),
        pytest.param({"tools": []}, None, id="no tools for this one"),
    ],
)
def test_an_entry_may_bring_its_own_tools(
    make_model: Maker, tmp_path: Path, fields: dict[str, Any], expected: Any
) -> None:
    folder = make_model(HERMES)
    renderer = PromptRenderer.load(folder, chat=True, tools=write_tools(tmp_path, TOOLS))
    assert ours(renderer, "hello", fields) == theirs(folder, "hello", tools=expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param("[", "field 'tools' is a string that is not JSON", id="no JSON"),
        pytest.param(3, "field 'tools' is not a list", id="a number"),
        pytest.param({}, "field 'tools' is not a list", id="an object"),
        pytest.param(["add"], "a list whose item 1 is not an object", id="a name"),
        pytest.param([*TOOLS, {"type": "function"}], "a list whose item 3 has no name", id="no name"),
    ],
)
def test_tools_of_an_entry_that_are_none_are_told(make_model: Maker, value: Any, message: str) -> None:
    renderer = PromptRenderer.load(make_model(HERMES), chat=True)
    with pytest.raises(DataError, match=message):
        renderer.render("hello", {"tools": value})


def test_a_field_called_tools_is_any_field_where_prompts_are_plain_text(make_model: Maker) -> None:
    assert PromptRenderer.load(make_model(), chat=False).render("hello", {"tools": 3}) == "hello"


# --- mistakes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("[{]", r"tools\.json:1: the tool definitions are not JSON", id="no JSON"),
        pytest.param("{}", "the tool definitions are not a list", id="an object"),
        pytest.param("[]", "the tool definitions are an empty list", id="empty"),
        pytest.param('[{"function": {}}]', "item 1 has no name", id="no name"),
    ],
)
def test_a_file_of_tools_that_is_none_is_told(make_model: Maker, tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        PromptRenderer.load(make_model(HERMES), chat=True, tools=write_tools(tmp_path, content))
    assert caught.value.fix


@pytest.mark.parametrize("name", ["template", "tools"])
def test_a_file_that_is_not_there_is_named(make_model: Maker, tmp_path: Path, name: str) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(DataError, match=r"nowhere: cannot read the .* \(no such file or directory\)"):
        PromptRenderer.load(make_model(HERMES), chat=True, **{name: str(missing)})


@pytest.mark.parametrize("content", [b"{% for %}", b"\xff"], ids=["no template", "not UTF-8"])
def test_a_template_that_is_none_is_named(make_model: Maker, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.jinja"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"own\.jinja: "):
        PromptRenderer.load(make_model(HERMES), chat=True, template=str(path))


@pytest.mark.parametrize("given", [{"system": "x"}, {"tools": "t.json"}, {"template": "t.jinja"}], ids=str)
def test_chat_settings_are_refused_for_plain_prompts(make_model: Maker, given: dict[str, str]) -> None:
    name = next(iter(given))
    with pytest.raises(DataError, match=f"`{name}` is set, but the prompts are plain text"):
        PromptRenderer.load(make_model(), chat=False, **given)


@pytest.mark.parametrize("name", ["__class__", "_x"])
def test_a_namespace_of_a_template_takes_no_names_that_lead_out_of_the_sandbox(make_model: Maker, name: str) -> None:
    template = "{% set ns = namespace() %}{% set ns." + name + " = 1 %}{{ ns." + name + " }}"
    with pytest.raises(DataError, match="unsafe name"):
        PromptRenderer.load(make_model(template), chat=True).render("x")


def test_text_outside_the_vocabulary_is_an_error_sentence(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))  # and "?" is not in it
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = ModelTokenizer(tokenizer, special_tokens={}, settings={}, max_length=None)
    renderer = PromptRenderer(known, None, where="-")
    assert renderer.encode("a a") == (0, 0)
    with pytest.raises(DataError, match=r"tokenizer cannot encode 'a \\u6f22'.*unk_token"):
        renderer.encode("a 漢")
