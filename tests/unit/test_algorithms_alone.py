"""The algorithms are of use to anyone: without the rest of gcore, and with the shapes and sources in their docstrings."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gcore.train.algorithms as package

FOREIGN = ("deepspeed", "transformers", "grpc", "etcd", "google.protobuf", "pydantic", "yaml", "aiohttp", "httpx")
MODULES = tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))
SOURCE = re.compile(r"arXiv \d{4}\.\d{5}|arXiv \d{4}\.\d{4}|\b(19|20)\d\d\b")


def test_all_modules_are_imported_in_a_fresh_interpreter_without_anything_else() -> None:
    imports = "; ".join(f"import {package.__name__}.{name}" for name in MODULES)
    program = (
        f"import sys; {imports}; "
        f"foreign = [m for m in sys.modules if m.partition('.')[0] in {FOREIGN!r} or m.startswith('google.protobuf')]; "
        "own = [m for m in sys.modules if m.startswith('gcore') and not m.startswith('gcore.train.algorithms')]; "
        "print(foreign, sorted(own))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] ['gcore', 'gcore.train']"


def test_the_learning_rate_needs_no_torch() -> None:
    program = "import sys, gcore.train.algorithms.schedule; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in MODULES:
        module = importlib.import_module(f"{package.__name__}.{name}")
        for key, found in vars(module).items():
            if inspect.isfunction(found) and found.__module__ == module.__name__ and not key.startswith("_"):
                yield f"{name}.{key}", found


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_tells_its_shapes(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    takes_tensors = "Tensor" in str(inspect.signature(PUBLIC[name]))
    assert text
    assert not takes_tensors or re.search(r"\[(batch|n|b)\b|of one shape|hapes as in", text), f"{name} tells no shape"


SOURCELESS = {
    "aggregate.denominator": "a count",
    "aggregate.loss_sum": "Mode has the sources",
    "returns.at_last_token": "a placement",
    "losses.nll_loss": "a definition",
    "losses.clip_fraction_tokens": "a measure of ppo_loss",
    "losses.gspo_clip_fraction_tokens": "a measure of gspo_loss",
    "losses.cispo_clip_fraction_tokens": "a measure of cispo_loss",
    "losses.value_clip_tokens": "a measure of value_loss",
    "losses.token_ratio": "a definition",
    "losses.sequence_ratio": "gspo_loss's",
    "corrections.mis_mask": "public implementations",
    "schedule.learning_rate": "a definition",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_tells_where_its_formula_is_from(name: str) -> None:
    assert (name in SOURCELESS) or SOURCE.search(inspect.getdoc(PUBLIC[name]) or ""), f"{name} names no source"
