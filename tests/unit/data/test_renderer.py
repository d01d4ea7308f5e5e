"""Rendering agrees with transformers, and reports where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import DataError

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user begins') }}{% endif %}"
    "{% for m in messages %}\n"
    "  {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}\n"
    "  {% elif m['role'] == 'skip' %}{% continue %}\n"
    "  {% else %}[INST] {{ {'text': m['content'], 'n': loop.index} | tojson }} [/INST]{% endif %}\n"
    "{% endfor %}{{ '' if tools is none else 'tools' }}{% set ns = namespace(n=messages|length) %}{{ ns.n }}"
)
ENDED = "<|im_end|>"
Maker = Callable[..., Path]


def make_tokenizer(*, bos_by_processor: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", ENDED, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is 12 + 34 ? user assistant the sum of"] * 3, trainer)
    if bos_by_processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def make_model(tmp_path: Path) -> Maker:
    def make(
        *,
        template: str | None = None,
        bos_by_processor: bool = False,
        settings: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        tokenizer = make_tokenizer(bos_by_processor=bos_by_processor)
        tokenizer.enable_truncation(4)  # as left behind by whoever trained it; neither side may honour it
        tokenizer.save(str(folder / "tokenizer.json"))
        known = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": ENDED,
            "pad_token": "<s>",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps({**known, **(settings or {})}))
        (folder / "config.json").write_text(
            json.dumps(config or {"model_type": "qwen3", "max_position_embeddings": 128})
        )
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


CHATS: list[str | list[dict[str, Any]]] = [
    "what is 12 + 34 ?",
    '  spaces, a line\nbreak, äöü, 漢字, 🙂 and </s> <b> & "quotes" ',
    [{"role": "user", "content": "the sum of"}],
    [
        {"role": "user", "content": "what is"},
        {"role": "skip", "content": "not this"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "the <|im_end|> sum"},
    ],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE], ids=["chatml", "llama-like"])
@pytest.mark.parametrize("bos_by_processor", [False, True], ids=["no processor", "processor adds bos"])
def test_chat_prompts_agree_with_transformers_in_text_and_tokens(
    make_model: Maker, template: str, bos_by_processor: bool
) -> None:
    folder = make_model(template=template, bos_by_processor=bos_by_processor)
    theirs, ours = reference(folder), PromptRenderer.load(folder, chat=True)
    for value in CHATS:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.render(value) == text
        assert list(ours.encode(text)) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("bos_by_processor", "settings"),
    [
        pytest.param(False, {}, id="nothing is added"),
        pytest.param(True, {}, id="the processor adds bos"),
        pytest.param(False, {"add_bos_token": True}, id="the configuration alone asks for bos"),
        pytest.param(True, {"add_bos_token": False}, id="the configuration forbids bos"),
        pytest.param(
            False, {"add_bos_token": True, "add_eos_token": True}, id="the configuration asks for bos and eos"
        ),
        pytest.param(True, {"add_bos_token": True}, id="both ask for bos"),
    ],
)
def test_plain_prompts_agree_with_transformers(
    make_model: Maker, bos_by_processor: bool, settings: dict[str, Any]
) -> None:
    folder = make_model(bos_by_processor=bos_by_processor, settings=settings)
    theirs, ours = reference(folder), PromptRenderer.load(folder, chat=False)
    for value in ["what is 12 + 34 ?", "", " äöü\n\n🙂", "a <|im_start|> b"]:
        assert ours.render(value) == value
        assert list(ours.encode(value)) == theirs(value)["input_ids"]


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_text_comes_back_from_its_tokens(text: str) -> None:
    # A byte-level vocabulary can say everything; names of special tokens would be left out.
    ours = PromptRenderer(ModelTokenizer(TOKENIZER, special_tokens={}, settings={}, max_length=None), None, where="-")
    if "<" not in text:
        assert ours.decode(ours.encode(text)) == text


TOKENIZER = make_tokenizer(bos_by_processor=False)


def test_the_end_and_the_context_come_from_the_models_own_files(make_model: Maker) -> None:
    renderer = PromptRenderer.load(make_model(), chat=False)
    assert renderer.tokenizer.end_token_ids == (1,)
    assert renderer.max_length == 128
    assert not renderer.chat


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"model_type": "gpt2", "n_positions": 64}, 64, id="gpt2"),
        pytest.param({"text_config": {"max_position_embeddings": 32}}, 32, id="in text_config"),
        pytest.param({"model_type": "rwkv"}, None, id="not said"),
    ],
)
def test_the_context_is_found_wherever_models_write_it(
    make_model: Maker, config: dict[str, Any], expected: int | None
) -> None:
    assert PromptRenderer.load(make_model(config=config), chat=False).max_length == expected


def test_a_special_token_may_be_written_as_an_object(make_model: Maker) -> None:
    folder = make_model(settings={"eos_token": {"content": "<|im_start|>", "lstrip": False}})
    assert PromptRenderer.load(folder, chat=False).tokenizer.end_token_ids == (2,)


def test_a_tokenizer_without_an_end_token_has_none(make_model: Maker) -> None:
    assert PromptRenderer.load(make_model(settings={"eos_token": None}), chat=False).tokenizer.end_token_ids == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": CHATML},
        {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]},
    ],
    ids=["one", "by name"],
)
def test_the_template_may_stand_in_the_tokenizers_configuration(make_model: Maker, settings: dict[str, Any]) -> None:
    folder = make_model(settings=settings)
    rendered = PromptRenderer.load(folder, chat=True).render("x")
    assert rendered == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == reference(folder).apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )


def test_the_templates_own_file_goes_before_the_configuration(make_model: Maker) -> None:
    folder = make_model(settings={"chat_template": "old"}, template="new")
    assert PromptRenderer.load(folder, chat=True).render("x") == "new"


def test_a_template_that_wants_the_date_falls_back_to_its_own(make_model: Maker) -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}"
    assert PromptRenderer.load(make_model(template=template), chat=True).render("x") == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{{ 'x' * 10**15 }}", "MemoryError", id="more than fits into memory"),
        pytest.param("{{ raise_exception('no system message') }}", "no system message", id="the template refuses"),
        pytest.param("{{ messages[0].content.__class__.__mro__ }}", "unsafe", id="an escape from the sandbox"),
        pytest.param("{{ messages.append(1) }}", "unsafe|not safely", id="a change to the messages"),
        pytest.param("{{ strftime_now('%Y') }}", "undefined", id="a clock"),
        pytest.param("{{ messages[7].content + 'x' }}", "undefined|no element", id="a message that is not there"),
        pytest.param("{{ 1 + messages }}", "unsupported", id="a sum of things that have none"),
        pytest.param("{{ range(10**9) | list }}", "Range too big", id="a range without end"),
    ],
)
def test_a_template_that_fails_is_told_with_its_reason(make_model: Maker, template: str, message: str) -> None:
    renderer = PromptRenderer.load(make_model(template=template), chat=True)
    with pytest.raises(DataError, match=message):
        renderer.render("x")


def test_a_template_that_is_not_one_is_told_with_its_line(make_model: Maker) -> None:
    with pytest.raises(DataError, match="line 2"):
        PromptRenderer.load(make_model(template="\n{% for %}"), chat=True)


def test_a_template_that_jinja_takes_and_python_does_not_is_refused_in_a_sentence(make_model: Maker) -> None:
    nested = "{% for m in messages %}" * 21 + "{{ m.content }}" + "{% endfor %}" * 21
    with pytest.raises(DataError, match=r"the chat template is not valid \(too many statically nested blocks\)"):
        PromptRenderer.load(make_model(template=nested), chat=True)


def test_chat_without_a_template_is_refused(make_model: Maker) -> None:
    with pytest.raises(DataError, match=r"no chat template.*model\.chat: false"):
        PromptRenderer.load(make_model(), chat=True)


def test_messages_shown_as_plain_text_are_refused(make_model: Maker) -> None:
    renderer = PromptRenderer.load(make_model(), chat=False)
    with pytest.raises(DataError, match=r"list of chat messages.*model\.chat: true"):
        renderer.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda folder: (folder / "config.json").unlink(), r"no config\.json", id="no config.json"),
        pytest.param(
            lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json", id="no tokenizer.json"
        ),
        pytest.param(lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizer", id="no tokenizer"),
        pytest.param(lambda folder: (folder / "config.json").write_text("{"), "cannot read", id="config cut off"),
        pytest.param(
            lambda folder: (folder / "config.json").write_text("[]"), "not contain a JSON object", id="config a list"
        ),
        pytest.param(
            lambda folder: (folder / "tokenizer_config.json").write_bytes(b"\xff"), "cannot read", id="not UTF-8"
        ),
    ],
)
def test_a_folder_that_is_no_model_is_told_apart(
    make_model: Maker, damage: Callable[[Path], object], message: str
) -> None:
    folder = make_model()
    damage(folder)
    with pytest.raises(DataError, match=message):
        PromptRenderer.load(folder, chat=False)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        PromptRenderer.load(tmp_path / "nowhere", chat=False)


def test_rendering_imports_neither_torch_nor_transformers_nor_pillow() -> None:
    heavy = ("torch", "transformers", "PIL")
    program = f"import sys\nimport gcore.data.stream; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
