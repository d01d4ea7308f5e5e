"""From logits to tokens: the sampled token and its log-probability."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.torch import sampler as sampling
from gcore.engines.torch.sampler import BatchSamplingParams, ForbiddenTokens, sample, top_logprobs

CPU = torch.device("cpu")
logits_of = st.lists(st.floats(-8, 8, width=32, allow_subnormal=False), min_size=2, max_size=12)
uniform = st.floats(0, 1 - 2.0**-40)


def params(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, rows: int = 1
) -> BatchSamplingParams:
    return BatchSamplingParams.of(
        np.full(rows, temperature), np.full(rows, top_p), np.full(rows, top_k), np.full(rows, min_p), CPU
    )


def reference(logits: list[float], temperature: float) -> np.ndarray:  # type: ignore[type-arg]
    scaled = np.asarray(logits, np.float64) / (temperature or 1.0)
    return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()


@given(logits_of, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([1.0, 0.7]), st.integers(0, 4), uniform)
def test_log_probabilities_are_those_of_the_scaled_untruncated_softmax(
    logits: list[float], temperature: float, top_p: float, top_k: int, u: float
) -> None:
    drawn = sample(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(temperature, top_p, top_k))
    expected = reference(logits, temperature)[drawn.tokens[0]]
    assert drawn.logprobs[0].item() == pytest.approx(expected, abs=1e-5)


@given(logits_of, uniform)
def test_a_token_is_drawn_where_the_cumulative_distribution_passes_the_uniform_number(
    logits: list[float], u: float
) -> None:
    token = int(sample(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params()).tokens[0])
    cumulative = np.exp(reference(logits, 1.0)).cumsum()
    assert cumulative[token] >= u - 1e-6
    assert (cumulative[token - 1] if token else 0.0) <= u + 1e-6


@given(logits_of)
def test_temperature_zero_takes_the_likeliest(logits: list[float]) -> None:
    drawn = sample(torch.tensor([logits]), torch.zeros(1, dtype=torch.float64), params(temperature=0.0))
    assert logits[int(drawn.tokens[0])] == max(logits)


@given(logits_of, st.integers(1, 5), uniform)
def test_top_k_draws_from_the_k_likeliest(logits: list[float], top_k: int, u: float) -> None:
    token = int(sample(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(top_k=top_k)).tokens[0])
    assert sum(other > logits[token] + 1e-5 for other in logits) < top_k


@given(logits_of, st.floats(0.05, 0.95), uniform)
def test_top_p_draws_from_the_fewest_likeliest_that_reach_p(logits: list[float], top_p: float, u: float) -> None:
    token = int(sample(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(top_p=top_p)).tokens[0])
    probabilities = np.exp(reference(logits, 1.0))
    assert probabilities[np.asarray(logits) > logits[token] + 1e-5].sum() < top_p + 1e-5


def test_rows_of_one_batch_have_their_own_parameters() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]] * 4)
    mixed = BatchSamplingParams.of(
        np.array([0.0, 1.0, 1.0, 2.0]), np.array([1.0, 1.0, 0.5, 1.0]), np.array([0, 1, 0, 0]), np.zeros(4), CPU
    )
    drawn = sample(logits, torch.zeros(4, dtype=torch.float64), mixed)
    assert drawn.tokens.tolist() == [2, 2, 2, 0]
    assert drawn.logprobs[3].item() == pytest.approx(reference([0.0, 1.0, 3.0], 2.0)[0], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_not_sampled_and_change_no_log_probability(temperature: float) -> None:
    logits = [0.0, 1.0, 9.0]
    forbidden = ForbiddenTokens(torch.tensor([0]), torch.tensor([2]))
    u = torch.tensor([0.999], dtype=torch.float64)
    drawn = sample(torch.tensor([logits]), u, params(temperature), forbidden)
    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs[0].item() == pytest.approx(reference(logits, temperature)[1], abs=1e-5)


def test_a_token_of_no_probability_is_never_drawn_at_either_end() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]] * 2)
    u = torch.tensor([0.0, 1 - 2.0**-40], dtype=torch.float64)
    assert sample(logits, u, params(rows=2)).tokens.tolist() == [1, 1]


@given(logits_of, st.floats(0.05, 0.95), uniform)
def test_min_p_draws_nothing_below_its_share_of_the_likeliest(logits: list[float], min_p: float, u: float) -> None:
    token = int(sample(torch.tensor([logits]), torch.tensor([u], dtype=torch.float64), params(min_p=min_p)).tokens[0])
    probabilities = np.exp(reference(logits, 1.0))
    assert probabilities[token] >= min_p * probabilities.max() - 1e-5


LARGE = 20_000


def large_logits(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, LARGE, generator=torch.Generator().manual_seed(seed)) * spread


def uniforms(rows: int) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0], ids=["flat", "broad", "peaked"])
def test_a_large_vocabulary_is_drawn_from_where_its_cumulative_distribution_passes_the_number(spread: float) -> None:
    logits, u = large_logits(70, spread=spread), uniforms(70)
    drawn = sample(logits, u, params(rows=70))
    expected = torch.log_softmax(logits.double(), -1)
    cumulative = expected.exp().cumsum(-1)
    places = torch.arange(70)
    assert (cumulative[places, drawn.tokens] >= u - 1e-6).all()
    assert (cumulative[places, drawn.tokens] - expected.exp()[places, drawn.tokens] <= u + 1e-6).all()
    assert (drawn.logprobs - expected[places, drawn.tokens]).abs().max() < 1e-5


TRUNCATIONS = [
    pytest.param({"top_k": 7}, id="top-k"),
    pytest.param({"top_k": 3000}, id="more than the candidates"),
    pytest.param({"top_p": 0.3}, id="top-p"),
    pytest.param({"top_p": 0.97}, id="top-p beyond the candidates"),
    pytest.param({"min_p": 0.02}, id="min-p"),
    pytest.param({"min_p": 1e-5}, id="min-p beyond the candidates"),
    pytest.param({"top_k": 40, "top_p": 0.6, "min_p": 0.1}, id="all three"),
]


@pytest.mark.parametrize("cut", TRUNCATIONS)
def test_truncation_of_a_large_vocabulary_leaves_what_sorting_all_of_it_would(
    cut: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, u = large_logits(40, spread=1.5), uniforms(40)
    quick = sample(logits, u, params(rows=40, **cut))  # type: ignore[arg-type]
    probabilities = torch.softmax(logits.double(), -1)
    chosen = probabilities.gather(-1, quick.tokens[:, None])
    likelier = (probabilities > chosen).sum(-1)
    before = torch.where(probabilities > chosen, probabilities, 0.0).sum(-1)
    assert (likelier < cut.get("top_k", LARGE)).all()
    assert (before <= cut.get("top_p", 1.0) + 1e-5).all()
    assert (chosen[:, 0] >= cut.get("min_p", 0.0) * probabilities.amax(-1) * (1 - 1e-5)).all()
    monkeypatch.setattr(sampling, "CANDIDATES", LARGE)
    assert sample(logits, u, params(rows=40, **cut)).tokens.tolist() == quick.tokens.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [49, LARGE])
@pytest.mark.parametrize("cut", [pytest.param({}, id="nothing cut"), *TRUNCATIONS])
def test_a_row_is_drawn_to_the_same_bits_whatever_stands_beside_it(vocabulary: int, cut: dict[str, float]) -> None:
    logits, u = large_logits(33)[:, :vocabulary].contiguous(), uniforms(33)
    mixed = {"temperature": 0.7} | cut
    together = sample(logits, u, params(rows=33, **mixed))  # type: ignore[arg-type]
    for rows in (slice(0, 1), slice(4, 6), slice(11, 20), slice(32, 33)):
        count = rows.stop - rows.start
        apart = sample(logits[rows].clone(), u[rows], params(rows=count, **mixed))  # type: ignore[arg-type]
        assert torch.equal(apart.tokens, together.tokens[rows])
        assert torch.equal(apart.logprobs, together.logprobs[rows])


def test_forbidden_tokens_of_a_large_vocabulary_are_not_sampled() -> None:
    logits = torch.zeros(50, LARGE)
    logits[:, 19_999] = 40.0
    forbidden = ForbiddenTokens(torch.arange(0, 50, 2), torch.full((25,), 19_999))
    for temperature in (0.0, 1.0):
        tokens = sample(logits.clone(), uniforms(50), params(temperature, rows=50), forbidden).tokens
        assert (tokens[1::2] == 19_999).all()
        assert (tokens[0::2] != 19_999).all()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_come_best_first_with_their_tempered_log_probabilities(temperature: float) -> None:
    (top,) = top_logprobs(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), [temperature], 3)
    assert [token for _, token in top] == [1, 3, 2]
    expected = reference([0.0, 3.0, 1.0, 2.0], temperature)
    assert [value for value, _ in top] == pytest.approx([expected[1], expected[3], expected[2]], abs=1e-6)
