"""Plug-ins of every kind are found by name in one way, and their errors have their own tracebacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from plug_in_package import Install, installer

from gcore.errors import GcoreError, SpecError
from gcore.plugins import MAX_TRACE, PluginFault, PluginKind, error_sentence, find_plugin, plugin_trace

KIND = PluginKind("gadget", "test.gadgets", "flow.gadget")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch, KIND.group)


def test_a_plug_in_is_found_by_its_name(install: Install) -> None:
    install("gad_a", "twice = gad_a:twice", "def twice(x):\n    return 2 * x\n")
    assert find_plugin(KIND, "twice")(4) == 8


def test_a_name_nobody_has_is_answered_with_the_nearest_and_with_all(install: Install) -> None:
    install("gad_b", "twice = gad_b:f\nonce = gad_b:f", "f = print")
    with pytest.raises(
        SpecError, match=r"flow\.gadget: no gadget is called 'twise', did you mean 'twice'\? Known: once, twice"
    ):
        find_plugin(KIND, "twise")


def test_where_there_is_no_plug_in_at_all_that_is_said() -> None:
    with pytest.raises(SpecError, match=r"no gadget is called 'x'\. Known: none"):
        find_plugin(KIND, "x")


def test_a_name_provided_twice_is_refused(install: Install) -> None:
    install("gad_c", "f = gad_c:f", "f = print")
    install("gad_d", "f = gad_d:f", "f = print")
    with pytest.raises(SpecError, match="gadget 'f' is provided more than once, by gad_c:f and gad_d:f"):
        find_plugin(KIND, "f")


def test_import_error_is_reported_with_its_place_and_traceback(install: Install) -> None:
    install("gad_e", "f = gad_e:f", "def broken():\n    return 1 / 0\n\n\nbroken()\n")
    with pytest.raises(PluginFault, match=r"ZeroDivisionError: division by zero\), raised at .*gad_e\.py:2") as caught:
        find_plugin(KIND, "f")
    assert "\n" not in str(caught.value)
    assert caught.value.trace.startswith("Traceback")
    assert "in broken" in caught.value.trace
    assert "gcore/plugins.py" not in caught.value.trace
    assert "importlib" not in caught.value.trace


def test_cancellation_during_an_import_is_reported(install: Install) -> None:
    """In a controller it would end whatever looked for the plug-in, as if that had been told to end."""
    install("gad_k", "k = gad_k:k", "import asyncio\nraise asyncio.CancelledError('half of it')\n")
    with pytest.raises(PluginFault, match=r"cannot be loaded from .* \(CancelledError: half of it\)"):
        find_plugin(KIND, "k")


def test_non_callable_plug_ins_are_refused(install: Install) -> None:
    install("gad_f", "f = gad_f:f", "f = 3")
    with pytest.raises(SpecError, match="is an int, which is not callable"):
        find_plugin(KIND, "f")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_error_in_gcores_words_has_the_traceback_of_its_cause() -> None:
    assert plugin_trace(raised(GcoreError("no"), raised(KeyError("x")))).endswith("KeyError: 'x'")
    assert plugin_trace(raised(GcoreError("no"))) == ""
    assert plugin_trace(None) == ""


def test_a_traceback_is_bounded_and_keeps_its_end() -> None:
    told = plugin_trace(raised(ValueError("a" * 10_000 + "end")))
    assert len(told) == MAX_TRACE
    assert told.endswith("end")


def test_a_traceback_that_came_with_the_error_is_taken_as_it_is() -> None:
    assert plugin_trace(PluginFault("no", trace="Traceback of another process")) == "Traceback of another process"


def test_a_sentence_is_one_line() -> None:
    assert error_sentence(ValueError("one\ntwo")) == "ValueError: one"
    assert error_sentence(ValueError()) == "ValueError"
    assert len(error_sentence(ValueError("<" * 1_000_000))) < 600
