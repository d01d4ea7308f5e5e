"""Environments of engines: where their Python is found, and which versions are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcore.engines.environments import SGLANG, VLLM, EngineEnvironment
from gcore.errors import UsageError

ENGINES = pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda one: one.engine)


def make_environment(folder: Path, engine: EngineEnvironment | None, version: str = "") -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    if engine is not None:
        packages = folder / "lib" / "python3.11" / "site-packages"
        module = packages / engine.module
        module.parent.mkdir(parents=True)
        module.touch()
        (packages / f"{engine.distributions[-1].replace('-', '_')}-{version or engine.tested}.dist-info").mkdir()
    return python


@ENGINES
def test_the_python_is_the_one_that_is_named_then_the_variables_then_the_folders_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineEnvironment
) -> None:
    one, two, here = (make_environment(tmp_path / name, engine) for name in ("one", "two", f"work/{engine.folder}"))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("gcore.engines.environments.__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    assert engine.find(one, environ={engine.variable: str(two)}) == one
    assert engine.find(environ={engine.variable: str(two)}) == two
    assert engine.find(environ={engine.variable: str(tmp_path / "two")}) == two  # its folder will do
    assert engine.find(environ={}) == here
    assert engine.version(here) == engine.tested
    monkeypatch.chdir(tmp_path)
    assert engine.find(environ={}) is None


def test_a_link_to_python_is_not_followed_out_of_its_environment(tmp_path: Path) -> None:
    real = make_environment(tmp_path / "real", None)
    python = make_environment(tmp_path / "env", SGLANG)
    python.unlink()
    python.symlink_to(real)
    assert SGLANG.find(python, environ={}) == python


@ENGINES
@pytest.mark.parametrize("name", ["nowhere", "bare"])
def test_a_python_without_the_engine_is_named_with_what_to_do(
    tmp_path: Path, name: str, engine: EngineEnvironment
) -> None:
    make_environment(tmp_path / "bare", None)
    assert not engine.is_in(tmp_path / name / "bin" / "python")
    with pytest.raises(UsageError, match=rf"{engine.variable}: .*{name}.*make {engine.engine}-setup"):
        engine.find(environ={engine.variable: str(tmp_path / name / "bin" / "python")})


def test_a_version_that_is_not_supported_is_refused_with_the_one_to_install(tmp_path: Path) -> None:
    newer = make_environment(tmp_path / "newer", VLLM, "0.33.0")
    with pytest.raises(UsageError, match=r"vLLM 0\.33\.0 .* supports only 0\.32\.\*.*vllm==0\.32\.0"):
        VLLM.find(newer, environ={})
    assert SGLANG.find(make_environment(tmp_path / "other", SGLANG, "0.6.0"), environ={})  # doctor warns


def test_an_old_environment_in_the_folders_own_place_does_not_stop_commands_that_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_environment(tmp_path / VLLM.folder, VLLM, "0.31.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gcore.engines.environments.__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    assert VLLM.find(environ={}) is None
    assert VLLM.how.endswith("a Python with vLLM 0.32.* (.venv-vllm has 0.31.0, which is not supported)")
