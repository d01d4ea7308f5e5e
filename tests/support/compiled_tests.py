"""Compile the tests as pytest would, with rewritten asserts, so that no worker has to: `python tests/support/compiled_tests.py`.

A collection would leave the same files, but imports everything for it. The functions are pytest's own and private: where they
are others, its workers compile for themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import AssertionState
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, get_cache_dir, try_makedirs

TESTS = Path(__file__).resolve().parents[1]


class Compiler:
    """A plugin that compiles in place of a collection and tests."""

    @pytest.hookimpl
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        state = AssertionState(config, "rewrite")
        for file in sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]):
            folder = get_cache_dir(file)
            compiled = folder / (file.name.removesuffix(".py") + PYC_TAIL)
            if try_makedirs(folder) and _read_pyc(file, compiled) is None:
                source, code = _rewrite_test(file, config)
                _write_pyc(state, code, source, compiled)
        return 0


if __name__ == "__main__":
    raise SystemExit(pytest.main(["-p", "no:cacheprovider"], plugins=[Compiler()]))
