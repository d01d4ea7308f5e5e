"""The engine's inputs: huge numbers, endless invalid lists, names of samples."""

import pytest
from pydantic import ValidationError

from gcore.engines.serving.http import BodyRefused
from gcore.engines.serving.io_struct import (
    MOST_SAMPLES,
    AbortBody,
    LogprobRequest,
    SamplingBody,
    generate_body,
    json_number,
)
from gcore.errors import EngineError


@pytest.mark.parametrize("least", [0, 9, 10, 11, 2**63, 10**30])
def test_a_least_length_without_a_greatest_ends_with_the_room_that_there_is(least: int) -> None:
    body = SamplingBody(max_new_tokens=None, min_new_tokens=least)
    body.check()
    sampling = body.sampling(index=0, drawn_seed=1, end_tokens=(), room=10, vocabulary=5, asked=LogprobRequest())
    assert (sampling.min_new_tokens, sampling.max_new_tokens) == (min(least, 10), 10)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"input_ids": ["a"] * 1000}, id="texts for tokens"),
        pytest.param({"input_ids": [1] * 1000 + ["a"] * 1000}, id="tokens, then texts"),
        pytest.param({"input_ids": [[1, "a", "a"]] * 1000}, id="lists of both"),
        pytest.param({"text": [1] * 1000}, id="numbers for texts"),
        pytest.param({"input_ids": [1], "token_ids_logprob": [[None] * 1000] * 2}, id="nulls for names"),
    ],
)
def test_of_many_wrong_things_the_first_is_told_and_the_others_are_not_looked_at(body: dict[str, object]) -> None:
    with pytest.raises(BodyRefused) as caught:
        generate_body(body)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() < 10


def test_more_samples_than_an_engine_enters_at_once_are_refused() -> None:
    body = {"input_ids": [[1], [2]], "sampling_params": {"n": MOST_SAMPLES // 2}}
    assert generate_body(body).params[0].n == MOST_SAMPLES // 2
    body["sampling_params"] = {"n": MOST_SAMPLES // 2 + 1}
    with pytest.raises(EngineError, match="asks for 65538 samples; the maximum is 65536"):
        generate_body(body)


def test_an_abort_ends_the_samples_numbered_under_its_name_and_no_other_request() -> None:
    abort = AbortBody(rid="a")
    assert [rid for rid in ("a", "a_0", "a_12", "a_3_1") if not abort.names(rid)] == []
    assert [rid for rid in ("ab", "a_", "a_b", "a_0b", "b_0", "a_0_1_2", "") if abort.names(rid)] == []
    assert not AbortBody(rid="").names("")
    assert not AbortBody().names("a")


def test_non_finite_numbers_become_null() -> None:
    assert json_number([[1.5, float("nan")], [float("-inf"), None]]) == [[1.5, None], [None, None]]


def test_each_prompt_may_name_an_adapter() -> None:
    assert generate_body({"input_ids": [1]}).adapters == (None,)
    assert generate_body({"input_ids": [[1], [2]], "lora_path": "x"}).adapters == ("x", "x")
    assert generate_body({"input_ids": [[1], [2]], "lora_path": [None, "x"]}).adapters == (None, "x")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param(
            {"input_ids": [[1], [2]], "lora_path": ["x"]}, "lora_path has 1 entries for 2 prompts", id="too-few"
        ),
        pytest.param(
            {"input_ids": [1], "lora_path": ["x"]}, "lora_path has 1 entries for a single prompt", id="no-batch"
        ),
        pytest.param({"input_ids": [1], "lora_path": [5]}, "lora_path", id="number"),
    ],
)
def test_adapters_that_fit_no_prompt_are_refused(body: dict[str, object], error: str) -> None:
    with pytest.raises((EngineError, BodyRefused), match=error):
        generate_body(body)
