"""Contexts: the cluster and credentials of a command, the contexts file, and the commands that write it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import issued
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from controllers.cli.main import app
from gcore.api.tokens import new_token
from gcore.client.contexts import (
    Context,
    Contexts,
    choose_cluster,
    contexts_file,
    find_cluster,
    load_contexts,
    save_contexts,
)
from gcore.errors import GcoreError, UsageError

LAB = Context(addresses=("127.0.0.1:7", "127.0.0.1:8"), token="gcore_lab")
OTHER = Context(addresses=("127.0.0.1:9",), token="gcore_other")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "config.yaml"
    save_contexts(file, Contexts(current="lab", contexts={"lab": LAB, "other": OTHER}))
    return {"GCORE_CONFIG": str(file)}


def shown(env: dict[str, str], *addresses: str, local: bool = False) -> tuple[tuple[str, ...], str]:
    found = choose_cluster(env, addresses, local=local)
    (metadata,) = found.connector.metadata("127.0.0.1:1") or (("", ""),)
    return found.addresses, metadata[1].removeprefix("Bearer ")


def test_the_current_context_is_the_one_unless_another_is_named_or_a_cluster_is_up_here(env: dict[str, str]) -> None:
    assert shown(env) == (LAB.addresses, "gcore_lab")
    assert shown(env | {"GCORE_CONTEXT": "other"}) == (OTHER.addresses, "gcore_other")
    assert shown(env, local=True) == ((), "")
    assert shown(env | {"GCORE_CONTEXT": "lab"}, local=True) == (LAB.addresses, "gcore_lab")


def test_a_token_goes_to_its_own_cluster_and_to_no_address_that_is_only_typed(env: dict[str, str]) -> None:
    assert shown(env, "127.0.0.1:8") == (("127.0.0.1:8",), "gcore_lab")
    assert shown(env, "127.0.0.1:9") == (("127.0.0.1:9",), "")
    assert shown(env, "127.0.0.1:8", "127.0.0.1:9")[1] == ""
    assert shown(env | {"GCORE_CONTEXT": "lab"}, "127.0.0.1:9") == (("127.0.0.1:9",), "gcore_lab")
    assert shown(env | {"GCORE_TOKEN": "gcore_x"}, "127.0.0.1:9")[1] == "gcore_x"
    assert shown(env | {"GCORE_TOKEN": "gcore_x"})[1] == "gcore_x"


def test_without_a_file_nothing_is_known_and_nothing_shown(tmp_path: Path) -> None:
    assert shown({"HOME": str(tmp_path)}) == ((), "")
    assert contexts_file({"HOME": "/home/ada"}) == Path("/home/ada/.config/gcore/config.yaml")
    assert contexts_file({"XDG_CONFIG_HOME": "/x", "HOME": "/home/ada"}) == Path("/x/gcore/config.yaml")


def test_files_are_relative_to_the_contexts_file_and_the_authority_is_trusted(tmp_path: Path) -> None:
    ca = issued.authority(tmp_path / "ca")
    (tmp_path / "t").write_text(new_token().text)
    (tmp_path / "t").chmod(0o600)
    file = tmp_path / "config.yaml"
    save_contexts(
        file, Contexts(current="a", contexts={"a": Context(addresses=("h:1",), ca="ca/ca.pem", token_file="t")})
    )
    found = choose_cluster({"GCORE_CONFIG": str(file)})
    assert found.connector.secure
    assert found.connector.metadata("h:1")
    assert choose_cluster({"GCORE_CONFIG": "none", "GCORE_CA": str(ca / "ca.pem")}, ("h:1",)).connector.secure
    (tmp_path / "t").chmod(0o644)
    with pytest.raises(UsageError, match="other users may read the token"):
        choose_cluster({"GCORE_CONFIG": str(file)})


def test_the_file_is_for_its_owner_alone_if_a_token_stands_in_it(env: dict[str, str]) -> None:
    file = Path(env["GCORE_CONFIG"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(UsageError, match="other users may read the file and the token"):
        load_contexts(file)


def test_a_name_that_is_near_is_suggested(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"there is no context 'labb', did you mean 'lab'\?"):
        choose_cluster(env | {"GCORE_CONTEXT": "labb"})


@given(st.binary(max_size=200))
def test_any_bytes_are_contexts_or_one_sentence_that_tells_no_token(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "contexts.yaml"
    file.write_bytes(data)
    file.chmod(0o600)
    said = ""
    try:
        load_contexts(file)
    except GcoreError as error:
        said = str(error)
    assert len(said) < 2000


def test_a_mistake_in_the_file_does_not_show_its_tokens(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("contexts: {lab: {addresses: [h:1], token: {a: gcore_secret}}}\n")
    file.chmod(0o600)
    with pytest.raises(UsageError) as caught:
        load_contexts(file)
    assert "gcore_secret" not in str(caught.value)
    assert "gcore_lab" not in repr(LAB)


def test_the_commands_write_what_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gcore(*words: str) -> str:
        ended = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
        return ended.output

    monkeypatch.setenv("GCORE_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.delenv("GCORE_CONTEXT", raising=False)
    gcore("token", "first-admin", "--to", str(tmp_path / "t"))
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o600
    assert "current" in gcore("context", "set", "lab", "--address", "127.0.0.1:7", "--token-file", str(tmp_path / "t"))
    gcore("context", "set", "other", "--address", "127.0.0.1:9,127.0.0.1:10")
    gcore("context", "use", "other")
    listed = json.loads(gcore("context", "list", "-o", "json"))
    told = gcore("context", "list", "-o", "yaml")
    assert yaml.safe_load(told) == listed
    assert not told.startswith("{")
    assert listed["current"] == "other"
    assert find_cluster(None, tmp_path).addresses == ("127.0.0.1:9", "127.0.0.1:10")
    gcore("context", "remove", "other")
    assert json.loads(gcore("context", "list", "-o", "json"))["current"] is None
    with pytest.raises(UsageError, match="there is no context"):
        gcore("context", "use", "nowhere")
    with pytest.raises(UsageError, match="cannot read the token"):
        gcore("context", "set", "x", "--address", "h:1", "--token-file", str(tmp_path / "none"))
    assert "x" not in json.loads(gcore("context", "list", "-o", "json"))["contexts"]
    with pytest.raises(UsageError, match="the file exists"):
        gcore("token", "first-admin", "--to", str(tmp_path / "t"))
