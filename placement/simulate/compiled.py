"""Compiles the simulator's inner loops where numba is installed (the extra `simulate`), and else leaves them as they are: the same
results, a hundred times as slow."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

COMPILES = find_spec("numba") is not None


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, compiled when it is first called."""
    if not COMPILES:
        return function
    from numba import njit

    made: Callable[P, R] = njit(error_model="numpy")(function)
    return made


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """The same, as a part of each function that calls it: calls with many arrays take longer than what is done in them."""
    if not COMPILES:
        return function
    from numba import njit

    made: Callable[P, R] = njit(error_model="numpy", inline="always")(function)
    return made
