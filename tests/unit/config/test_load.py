"""A spec file either loads or gives one error sentence."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gcore.config import JobSpec, apply_overrides, dump_explicit, load_spec, new_spec, parse_spec
from gcore.config.load import stored_spec
from gcore.config.spec import outdated_settings, training_sources
from gcore.errors import SpecError

MINIMAL: dict[str, Any] = {
    "name": "job",
    "model": {"path": "model"},
    "data": {"path": "data.jsonl"},
    "flow": {"steps": 3},
    "rollout": {"max_new_tokens": 8},
}
TEXT = yaml.safe_dump(MINIMAL)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(dotted: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(MINIMAL)
    *sections, field = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[field] = value
    return tree


# --- what loads


def test_a_minimal_spec_loads_with_defaults_and_absolute_paths(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, TEXT))
    assert spec.model.path == str(tmp_path / "model")
    assert spec.data.path == str(tmp_path / "data.jsonl")
    assert spec.eval.path is None
    assert (spec.flow.steps, spec.flow.name, spec.train.advantage) == (3, "grpo", "grpo")


def test_paths_may_be_absolute_or_climb_out_of_the_folder(tmp_path: Path) -> None:
    text = TEXT + "eval: {path: ../held-out.jsonl}\n"
    spec = load_spec(write(tmp_path, text), ["model.path=/models/tiny", "data.path=~/data.jsonl"])
    assert spec.eval.path == str(tmp_path.parent / "held-out.jsonl")
    assert spec.model.path == "/models/tiny"
    assert spec.data.path == str(Path.home() / "data.jsonl")


def test_a_mapping_without_a_folder_keeps_its_paths() -> None:
    assert parse_spec(MINIMAL).model.path == "model"


def test_lists_become_tuples_and_exponents_numbers(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, TEXT + "train: {learning_rate: 1e-4, betas: [0.9, 0.95]}\n"))
    assert spec.train.learning_rate == 1e-4
    assert spec.train.betas == (0.9, 0.95)


def test_a_spec_comes_back_from_json_and_cannot_be_changed() -> None:
    spec = parse_spec(MINIMAL)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"  # type: ignore[misc]


# --- overrides


@pytest.mark.parametrize(
    ("override", "read"),
    [
        pytest.param("train.learning_rate=1e-4", lambda s: s.train.learning_rate == 1e-4, id="an exponent"),
        pytest.param("train.learning_rate=2E-4", lambda s: s.train.learning_rate == 2e-4, id="a large E"),
        pytest.param("flow.steps=7", lambda s: s.flow.steps == 7, id="replaces"),
        pytest.param("train.epochs=2", lambda s: s.train.epochs == 2, id="makes the section"),
        pytest.param("rollout.stop=[a, 'b=c']", lambda s: s.rollout.stop == ("a", "b=c"), id="a list"),
        pytest.param("model.chat=true", lambda s: s.model.chat is True, id="a truth"),
        pytest.param("eval.every=null", lambda s: s.eval.every is None, id="nothing"),
        pytest.param("name=a.b=c".replace("=c", "-c"), lambda s: s.name == "a.b-c", id="a value with a dot"),
        pytest.param(" flow.steps =5", lambda s: s.flow.steps == 5, id="space around"),
        pytest.param("name='12'", lambda s: s.name == "12", id="a quoted number is a word"),
        pytest.param("name=nan", lambda s: s.name == "nan", id="a word that Python takes for a number"),
        pytest.param("eval={path: x}", lambda s: s.eval.path.endswith("/x"), id="a whole section"),
    ],
)
def test_an_override_is_applied(tmp_path: Path, override: str, read: Any) -> None:
    assert read(load_spec(write(tmp_path, TEXT), [override]))


def test_the_last_override_wins_and_the_tree_stays_as_it_was() -> None:
    tree = copy.deepcopy(MINIMAL)
    assert apply_overrides(tree, ["flow.steps=5", "flow.steps=6"])["flow"] == {"steps": 6}
    assert tree == MINIMAL


SOURCES = {"sources": [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}]}


def test_an_override_reaches_into_a_list_of_sources_and_replaces_all_of_it() -> None:
    tree = copy.deepcopy(MINIMAL) | {"data": SOURCES}
    before = copy.deepcopy(tree)
    spec = parse_spec(apply_overrides(tree, ["data.sources.1.weight=2.5", "data.sources.0.reward.name=exact"]))
    assert [(s.name, s.weight, s.reward and s.reward.name) for s in spec.data.sources] == [
        ("a", 1.0, "exact"),
        ("b", 2.5, None),
    ]
    replaced = parse_spec(apply_overrides(tree, ["data.sources=[{name: c, path: d}]"]))
    assert [(s.name, s.path) for s in replaced.data.sources] == [("c", "d")]
    one = parse_spec(apply_overrides(tree, ["data.sources=[]", "data.path=e"]))
    assert (one.data.path, one.data.sources) == ("e", ())
    assert tree == before


@pytest.mark.parametrize("place", ["2", "-1", "first"])
def test_an_override_of_an_item_that_is_not_there_is_told(place: str) -> None:
    with pytest.raises(SpecError, match=f"'{place}' in .* is not an index of the list, which has 2 items.*from 0 to 1"):
        apply_overrides({"data": SOURCES}, [f"data.sources.{place}.weight=2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("flow.steps", "not have the form section.field=value", id="no equals sign"),
        pytest.param("=3", "not have the form", id="no key"),
        pytest.param("flow..steps=3", "not have the form", id="an empty part"),
        pytest.param("tracking.0.name=x", "an item of a list, but the spec has no list there. Give", id="no list"),
        pytest.param("flow.steps.more=3", "'steps' in .* is a value, not a section", id="below a value"),
        pytest.param("flow.steps=[1", "--set flow.steps=.*not valid YAML", id="no YAML"),
        pytest.param("flow.steps=*a", "aliases", id="an alias"),
        pytest.param("flow.steps={a: 1, a: 2}", "'a' occurs twice", id="a doubled key"),
        pytest.param("flow.steps=2026-99-99", "not valid YAML", id="a date that is none"),
        pytest.param("flow.steps=" + "9" * 5000, "not valid YAML", id="a vast number"),
        pytest.param("flow.steps=" + "[" * 5000, "not valid YAML: nested too deep", id="brackets without end"),
        pytest.param("flow.stesp=3", "unknown key 'flow.stesp', did you mean 'flow.steps'", id="unknown"),
        pytest.param("flow.steps=nan", "flow.steps: .*got 'nan'", id="not a number"),
        pytest.param("train=3", "train: it is a section", id="a value for a section"),
        pytest.param(".".join("a" * 3000) + "=1", "nested more than 16 levels deep", id="a path without end"),
    ],
)
def test_an_override_that_is_wrong_is_told(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_spec(write(tmp_path, TEXT), [override])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("dotted", "value", "said"),
    [
        pytest.param("name", "A b", "name: it should be lower-case letters, digits", id="a name"),
        pytest.param("model", "folder", "model: it is a section with keys of its own", id="a value for a section"),
        pytest.param("flow.steps", 1.5, "flow.steps: it should be a whole number (got 1.5)", id="a fraction"),
        pytest.param("flow.steps", [1], "flow.steps: it should be a whole number", id="a list for a number"),
        pytest.param(
            "rollout.temperature", "hot", "rollout.temperature: it should be a number", id="a word for a number"
        ),
        pytest.param("model.path", 3, "model.path: it should be text", id="a number for text"),
        pytest.param("rollout.stop", "x", "rollout.stop: it should be a list", id="text for a list"),
        pytest.param("rollout.temperature", 1e-7, "greater than or equal to 0.000001", id="colder than engines sample"),
        pytest.param("rollout.temperature", 1e300, "less than or equal to", id="hotter than a float32"),
        pytest.param("rollout.stop", ["x", ""], "rollout.stop.1: ", id="a stop string that every text holds"),
        pytest.param("model.chat", "maybe", "model.chat: it should be true or false", id="no truth"),
        pytest.param(
            "reward.options",
            {"a": {"b": 1}},
            "job.yaml: reward.options.a: it should be a single value: text, a number, true or false. See",
            id="a mapping for an option",
        ),
        pytest.param(
            "reward.options",
            {1: 2},
            "job.yaml: reward.options.1: the name of an option should be text; put it in quotes. See",
            id="a number for the name of an option",
        ),
        pytest.param(
            "train.betas", [True, 0.9], "train.betas: a boolean (true, false", id="a truth in a list of numbers"
        ),
        pytest.param(
            "samples.keep", 1 << 20_000, "samples.keep: the whole number has 20001 bits", id="beyond printing"
        ),
        pytest.param(
            "data.sources",
            [{"name": "a", "path": "p"}, {"name": "b", "path": "p", "promt": "q"}],
            "unknown key 'data.sources.1.promt', did you mean 'data.sources.1.prompt'? See",
            id="a key of a source",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_in_the_words_of_a_spec(dotted: str, value: Any, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        new_spec(changed(dotted, value), where="job.yaml")
    assert said in str(caught.value)
    assert "?." not in str(caught.value)


# --- files that are wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "not a mapping of sections", id="empty"),
        pytest.param("- a\n- b\n", "not a mapping of sections", id="a list"),
        pytest.param("just words", "not a mapping of sections", id="words"),
        pytest.param("name: [a\n", r"job\.yaml:2:1: not valid YAML", id="cut off"),
        pytest.param("name: a\n\tmodel: b\n", r"job\.yaml:2:1: not valid YAML", id="a tab"),
        pytest.param(TEXT + "name: again\n", r"job\.yaml:\d+:1: .*'name' occurs twice", id="a doubled section"),
        pytest.param("a: {b: 1, b: 2}\n", r"job\.yaml:1:11: .*'b' occurs twice", id="a doubled key"),
        pytest.param("a: {1: x, true: y}\n", "occurs twice|unknown key", id="keys that are equal"),
        pytest.param("a: &x [1]\nb: *x\n", r"job\.yaml:2:4: .*aliases \(\*name\) are not allowed", id="an alias"),
        pytest.param("a: &x {k: 1}\nb: {<<: *x}\n", "aliases", id="a merge"),
        pytest.param("<<: {name: a}\n", "not valid YAML|unknown key", id="a merge without an alias"),
        pytest.param("? [a, b]\n: c\n", "a key must be a word", id="a list as key"),
        pytest.param("!!python/object/apply:os.system ['true']", r"tags \(!name\) are not allowed", id="code"),
        pytest.param("a: !!python/name:os.system\n", r"job\.yaml:1:4: .*tags", id="a name of code"),
        pytest.param("name: 2026-99-99\n", "not valid YAML", id="a date that is none"),
        pytest.param("a: !!int ''\n", "tags", id="a tag"),
        pytest.param("name: \x00\n", "not valid YAML", id="a control character"),
        pytest.param("--- {a: 1}\n--- {b: 2}\n", "not valid YAML", id="two documents"),
        pytest.param("a: " + "{b: " * 17 + "1" + "}" * 17, "nested more than 16 levels deep", id="deep"),
        pytest.param("a: " + "[" * 20_000, "not valid YAML: nested too deep", id="brackets without end"),
        pytest.param('a: "\\Ueeeeeeee"', "not valid YAML: Python int too large", id="a character that does not exist"),
        pytest.param("a: " + "9" * 5000, "not valid YAML", id="a vast number"),
        pytest.param("x" * 65_537, "larger than 65536 bytes", id="large"),
        pytest.param(b"name: \xff\n", "not UTF-8 text", id="not UTF-8"),
    ],
)
def test_a_file_that_is_no_spec_is_told_with_its_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError, match=message) as caught:
        load_spec(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert caught.value.fix
    assert "\n" not in said
    assert len(said) < len(str(path)) + 400


def test_a_bomb_of_aliases_is_refused_at_its_first_alias(tmp_path: Path) -> None:
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    with pytest.raises(SpecError, match=r"job\.yaml:2:10: .*aliases"):
        load_spec(write(tmp_path, "\n".join(layers)))


def test_a_number_with_more_digits_than_python_prints_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"flow\.steps: the whole number has 24000 bits"):
        load_spec(write(tmp_path, TEXT), ["flow.steps=0x" + "f" * 6000])


def test_a_long_word_in_a_spec_makes_no_long_message() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(changed("checkpoint.best", "a" * 60_000))
    assert len(str(caught.value)) < 1000


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml: cannot read the spec \(No such file"):
        load_spec(tmp_path / "nowhere.yaml")


def test_a_folder_and_a_pipe_are_told_apart_and_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the spec is a folder"):
        load_spec(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="not a regular file"):
        load_spec(tmp_path / "pipe")
    with pytest.raises(SpecError, match="not a regular file"):
        load_spec(Path("/dev/zero"))


@pytest.mark.parametrize(
    "bad", [r'"a\0b"', "~no-such-user-here/x", "loop/x"], ids=["a NUL", "nobody's home", "a loop of links"]
)
@pytest.mark.parametrize("key", ["model.path", "data.path", "eval.path"])
def test_a_path_that_cannot_be_one_is_told_with_its_key(tmp_path: Path, key: str, bad: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SpecError, match=rf"{key}: .*(is not a valid path|contains a NUL)"):
        load_spec(write(tmp_path, TEXT), [f"{key}={bad}"])


# --- values that are wrong


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        pytest.param("train.learning_rat", 1, "unknown key 'train.learning_rat', did you mean 'train.learning_rate'", id="a letter missing"),
        pytest.param("learning_rate", 1, "unknown key 'learning_rate', did you mean 'train.learning_rate'", id="the section missing"),
        pytest.param("trian", {}, "unknown key 'trian', did you mean 'train'", id="a section misspelt"),
        pytest.param("rollout.staleness_", 0, "did you mean 'rollout.staleness'", id="a letter too many"),
        pytest.param("train.lr", 1, "did you mean 'train.learning_rate'", id="initials"),
        pytest.param("train.publish", 1, "did you mean 'train.lora.publish'", id="a section left out"),
        pytest.param("train.lora.dropout", 0.1, r"unknown key 'train\.lora\.dropout'[^,]*$", id="nothing near in its section"),
        pytest.param("train.lora.alpha", 1e-9, r"train\.lora\.alpha: .* greater than or equal to 0\.000001", id="an alpha of nothing"),
        pytest.param("train.lora.targets", [], r"train\.lora\.targets: it should have at least 1 item \(got 0\)", id="no item"),
        pytest.param("train.lora.targets", [""], r"job\.yaml: train\.lora\.targets\.0: [^;]*$", id="an empty item"),
        pytest.param("qqqqqq", 0, "unknown key 'qqqqqq'[^,]*$", id="nothing is near"),
        pytest.param("x" * 5000, 0, "unknown key 'xxx", id="a key without end"),
        pytest.param("flow.steps", 0, r"flow\.steps: .*greater than 0 \(got 0\)", id="zero steps"),
        pytest.param("flow.steps", -3, r"flow\.steps: .*\(got -3\)", id="negative"),
        pytest.param("flow.steps", 1.5, r"flow\.steps: .*\(got 1\.5\)", id="half a step"),
        pytest.param("flow.steps", "many", r"flow\.steps: .*\(got 'many'\)", id="a word"),
        pytest.param("flow.steps", True, r"flow\.steps: a boolean .*is not allowed here", id="a truth is not one step"),
        pytest.param("name", False, r"name: a boolean \(true, false, yes, no", id="no is a word only when quoted"),
        pytest.param("flow.steps", "m" * 5000, r"flow\.steps: .*\(got 'mmm.*…\)", id="a word without end"),
        pytest.param("flow.steps", None, r"flow\.steps and flow\.epochs; neither is set", id="nothing"),
        pytest.param("train.learning_rate", float("inf"), r"train\.learning_rate: .*finite", id="infinity"),
        pytest.param("train.kl_coef", float("nan"), r"train\.kl_coef: .*finite", id="not a number"),
        pytest.param("train.zero_stage", 4, r"train\.zero_stage: .*1, 2 or 3 \(got 4\)", id="not among the choices"),
        pytest.param("train.aggregation", "mean", r"train\.aggregation: .*'token-mean'", id="no such aggregation"),
        pytest.param("train.betas", [0.9], r"train\.betas", id="one beta"),
        pytest.param("train.betas", [0.9, 1.5], r"train\.betas\.1: .*\(got 1\.5\)", id="a beta above one"),
        pytest.param("rollout.staleness", -1, r"rollout\.staleness: .*\(got -1\)", id="older than the newest"),
        pytest.param("rollout.staleness", 1, r"rollout\.staleness is 1, .*set rollout\.correction: tis, icepop, mis or decoupled, or train\.old_logprobs: engine", id="stale tokens without a correction"),
        pytest.param("rollout.top_p", 0, r"rollout\.top_p: .*greater than 0", id="an empty nucleus"),
        pytest.param("rollout.top_p", 0.9, r"rollout sets top_p: 0\.9, .*remove top_p, top_k and min_p", id="a nucleus"),
        pytest.param("rollout.top_k", 5, r"rollout sets top_k: 5, ", id="the likeliest tokens"),
        pytest.param("rollout.min_p", 0.1, r"rollout sets min_p: 0\.1, ", id="the least likely ones cut off"),
        pytest.param("flow.samples_per_prompt", 1, r"samples_per_prompt is 1.*use at least 2", id="a group of one"),
        pytest.param("train.mini_batches", 33, r"train\.mini_batches \(33\) is more than flow\.groups_per_step \(32\)", id="more updates than groups"),
        pytest.param("train.betas", [0.9, 1.0], r"train\.betas\.1: .*\(got 1\.0\)", id="a beta of one"),
        pytest.param("model.max_length", 8, r"max_new_tokens \(8\) leaves no room", id="no room for a prompt"),
        pytest.param("name", "Job", r"name: .*lower-case.*\(got 'Job'\)", id="a capital"),
        pytest.param("name", "", "name: ", id="no name"),
        pytest.param("name", "job\n", "name: ", id="a line break"),
        pytest.param("name", "a" * 64, "name: ", id="a long name"),
        pytest.param("name", "../job", "name: ", id="a path as name"),
        pytest.param("seed", -1, "seed: ", id="a negative seed"),
        pytest.param("seed", 2**63, "seed: ", id="a seed beyond 63 bits"),
        pytest.param("data", [], "data: ", id="a list for a section"),
        pytest.param("model.path", "\ud800", r"model\.path: .*a lone surrogate", id="half a character"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_field_and_itself(dotted: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        new_spec(changed(dotted, value), where="job.yaml")
    said = str(caught.value)
    assert said.startswith("job.yaml: ")
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize("section", ["name", "model", "data", "flow", "rollout"])
def test_sections_without_a_default_are_required(section: str) -> None:
    tree = {key: value for key, value in MINIMAL.items() if key != section}
    with pytest.raises(SpecError, match=f"'{section}' is missing"):
        parse_spec(tree)


def test_all_mistakes_are_told_at_once_up_to_a_few() -> None:
    tree = changed("flow.steps", 0) | {f"k{number}": 1 for number in range(20)}
    with pytest.raises(SpecError) as caught:
        parse_spec(tree)
    assert "flow.steps" in str(caught.value)
    assert "and 13 more" in str(caught.value)


# --- anything at all

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
)
keys = st.sampled_from(
    [
        f"{section}.{field}"
        for section, model in JobSpec.model_fields.items()
        for field in getattr(model.annotation, "model_fields", [])
    ]
    + ["name", "seed", "model", "train", "train.betas", "rollout.stop"]
)


def only_spec_errors(text: bytes, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = ""
        try:
            assert isinstance(load_spec(write(Path(folder), text), overrides), JobSpec)
        except SpecError as error:
            said = str(error)
        assert "\n" not in said.encode("utf-8").decode()


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"\xef\xbb\xbfname: a")
@example(b"? ")
@example(b"!!float x: 1")
@example(b"!!int '': 1")
@example(b"!!timestamp x: 1")
@example(b"!!binary '\xc3\xa4': 1")
@example(b"a: !!set {b, c}")
@example(b"a: !!omap [b: 1]")
@example(b"=: 1")
@example(b'"\\ud800": 1')
def test_no_bytes_raise_anything_but_a_spec_error(text: bytes) -> None:
    only_spec_errors(text, [])


PIECES = [*"{}[]:,-?!&*#|>%@`'\"\\ \n\t~<=.0123456789eE+_ax", "!!int ", "!!float ", "!!bool ", "!!binary ", "\\u", "0x"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_yaml_raises_anything_but_a_spec_error(text: str) -> None:
    only_spec_errors(text.encode(), [])
    only_spec_errors(TEXT.encode(), [f"flow.steps={text}", f"{text}=1"])


@given(keys, trees)
def test_no_value_anywhere_raises_anything_but_a_spec_error(dotted: str, value: Any) -> None:
    try:
        text = yaml.safe_dump(changed(dotted, value), allow_unicode=True).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return
    only_spec_errors(text, [])
    said = ""
    try:
        parse_spec(changed(dotted, value))
    except SpecError as error:
        said = str(error)
    assert "\n" not in said.encode("utf-8").decode()


@given(st.lists(st.text(max_size=20) | st.tuples(keys, st.text(max_size=12)).map("=".join), max_size=3))
def test_no_override_raises_anything_but_a_spec_error(overrides: list[str]) -> None:
    only_spec_errors(TEXT.encode(), overrides)


def test_the_template_of_a_judge_is_no_pipe_for_which_one_would_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    judge = {"name": "far", "external": {"url": "http://h/v1", "model": "m"}, "template_file": "pipe"}
    tree = MINIMAL | {"judges": [judge], "reward": {"judge": "far"}}
    with pytest.raises(SpecError, match=r"judges\.0\.template_file: .*cannot read .*pipe' .it is not a regular file"):
        load_spec(write(tmp_path, yaml.safe_dump(tree)))


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*/*.yaml"))
SPECS = [file for file in EXAMPLES if file.parent.name != "custom_flow"]


@pytest.mark.parametrize("file", SPECS, ids=lambda file: f"{file.parent.name}/{file.stem}")
@pytest.mark.parametrize("overrides", [(), ("flow.steps=7", "train.zero_stage=2")], ids=["as it is", "with --set"])
def test_sent_spec_has_only_explicit_fields_and_parses_to_the_same(file: Path, overrides: tuple[str, ...]) -> None:
    """A controller of an older gcore rejects unknown sections, so unset ones must not be sent."""
    spec = load_spec(file, overrides)
    said = json.loads(dump_explicit(spec))
    assert parse_spec(said) == spec
    written = yaml.safe_load(file.read_text())
    assert not {"namespace", "scheduling"} & (said.keys() - written.keys())


@pytest.mark.parametrize("correction", ["none", "tis", "mis"])
def test_truncated_sampling_is_refused_for_new_jobs_and_reported_for_stored_ones(correction: str) -> None:
    old = {"max_new_tokens": 8, "top_p": 0.9, "correction": correction}
    if correction != "none":
        old["staleness"] = 1
    tree = {**MINIMAL, "rollout": old}
    with pytest.raises(SpecError, match=r"rollout sets top_p: 0\.9, .*rollout\.correction does not help"):
        parse_spec(tree)
    assert "no importance weight restores" in outdated_settings(stored_spec(tree))
    assert outdated_settings(parse_spec(MINIMAL)) == ""


def test_an_evaluation_may_draw_from_the_nucleus() -> None:
    parse_spec({**MINIMAL, "eval": {"path": "e.jsonl", "samples": 4, "temperature": 0.6, "top_p": 0.95}})


def test_a_source_that_cuts_off_is_named() -> None:
    source = {"name": "sums", "path": "a.jsonl", "sampling": {"min_p": 0.05}}
    with pytest.raises(SpecError, match=r"source 'sums' sets min_p: 0\.05, "):
        parse_spec({**MINIMAL, "data": {"sources": [source, {"name": "rest", "path": "b.jsonl"}]}})


@pytest.mark.parametrize(
    ("train", "clips"),
    [
        ({}, (0.2, 0.2)),
        ({"loss": "gspo", "aggregation": "seq-mean-token-mean"}, (3e-4, 4e-4)),
        ({"loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_high": 0.1}, (3e-4, 0.1)),
        ({"loss": "cispo"}, (1.0, 0.2)),
        ({"loss": "cispo", "clip_low": 0.3}, (0.3, 0.2)),
    ],
    ids=str,
)
def test_a_loss_has_the_clips_of_its_paper_unless_the_spec_or_a_stored_job_says_others(
    train: dict[str, Any], clips: tuple[float, float]
) -> None:
    spec = parse_spec({**MINIMAL, "train": train})
    assert (spec.train.clip_low, spec.train.clip_high) == clips
    assert stored_spec(spec.model_dump(mode="json")) == spec
    before = stored_spec({**MINIMAL, "train": train})
    assert (before.train.clip_low, before.train.clip_high) == (train.get("clip_low", 0.2), train.get("clip_high", 0.2))


def test_template_variables_are_json_and_dates_become_text(tmp_path: Path) -> None:
    spec = load_spec(
        write(tmp_path, TEXT),
        ["data.template_variables={strftime_now: 2026-01-01, enable_thinking: false, tools_on: [a, 1, null]}"],
    )
    assert spec.data.template_variables == {
        "strftime_now": "2026-01-01",
        "enable_thinking": False,
        "tools_on": ["a", 1, None],
    }
    (source,) = training_sources(spec)
    assert source.template_variables == spec.data.template_variables
    assert stored_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"messages": []}, "messages is set by gcore when it renders a prompt"),
        ({"strftime_now": "today"}, "strftime_now should be a date such as 2026-01-01, not 'today'"),
        ({"strftime_now": 3}, "strftime_now should be a date"),
        ({"budget": float("nan")}, "a variable should be text, a number"),
        ([1], "it is a section with keys of its own"),
    ],
)
def test_template_variables_that_cannot_be_are_refused(variables: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse_spec({**MINIMAL, "data": {**MINIMAL["data"], "template_variables": variables}})
    assert "data.template_variables" in str(caught.value)


def test_a_source_has_variables_of_its_own_in_place_of_its_sections() -> None:
    sources = [
        {"name": "a", "path": "a.jsonl"},
        {"name": "b", "path": "b.jsonl", "template_variables": {}},
        {"name": "c", "path": "c.jsonl", "template_variables": {"x": 1}},
    ]
    data = {"sources": sources, "template_variables": {"y": 2}}
    assert [one.template_variables for one in training_sources(parse_spec({**MINIMAL, "data": data}))] == [
        {"y": 2},
        {},
        {"x": 1},
    ]


LATER = (
    ("data", "template_variables", {"x": 1}),
    ("train", "kl_max", 10.0),
)
"""Fields that came after the first release: a section, a field, and a value."""


@pytest.mark.parametrize(("section", "name", "value"), LATER)
def test_nodes_of_before_read_a_stored_spec_that_does_not_set_a_later_field(
    section: str, name: str, value: Any
) -> None:
    spec = parse_spec(MINIMAL)
    assert getattr(getattr(spec, section), name) is None
    stored = spec.model_dump(mode="json")
    assert name not in stored[section], "a node of before refuses a field that it does not know"
    assert name not in json.dumps(stored)
    with_it = parse_spec(
        {
            **MINIMAL,
            section: {**MINIMAL.get(section, {}), name: value, **({"kl_coef": 0.1} if name == "kl_max" else {})},
        }
    )
    assert with_it.model_dump(mode="json")[section][name] == value
    assert stored_spec(with_it.model_dump(mode="json")) == with_it


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"kl_max": 10}, "kl_coef is 0"),
        ({"kl_max": 10, "kl_coef": 0.1, "kl_estimator": "k2"}, "the estimator is 'k2'"),
        ({"kl_max": 10, "kl_coef": 0.1, "kl_in": "reward"}, "the estimator is 'k1'"),
        ({"kl_max": 0, "kl_coef": 0.1}, "kl_max"),
    ],
)
def test_a_bound_of_k3_needs_k3(train: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_spec({**MINIMAL, "train": train})
