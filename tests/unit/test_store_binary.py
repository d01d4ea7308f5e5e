"""Where an etcd comes from, without starting one."""

import os
from pathlib import Path

import pytest

from gcore.store import binary
from gcore.store.binary import EtcdBinary, EtcdFailed, ExternalEtcd, NoEtcd, find_etcd


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_endpoints_that_are_named_come_first() -> None:
    assert find_etcd(["a:1", "b:2"]) == ExternalEtcd(("a:1", "b:2"))


def test_an_etcd_on_the_path_comes_before_the_wheel(tmp_path: Path) -> None:
    etcd = script(tmp_path / "etcd", "exit 0")
    assert find_etcd(search_path=str(tmp_path)) == EtcdBinary(etcd)


def test_the_wheels_etcd_is_found_where_there_is_no_other(tmp_path: Path) -> None:
    found = find_etcd(search_path=str(tmp_path))
    assert isinstance(found, EtcdBinary)
    assert os.access(found.path, os.X_OK)
    assert found.version() == "3.5.1"


def test_where_there_is_none_one_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoEtcd, match="no etcd is to be found") as caught:
        find_etcd(search_path=str(tmp_path))
    assert "--etcd-endpoints" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("echo hello", "is not an etcd", id="another program"),
        pytest.param("exit 3", "--version fails", id="fails"),
    ],
)
def test_what_is_no_etcd_is_found_out(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(EtcdFailed, match=words):
        EtcdBinary(script(tmp_path / "etcd", text)).version()
