"""Deterministic decoding: a sample is bitwise equal for any batch, at several widths and on each lane."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_core import EXPERTS, LLAMA_LIKE, Plain, finish, make_core, prompt, save, task

from gcore.engines.request import GenerationRequest, RequestOutput
from gcore.testing.models import make_tiny_model

CHUNK = 24
CHOSEN = [
    task(500, prompt(3, 5), 70, temperature=0.8),
    task(501, prompt(4, 61), 12, top_p=0.8),
    task(502, prompt(5, 1), 3, temperature=0.0),
    # Longer than a chunk: it is read in pieces.
    task(503, prompt(6, 80), 20, top_k=5),
]


def run(folder: Path, others: list[GenerationRequest], late: bool = False, **launch: Any) -> dict[int, RequestOutput]:
    core = make_core(folder, deterministic=True, prefill_chunk_tokens=CHUNK, **launch)
    if not late:
        return finish(core, [*others[::2], *CHOSEN, *others[1::2]])

    def between(cycle: int) -> None:
        if cycle == 9:
            core.submit(CHOSEN)

    return finish(core, others, between)


def others(count: int) -> list[GenerationRequest]:
    return [task(n, prompt(n, 1 + 17 * n % 90), 3 + 11 * n % 60) for n in range(count)]


def same(folder: Path, **launch: Any) -> None:
    """Alone, in a crowd of several sizes, joining late, with few rows, and with so little memory that rows are retracted."""
    expected: dict[int, RequestOutput] = {}
    for one in CHOSEN:
        core = make_core(folder, deterministic=True, prefill_chunk_tokens=CHUNK, **launch)
        expected |= finish(core, [one])
    runs = [
        run(folder, [], **launch),
        run(folder, others(7), **launch),
        run(folder, others(45), **launch),
        run(folder, others(20), late=True, **launch),
        run(folder, others(9), batch_slots=3, **launch),
    ]
    for found in runs:
        for one in CHOSEN:
            assert found[one.number].tokens == expected[one.number].tokens
            assert found[one.number].logprobs == expected[one.number].logprobs
    plain = Plain(folder)
    assert max(plain.worst(one, expected[one.number]) for one in CHOSEN) < 1e-4


@pytest.mark.parametrize("width", [128, *(pytest.param(width, marks=pytest.mark.large) for width in (32, 512, 1024))])
def test_samples_are_equal_to_the_bit_at_width(tmp_path: Path, width: int) -> None:
    folder = make_tiny_model(tmp_path, hidden=width, layers=1 if width > 500 else 2, ends=False)
    core = make_core(folder, deterministic=True)
    assert core.lane.name == "tiled"
    same(folder)


@pytest.mark.parametrize(
    ("make", "lane"),
    [
        pytest.param(
            lambda: transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=16), "tiled", id="gemma2"
        ),
        pytest.param(
            lambda: transformers.GptOssConfig(
                **LLAMA_LIKE, head_dim=8, sliding_window=16, num_local_experts=4, num_experts_per_tok=2
            ),
            "tiled",
            id="gpt-oss: sinks and experts",
            marks=pytest.mark.large,
        ),
        pytest.param(
            lambda: transformers.Qwen3MoeConfig(**LLAMA_LIKE, **EXPERTS), "tiled", id="experts", marks=pytest.mark.large
        ),
        pytest.param(
            lambda: transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=32, vocab_size=49),
            "plain",
            id="bloom",
            marks=pytest.mark.large,
        ),
    ],
)
def test_samples_of_other_models_are_equal_to_the_bit(tmp_path: Path, make: Callable[[], Any], lane: str) -> None:
    folder = save(make(), tmp_path)
    assert make_core(folder, deterministic=True).lane.name == lane
    same(folder)


def test_a_row_that_gave_its_place_back_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden=128, ends=False)
    tasks = [*(task(n, prompt(n, 30), 150) for n in range(40)), *CHOSEN]
    expected = finish(make_core(folder, deterministic=True, prefill_chunk_tokens=CHUNK), tasks)
    # Two tiles as long as the longest do not fit: what stands in the second has to leave.
    core = make_core(folder, deterministic=True, prefill_chunk_tokens=CHUNK, cache_tokens=64 * 128)
    found = finish(core, tasks)
    assert core.retractions > 0
    assert {n: (d.tokens, d.logprobs) for n, d in found.items()} == {
        n: (d.tokens, d.logprobs) for n, d in expected.items()
    }
    assert core.generated_tokens == sum(len(d.tokens) for d in found.values())


def test_a_pause_that_takes_rows_away_changes_no_bit_and_streams_nothing_twice(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, ends=False)
    stream = GenerationRequest(0, "s", prompt(2, 9), task(0, (1,), 40).sampling, streams=True)
    expected = finish(make_core(folder, deterministic=True), [stream])[0]
    core = make_core(folder, deterministic=True)
    core.submit([stream])
    lengths = []
    pauses = {10, 25}
    while core.can_work:
        core.cycle()
        if core.generated_tokens in pauses:
            pauses.remove(core.generated_tokens)
            core.pause("retract")
            core.resume()
        lengths += [len(d.tokens) for d in core.outbox]
        found = core.outbox[-1] if core.outbox else None
        core.outbox.clear()
    assert lengths == list(range(1, 41))
    assert found is not None
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("width", [128, *(pytest.param(width, marks=pytest.mark.large) for width in (32, 512))])
def test_a_prompt_whose_log_probabilities_are_asked_for_changes_no_bit_of_others_that_share_it(
    tmp_path: Path, width: int
) -> None:
    folder = make_tiny_model(tmp_path, hidden=width, layers=1, ends=False)
    lengths = (5, 40, 61)
    plain = [task(length, prompt(1, length), 20, temperature=0.8) for length in lengths]
    judged = [task(100 + length, prompt(1, length), 40, prompt_logprobs_from=0) for length in lengths]
    core = make_core(folder, deterministic=True, prefill_chunk_tokens=CHUNK)

    def between(cycle: int) -> None:
        if cycle == 12:
            assert core.running == len(judged)
            core.submit(plain)

    found = finish(core, judged, between)
    for one in plain:
        alone = finish(make_core(folder, deterministic=True, prefill_chunk_tokens=CHUNK), [one])[one.number]
        assert (found[one.number].tokens, found[one.number].logprobs) == (alone.tokens, alone.logprobs)


def test_matrix_product_rows_do_not_depend_on_their_neighbours() -> None:
    """A row of a matrix product with the tile's rows does not depend on its place or its neighbours, at any width used."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in [(32, 96), (128, 512), (512, 128), (768, 768), (1024, 3072), (3072, 1024), (1024, 5003)]:
        weight = torch.randn(outer, inner, generator=generator)
        rows = torch.randn(32, inner, generator=generator)
        expected = torch.nn.functional.linear(rows, weight)
        order = torch.randperm(32, generator=generator)
        assert torch.equal(torch.nn.functional.linear(rows[order], weight), expected[order])
        strangers = torch.randn(32, inner, generator=generator)
        strangers[17] = rows[3]
        assert torch.equal(torch.nn.functional.linear(strangers, weight)[17], expected[3])
