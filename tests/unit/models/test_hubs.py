"""Valid values of `model.path`."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.models.hubs import HubModel, ModelError, hub_model, is_commit

PART = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)


@given(st.sampled_from(["hf", "ms"]), PART, PART, st.one_of(st.just(""), PART))
def test_a_hub_model_is_read_and_written_alike(scheme: str, owner: str, name: str, revision: str) -> None:
    text = f"{scheme}://{owner}/{name}" + (f"@{revision}" if revision else "")
    model = hub_model(text)
    assert model is not None
    assert str(model) == text
    assert (model.repo, model.revision) == (f"{owner}/{name}", revision)


@pytest.mark.parametrize("path", ["/models/x", "models/hf:/x", "hf", "relative/folder", "http://host/x"])
def test_anything_without_a_hub_s_scheme_is_a_folder(path: str) -> None:
    assert hub_model(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "hf://",
        "hf://gpt2",
        "hf://owner/",
        "hf:///name",
        "hf://owner/name/more",
        "hf://owner/name@",
        "hf://owner/../name",
        "hf://owner/a..b",
        "hf://owner/name@../x",
        "hf://ow ner/name",
        "ms://owner/näme",
        "hf://owner/na--me",
        "hf://owner/name@a b",
    ],
)
def test_a_name_that_is_none_is_refused_with_the_form_it_should_have(path: str) -> None:
    with pytest.raises(ModelError, match="://OWNER/NAME") as caught:
        hub_model(path)
    assert repr(path) in str(caught.value)


@given(st.text(max_size=40))
def test_nothing_that_stands_behind_a_scheme_breaks_the_reader(rest: str) -> None:
    try:
        model = hub_model(f"hf://{rest}")
    except ModelError:
        return
    assert model is not None
    assert ".." not in model.repo
    assert model.repo.count("/") == 1


def test_a_commit_is_told_from_a_branch() -> None:
    assert is_commit("0123456789abcdef0123456789abcdef01234567")
    assert not is_commit("main")
    assert not is_commit("0123456")
    assert HubModel("hf", "o", "n", "v1").revision == "v1"
