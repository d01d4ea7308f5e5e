"""A job's data are opened in one place: every source with its own format, field, template, tools, limits and reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_sources import spec_tree
from tokenizers import Tokenizer, models, pre_tokenizers

from gcore.config import JobSpec, load_spec
from gcore.data.stream import JobPrompts, identify_data, open_prompts
from gcore.errors import DataError, GcoreError
from gcore.types import PromptRef

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    "{% if tools %}may {{ tools | map(attribute='name') | join(' ') }} {% endif %}go"
)
ADD = [{"name": "add", "parameters": {}}]
Maker = Callable[..., JobSpec]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of words with a context of 16 tokens, three data files, a template and tools."""
    model = tmp_path / "m"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "1": 1, "+": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "+", "unk_token": "?"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 16}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    lines = [{"prompt": f"1 + {i}", "answer": i, "tools": None} for i in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pq.write_table(pa.table({"q": ["1 1"] * 8, "label": list(range(8))}), tmp_path / "others.parquet")
    (tmp_path / "held.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 3)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %} !")
    (tmp_path / "tools.json").write_text(json.dumps(ADD))
    return tmp_path


OTHERS = {"name": "others", "path": "others.parquet", "prompt": "q", "reward": {"name": "exact", "answer": "label"}}


def spec_of(folder: Path, data: dict[str, Any], **sections: Any) -> JobSpec:
    (folder / "spec.yaml").write_text(json.dumps(spec_tree({"shards": 4, **data}, **sections)))
    return load_spec(folder / "spec.yaml")


def opened(spec: JobSpec, folder: Path) -> JobPrompts:
    return open_prompts(spec, folder / "cache", Path(spec.model.path))


def test_one_path_is_one_source_and_means_what_its_content_is(folder: Path) -> None:
    spec = spec_of(folder, {"path": "sums.jsonl"}, eval={"path": "held.jsonl"})
    prompts = opened(spec, folder)
    assert (prompts.prompts, list(prompts.sources), prompts.context) == (20, ["data"], 16)
    assert prompts.digest == prompts.stream.sources[0].dataset.digest
    assert prompts.identity == identify_data(spec, folder / "cache")
    assert [(len(held), held.prompt(2).text) for held in prompts.evaluation] == [(3, "1")]


def test_every_source_is_opened_as_it_says(folder: Path) -> None:
    sources = [
        {"name": "sums", "path": "sums.jsonl", "weight": 0.5, "sampling": {"max_new_tokens": 2}},
        OTHERS | {"chat": True, "template": "own.jinja", "weight": 2},
        {"name": "talk", "path": "sums.jsonl", "chat": True, "system": "1 1", "tools": "tools.json"},
    ]
    prompts = opened(spec_of(folder, {"sources": sources}), folder)
    assert prompts.prompts == 10 + 16 + 20
    assert {name: source.reward.name for name, source in prompts.sources.items()} == {
        "sums": "numeric",
        "others": "exact",
        "talk": "numeric",
    }
    shown = {source.name: source.prompt(3, PromptRef(0, 0, 0)).text for source in prompts.stream.sources}
    assert shown == {"sums": "1 + 3", "others": "1 1 !", "talk": "system : 1 1 user : 1 + 3 may add go"}
    assert [source.limit for source in prompts.stream.sources] == [14, 12, 12], "what each leaves its own responses"


def test_one_tokenizer_is_loaded_for_all_sources(folder: Path) -> None:
    sources = [{"name": name, "path": "sums.jsonl"} for name in ("a", "b")]
    prompts = opened(spec_of(folder, {"sources": sources}, eval={"path": "held.jsonl"}), folder)
    renderers = [s.renderer for s in prompts.stream.sources] + [e.opened.renderer for e in prompts.evaluation]
    assert len({id(renderer.tokenizer) for renderer in renderers}) == 1


def test_filters_are_for_training_and_evaluation_shows_every_prompt(folder: Path) -> None:
    spec = spec_of(folder, {"path": "sums.jsonl", "min_prompt_tokens": 3}, eval={"path": "held.jsonl"})
    prompts = opened(spec, folder)
    assert prompts.stream.sources[0].source.min_prompt_tokens == 3
    assert prompts.evaluation[0].prompt(0).token_ids == (1,)


def test_evaluation_may_have_several_sources_shown_as_they_say(folder: Path) -> None:
    held = {"sources": [{"name": "held", "path": "held.jsonl"}, OTHERS | {"chat": True, "template": "own.jinja"}]}
    prompts = opened(spec_of(folder, {"path": "sums.jsonl"}, eval=held), folder)
    assert [(e.source.name, len(e), e.prompt(0).text) for e in prompts.evaluation] == [
        ("held", 3, "1"),
        ("others", 8, "1 1 !"),
    ]
    assert [e.prompt(1).source for e in prompts.evaluation] == ["held", "others"]


# --- what refs mean


CHANGES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "the weight": lambda sources, folder: sources["a"].update(weight=0.5),
    "the order of the sources": lambda sources, folder: sources.update({"c": sources.pop("a")}),
    "the name": lambda sources, folder: sources["a"].update(name="z"),
    "the content": lambda sources, folder: (folder / "held.jsonl").write_text('{"prompt": "+", "answer": "2"}\n' * 3),
    "the template": lambda sources, folder: (folder / "own.jinja").write_text("{{ messages[0].content }} ?"),
    "the tools": lambda sources, folder: (folder / "tools.json").write_text('[{"name": "take"}]'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_digest_changes_with_everything_that_changes_a_refs_meaning(
    folder: Path, change: Callable[[dict[str, Any], Path], object]
) -> None:
    chat = {"chat": True, "template": "own.jinja", "tools": "tools.json"}
    sources = {"a": {"name": "a", "path": "held.jsonl"} | chat, "b": {"name": "b", "path": "sums.jsonl"}}

    def digest() -> str:
        return identify_data(spec_of(folder, {"sources": list(sources.values())}), folder / "cache").digest

    before = digest()
    assert digest() == before
    change(sources, folder)
    assert digest() != before


def test_the_digest_of_several_sources_is_the_same_wherever_they_lie(folder: Path, tmp_path_factory: Any) -> None:
    sources = [{"name": "a", "path": "sums.jsonl"}, {"name": "b", "path": "held.jsonl", "weight": 1.5}]
    spec = spec_of(folder, {"sources": sources})
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("sums.jsonl", "held.jsonl"):
        (elsewhere / name).write_bytes((folder / name).read_bytes())
    there = spec_of(elsewhere, {"sources": sources})
    assert identify_data(spec, folder / "cache").digest == identify_data(there, elsewhere / "cache").digest


def test_a_template_that_goes_away_is_told_like_data_that_do(folder: Path) -> None:
    spec = spec_of(folder, {"path": "sums.jsonl", "template": "own.jinja"}, model={"path": "m", "chat": True})
    identify_data(spec, folder / "cache")
    (folder / "own.jinja").unlink()
    with pytest.raises(DataError, match=r"own\.jinja: cannot read the file \(no such file"):
        identify_data(spec, folder / "cache")


# --- mistakes: which source, which file, which line


MISTAKES: list[Any] = [
    pytest.param([{"name": "a", "path": "none.jsonl"}], {}, r"none\.jsonl: cannot read the file", id="no file"),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl"}, OTHERS | {"prompt": "text"}],
        {},
        r"others\.parquet, row 0: the entry has no field 'text'.*source's `prompt`",
        id="no prompt field",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl", "reward": {"answer": "gold"}}],
        {},
        r"sums\.jsonl:1: the entry has no field 'gold'.*the source's reward",
        id="no answer field",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl", "system": "x"}],
        {},
        "data, source 'a': `system` is set, but the prompts are plain text",
        id="system without chat",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl", "tools": "tools.json"}],
        {},
        "data, source 'a': `tools` is set",
        id="tools without chat",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl", "chat": True, "tools": "none.json"}],
        {},
        r"none\.json: cannot read the tool definitions",
        id="no tools file",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl", "chat": True, "template": "none.jinja"}],
        {},
        r"none\.jinja: cannot read the chat template",
        id="no template file",
    ),
    pytest.param(
        [{"name": "a", "path": "held.jsonl", "weight": 0.5}],
        {},
        r"data\.shards: an epoch has 2 prompts, but data\.shards is 4",
        id="shards",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl"}],
        {"eval": {"path": "sums.parquet"}},
        r"sums\.parquet: cannot read the file",
        id="no evaluation file",
    ),
    pytest.param(
        [{"name": "a", "path": "sums.jsonl"}],
        {"eval": {"sources": [{"name": "e", "path": "held.jsonl", "chat": False, "system": "x"}]}},
        "eval, source 'e': `system` is set",
        id="evaluation",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sources", "sections", "message"), MISTAKES)
def test_a_mistake_names_its_source_and_what_to_do(
    folder: Path, sources: list[dict[str, Any]], sections: dict[str, Any], message: str
) -> None:
    spec = spec_of(folder, {"sources": sources}, **sections)
    with pytest.raises(DataError, match=message) as caught:
        opened(spec, folder)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_small_file_is_told_before_large_ones_are_read(folder: Path) -> None:
    sources = [{"name": "a", "path": "sums.jsonl"}, OTHERS | {"tools": "none.json", "chat": True}]
    with pytest.raises(GcoreError, match=r"none\.json"):
        opened(spec_of(folder, {"sources": sources}), folder)
    assert not (folder / "cache").exists()


def test_reading_is_reported_by_source(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    spec = spec_of(folder, {"sources": [{"name": "a", "path": "sums.jsonl"}, OTHERS]})
    open_prompts(spec, folder / "cache", Path(spec.model.path), lambda *told: seen.append(told))
    assert [name for name, done, total in seen if done == total] == ["a", "others", "others"], "copied, then checked"


def test_a_held_out_prompt_that_is_too_long_is_not_told_to_be_filtered_because_nothing_filters_it(folder: Path) -> None:
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "1 " * 40, "answer": "2"}) + "\n")
    sections: dict[str, Any] = {"eval": {"path": "held.jsonl", "max_new_tokens": 4}}
    prompts = opened(spec_of(folder, {"path": "sums.jsonl", "max_prompt_tokens": 8}, **sections), folder)
    with pytest.raises(DataError, match=r"entry 0: the prompt has 40 tokens.*lower eval\.max_new_tokens") as caught:
        prompts.evaluation[0].prompt(0)
    assert "max_prompt_tokens" not in str(caught.value)
