"""Preparing the calculator example: disjoint products, two formats, and a model that calls the tool as trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gcore.errors import DataError
from gcore.quickstart import __main__ as examples
from gcore.quickstart.calculator import (
    CHARACTERS,
    CLOSE,
    OPEN,
    Product,
    prepare_calculator,
    split_products,
    tool_call_share,
)
from gcore.rollout.environments.tools import TagCallFormat, calculator

UPDATES = 3


def test_products_are_the_same_for_ever_and_none_is_in_two_lists() -> None:
    split = split_products(0)
    lists = (split.train, split.held_out, split.warm)
    assert [len(one) for one in lists] == [2048, 256, 8192]
    assert len({(p.left, p.right) for one in lists for p in one}) == sum(map(len, lists))
    assert all(100 <= p.left < 1000 and 10 <= p.right < 100 for one in lists for p in one)
    assert split == split_products(0) != split_products(1)
    assert split.train[0] == Product(split.train[0].left, split.train[0].right)


def test_one_hand_asks_the_calculator_what_the_other_writes_at_once() -> None:
    product = Product(347, 86)
    assert (product.prompt, product.answer, product.careless_answer) == ("347*86=", "<<347*86>>29842", "29842")
    call = TagCallFormat("calculator", OPEN, CLOSE).call("<<347*86>>")
    assert call is not None
    assert calculator(call.argument) == product.result
    assert set(product.prompt + product.answer) <= set(CHARACTERS)
    assert tool_call_share((product, product), ["<<347*86>>1", "<<347*68>>29842"]) == 0.5


def test_the_folder_has_data_a_model_and_what_it_was_made_by(tmp_path: Path) -> None:
    made = prepare_calculator(tmp_path / "calculator", progress=False, warm_updates=UPDATES, must_fit=False)
    lines = [json.loads(line) for line in (made.folder / "eval.jsonl").read_text().splitlines()]
    assert len(lines) == 256
    assert all(eval(line["prompt"].removesuffix("=")) == int(line["answer"]) for line in lines)
    said = json.loads((made.folder / "manifest.json").read_text())
    assert (said["example"], said["calls"], said["warm_updates"]) == ("calculator", made.manifest.calls, UPDATES)
    assert prepare_calculator(tmp_path / "calculator", progress=False, warm_updates=UPDATES, must_fit=False).cached
    with pytest.raises(DataError, match="call the tool correctly"):
        prepare_calculator(tmp_path / "other", progress=False, warm_updates=UPDATES)


def test_it_is_prepared_by_its_name() -> None:
    assert "calculator" in examples.EXAMPLES
