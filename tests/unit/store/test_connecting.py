"""The store's password file: its owner, and errors about unusable ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gcore.errors import UsageError
from gcore.store import reference as connecting
from gcore.store.reference import StoreRef, UserRef
from gcore.testing import FakeClock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text("right\n")
    file.chmod(0o600)
    return file


def said(file: Path) -> str:
    """The reason that a connection fails. Raises if it succeeds."""
    user = UserRef(name="gcore", password_file=str(file))
    with pytest.raises(UsageError) as caught:
        asyncio.run(connecting.connect_store(StoreRef(endpoints=("127.0.0.1:1",), user=user), FakeClock()))
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_password_that_others_may_read_is_refused_and_is_not_told(file: Path, mode: int) -> None:
    file.chmod(mode)
    sentence = said(file)
    assert "other users may read the store's password" in sentence
    assert f"chmod 600 {file}" in sentence
    assert "right" not in sentence


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_password_that_its_owner_alone_may_read_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert connecting._password(file) == "right"


def test_a_link_to_a_password_is_judged_by_where_it_leads(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    assert connecting._password(link) == "right"
    file.chmod(0o644)
    assert "other users may read" in said(link)


def test_no_file_an_empty_one_and_one_that_is_no_text_are_told_apart(file: Path) -> None:
    assert "cannot read the store's password (No such file" in said(file.with_name("none"))
    file.write_text("\n")
    assert "the store's password file is empty" in said(file)
    file.write_bytes(b"\xff")
    assert "it is not UTF-8 text" in said(file)
