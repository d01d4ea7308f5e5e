"""Plug-ins in files: their names in a spec, the accepted files, and the errors about unusable files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gcore.config.load import find_flow, new_spec, stored_spec
from gcore.config.reward import RewardSpec
from gcore.errors import SpecError
from gcore.plugins import (
    PluginFault,
    PluginFile,
    copied_file,
    file_digest,
    parse_plugin_file,
    plugin_files,
    portable_reference,
    read_plugin_file,
    replace_plugin_files,
    shown_name,
)
from gcore.reward import find_reward
from gcore.reward.api import CheckedReward, RewardError
from gcore.rollout.agents.api import find_agent
from gcore.rollout.environments.api import find_tool

SCORE = "def score(response):\n    return float(len(response))\n"


def spec(**sections: Any) -> dict[str, Any]:
    least = {"name": "a", "model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"max_new_tokens": 4}}
    return least | {"flow": {"steps": 1}} | sections


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        ("reward.py:score", True),
        ("/abs olute/re-ward.py:score", True),
        ("exact", False),
        ("reward.py", False),
        (".py:score", False),
        ("reward.py:not a name", False),
        ("reward.txt:score", False),
    ],
)
def test_a_name_with_a_python_file_and_a_function_is_a_plugin_file(name: str, is_file: bool) -> None:
    assert (parse_plugin_file(name) is not None) is is_file


def test_paths_are_relative_to_the_spec_and_a_file_may_stand_wherever_a_plugin_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORE + "async def run(peer):\n    pass\n")
    tree = spec(
        flow={"steps": 1, "file": "mine.py:run", "filters": [{"file": "mine.py:score"}]},
        reward={"parts": [{"file": "mine.py:score"}, {"name": "exact"}]},
        train={"advantage": "mine.py:score", "loss": "mine.py:score"},
    )
    found = new_spec(tree, base=tmp_path)
    mine = f"{tmp_path.resolve()}/mine.py"
    assert found.flow.name == f"{mine}:run"
    assert found.flow.filters[0].name == found.reward.parts[0].name == found.train.loss == f"{mine}:score"
    assert found.train.advantage == f"{mine}:score"
    keys = [where for where, _ in plugin_files(found.model_dump(mode="json"))]
    assert keys == ["flow.name", "flow.filters.0.name", "reward.parts.0.name", "train.advantage", "train.loss"]
    assert stored_spec(found.model_dump(mode="json")) == found


def test_the_files_of_a_users_spec_are_checked_before_anything_of_them_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "mine.py").chmod(0o622)
    for sections in ({"flow": {"steps": 1, "file": "mine.py:run"}}, {"reward": [{"file": "mine.py:score"}]}):
        with pytest.raises(SpecError, match="other users can write the file"):
            new_spec(spec(**sections), base=tmp_path)
    with pytest.raises(SpecError, match=r"^reward\.0\.file: .*absent\.py: cannot read the plug-in file"):
        new_spec(spec(reward=[{"file": "absent.py:score"}]), base=tmp_path)


def test_options_are_not_references() -> None:
    tree = spec(reward={"name": "regex", "options": {"pattern": "x.py:y", "name": "x.py:y"}})
    assert plugin_files(tree) == []


def test_a_file_and_a_name_for_one_plugin_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a file or a name, not both"):
        new_spec(spec(reward={"name": "exact", "file": "reward.py:score"}), base=tmp_path)


def test_a_copy_has_the_digest_of_its_bytes_and_copies_compare_equal(tmp_path: Path) -> None:
    data = SCORE.encode()
    one, other = (copied_file(tmp_path / name, data, "reward.py") for name in ("a", "b"))
    assert one.parent.name == file_digest(data)
    assert one != other
    assert portable_reference(PluginFile(one, "score")) == portable_reference(PluginFile(other, "score"))
    assert portable_reference(PluginFile(Path("/home/me/reward.py"), "score")) == "/home/me/reward.py:score"


def test_a_file_that_changed_after_its_submission_does_not_run(tmp_path: Path) -> None:
    copy = copied_file(tmp_path, SCORE.encode(), "reward.py")
    copy.parent.mkdir(parents=True)
    copy.write_text(SCORE)
    assert find_reward(f"{copy}:score")("abc", {}, None).value == 3.0  # type: ignore[arg-type]
    copy.write_text(SCORE + "# later\n")
    with pytest.raises(PluginFault, match="has changed since the job was submitted"):
        find_reward(f"{copy}:score")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def other(response):\n    return 1\n", r"defines no 'score'; its functions: other"),
        ("def score(:\n", r"reward\.py:1: the plug-in file has a syntax error \(invalid syntax\)"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("score = 3\n", "is an int, which cannot be called"),
        ("raise SystemExit(1)\n", "SystemExit: 1"),
    ],
    ids=["no such function", "a syntax error", "a module that is not installed", "no function", "it exits"],
)
def test_a_file_that_gives_no_function_is_refused_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(PluginFault, match=said):
        find_reward(f"{tmp_path}/reward.py:score")


@pytest.mark.parametrize(
    ("find", "text", "said"),
    [
        pytest.param(find_flow, "async def own(): ...", r"^flow\.name: .*called with \(peer\): too many", id="a flow"),
        pytest.param(find_flow, "async def own(peer, more): ...", "missing a required argument: 'more'", id="more"),
        pytest.param(find_tool, "def own(): ...", r"^environment\.tools\.names: .*\(argument\): too many", id="a tool"),
        pytest.param(find_tool, "async def own(argument): ...", "is asynchronous. Write `def`", id="an async tool"),
        pytest.param(find_agent, "def own(*, rollout): ...", r"^agent\.name: .*\(rollout\): ", id="an agent"),
    ],
)
def test_a_function_that_gcore_cannot_call_is_refused(tmp_path: Path, find: Any, text: str, said: str) -> None:
    file = write(tmp_path / "own.py", text)
    with pytest.raises(PluginFault, match=said):
        find(f"{file}:own")
    write(tmp_path / "ready.py", "async def own(one, *, more=1): ...\n\n\ndef tool(*all): ...\n")
    name = "tool" if find is find_tool else "own"
    assert callable(find(f"{tmp_path}/ready.py:{name}"))


def write(path: Path, text: str = SCORE, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_must_be_there_belong_to_us_be_ours_to_write_and_hold_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_plugin_file(write(tmp_path / "good.py"), "reward.name") == SCORE.encode()
    for path, said in (
        (tmp_path / "absent.py", "No such file"),
        (tmp_path, "Is a directory"),
        (Path("/dev/null"), "regular file"),
        (write(tmp_path / "empty.py", " \n"), "is empty"),
        (write(tmp_path / "group.py", mode=0o620), "other users can write"),
        (write(tmp_path / "world.py", mode=0o602), "other users can write"),
        (write(tmp_path / "large.py", "#" * ((1 << 20) + 1)), "more than"),
    ):
        with pytest.raises(SpecError, match=said):
            read_plugin_file(path, "reward.name")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SpecError, match="belongs to another user"):
        read_plugin_file(tmp_path / "good.py", "reward.name")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py", 0o600)
    with pytest.raises(SpecError, match=r"reward\.file: .*pipe\.py: a plug-in file must be a regular file"):
        new_spec(spec(reward={"file": "pipe.py:score"}), base=tmp_path)


def test_the_command_that_mends_the_rights_of_a_file_can_be_pasted(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"chmod go-w '.*/my reward\.py'$"):
        read_plugin_file(write(tmp_path / "my reward.py", mode=0o622), "reward.file")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        pytest.param({"reward": {"file": "reward.py"}}, r"^reward\.file: 'reward\.py' does not name", id="no function"),
        pytest.param({"reward": {"file": "reward:score"}}, r"^reward\.file: .*FILE\.py:FUNCTION", id="not .py"),
        pytest.param({"reward": {"file": "reward.py:A.score"}}, r"^reward\.file: .*FILE\.py:FUNCTION", id="a method"),
        pytest.param({"reward": {"file": None}}, r"^reward\.file: None does not name", id="nothing"),
        pytest.param({"reward": [{"file": 3}]}, r"^reward\.0\.file: 3 does not name", id="a number in a list"),
        pytest.param({"flow": {"steps": 1, "file": "f.py"}}, r"^flow\.file: 'f\.py' does not name", id="a flow"),
        pytest.param({"agent": {"file": "a.py"}}, r"^agent\.file: 'a\.py' does not name", id="an agent"),
        pytest.param(
            {"reward": "reward.py:score"}, r"^reward: .*Write \{file: reward\.py:score\}", id="text for a section"
        ),
        pytest.param(
            {"reward": ["reward.py:score"]}, r"^reward\.0: .*Write \{file: reward\.py:score\}", id="text in a list"
        ),
        pytest.param(
            {"train": {"loss": {"file": "own.py:f"}}}, r"^train\.loss: .*Write 'own\.py:f'", id="a section for text"
        ),
        pytest.param(
            {"environment": {"name": "text", "tools": {"names": [{"file": "own.py:f"}]}}},
            r"^environment\.tools\.names\.0: .*Write 'own\.py:f'",
            id="a section among names",
        ),
    ],
)
def test_an_error_about_a_wrongly_named_file_shows_the_right_form(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        new_spec(spec(**sections))


def test_a_key_file_where_no_plugin_belongs_is_an_unknown_key() -> None:
    with pytest.raises(SpecError, match=r"unknown key 'model\.file'"):
        new_spec(spec(model={"file": "weights"}))


def test_only_references_are_replaced() -> None:
    tree = {"reward": {"name": "a.py:f"}, "data": {"sources": [{"name": "b", "reward": {"name": "exact"}}]}, "x": 3}
    changed = replace_plugin_files(tree, lambda file, where: f"{where}={file.name}")
    assert changed == {**tree, "reward": {"name": "reward.name=f"}}


def test_settings_of_plug_ins_and_templates_are_left_as_they_are() -> None:
    tree = {"data": {"template_variables": {"file": "a.py:b", "name": "c.py:d"}}, "reward": {"options": {"file": "x"}}}
    assert replace_plugin_files(tree, lambda file, _: "changed") == tree


def test_messages_name_a_copied_file_without_the_folder_that_no_user_knows(tmp_path: Path) -> None:
    copy = copied_file(tmp_path, b"x", "reward.py")
    assert shown_name(f"{copy}:score") == "reward.py:score"
    assert shown_name("/home/me/reward.py:score") == "/home/me/reward.py:score"
    assert shown_name("exact") == "exact"
    assert RewardSpec(name=f"{copy}:score").shown_as == "reward.py:score"
    reward = CheckedReward(f"{copy}:score", lambda response, fields, spec: "much")
    with pytest.raises(RewardError, match=r"^reward 'reward\.py:score' returned"):
        reward("", {}, RewardSpec(name="exact"))
