"""From logits to tokens: what is drawn, and what its log-probability is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gcore.rollout.engine.sampling import Forbidden, RowParams, draw

CPU = torch.device("cpu")
logits_of = st.lists(st.floats(-8, 8, width=32, allow_subnormal=False), min_size=2, max_size=12)
uniform = st.floats(0, 1 - 2.0**-40)


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, rows: int = 1) -> RowParams:
    return RowParams.of(np.full(rows, temperature), np.full(rows, top_p), np.full(rows, top_k), CPU)


def reference(logits: list[float], temperature: float) -> np.ndarray:  # type: ignore[type-arg]
    scaled = np.asarray(logits, np.float64) / (temperature or 1.0)
    return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()


@given(logits_of, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([1.0, 0.7]), st.integers(0, 4), uniform)
def test_log_probabilities_are_those_of_the_scaled_untruncated_softmax(
    logits: list[float], temperature: float, top_p: float, top_k: int, u: float
) -> None:
    drawn = draw(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(temperature, top_p, top_k))
    expected = reference(logits, temperature)[drawn.tokens[0]]
    assert drawn.logprobs[0].item() == pytest.approx(expected, abs=1e-5)


@given(logits_of, uniform)
def test_a_token_is_drawn_where_the_cumulative_distribution_passes_the_uniform_number(
    logits: list[float], u: float
) -> None:
    token = int(draw(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params()).tokens[0])
    cumulative = np.exp(reference(logits, 1.0)).cumsum()
    assert cumulative[token] >= u - 1e-6
    assert (cumulative[token - 1] if token else 0.0) <= u + 1e-6


@given(logits_of)
def test_temperature_zero_takes_the_likeliest(logits: list[float]) -> None:
    drawn = draw(torch.tensor([logits]), torch.zeros(1, dtype=torch.float64), params(temperature=0.0))
    assert logits[int(drawn.tokens[0])] == max(logits)


@given(logits_of, st.integers(1, 5), uniform)
def test_top_k_draws_from_the_k_likeliest(logits: list[float], top_k: int, u: float) -> None:
    token = int(draw(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(top_k=top_k)).tokens[0])
    assert sum(other > logits[token] + 1e-5 for other in logits) < top_k


@given(logits_of, st.floats(0.05, 0.95), uniform)
def test_top_p_draws_from_the_fewest_likeliest_that_reach_p(logits: list[float], top_p: float, u: float) -> None:
    token = int(draw(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(top_p=top_p)).tokens[0])
    probabilities = np.exp(reference(logits, 1.0))
    assert probabilities[np.asarray(logits) > logits[token] + 1e-5].sum() < top_p + 1e-5


def test_rows_of_one_batch_have_their_own_parameters() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]] * 4)
    mixed = RowParams.of(np.array([0.0, 1.0, 1.0, 2.0]), np.array([1.0, 1.0, 0.5, 1.0]), np.array([0, 1, 0, 0]), CPU)
    drawn = draw(logits, torch.zeros(4, dtype=torch.float64), mixed)
    assert drawn.tokens.tolist() == [2, 2, 2, 0]
    assert drawn.logprobs[3].item() == pytest.approx(reference([0.0, 1.0, 3.0], 2.0)[0], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forbidden_is_not_drawn_and_changes_no_log_probability(temperature: float) -> None:
    logits = [0.0, 1.0, 9.0]
    forbidden = Forbidden(torch.tensor([0]), torch.tensor([2]))
    u = torch.tensor([0.999], dtype=torch.float64)
    drawn = draw(torch.tensor([logits]), u, params(temperature), forbidden)
    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs[0].item() == pytest.approx(reference(logits, temperature)[1], abs=1e-5)


def test_a_token_of_no_probability_is_never_drawn_at_either_end() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]] * 2)
    u = torch.tensor([0.0, 1 - 2.0**-40], dtype=torch.float64)
    assert draw(logits, u, params(rows=2)).tokens.tolist() == [1, 1]
