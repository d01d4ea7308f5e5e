"""The engine's core in this process: a sample does not depend on other requests; memory, prompts, weights."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_core import Plain, finish, make_core, prompt, task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcore.engines.request import GenerationRequest, RequestOutput
from gcore.engines.torch.engine import EngineCore
from gcore.engines.torch.model import stage_weights
from gcore.engines.torch.model_runner import FastRunner
from gcore.errors import EngineError
from gcore.testing.models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=2048, ends=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), context=2048, ends=False, seed=1)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain(folder)


CHOSEN = task(500, prompt(3, 21), 90, seed=77, temperature=0.8)


def crowd(count: int) -> list[GenerationRequest]:
    return [task(n, prompt(n, 1 + 13 * n % 70), 5 + 29 * n % 120) for n in range(count)]


def alone(folder: Path) -> RequestOutput:
    return finish(make_core(folder), [CHOSEN])[500]


def in_a_crowd(folder: Path) -> RequestOutput:
    return finish(make_core(folder), [*crowd(9), CHOSEN, *(task(600 + n, CHOSEN.prompt, 30) for n in range(3))])[500]


def joining_late(folder: Path) -> RequestOutput:
    core = make_core(folder)

    def between(cycle: int) -> None:
        if cycle == 40:
            core.submit([CHOSEN])

    return finish(core, crowd(9), between)[500]


def with_few_rows(folder: Path) -> RequestOutput:
    """Rows come and go all the time, and the table moves."""
    return finish(make_core(folder, batch_slots=3), [*crowd(30), CHOSEN, *(task(700 + n, (5,), 90) for n in range(9))])[
        500
    ]


def retracted(folder: Path) -> RequestOutput:
    core = make_core(folder, cache_tokens=900, prefill_chunk_tokens=16)
    delivery = finish(core, [*(task(n, prompt(n, 30), 200) for n in range(5)), CHOSEN])[500]
    assert delivery.retractions > 0
    return delivery


def paused_and_retracted(folder: Path) -> RequestOutput:
    core = make_core(folder)

    def between(cycle: int) -> None:
        if cycle % 20 == 0:
            core.pause("retract")
            core.resume()

    return finish(core, [*crowd(4), CHOSEN], between)[500]


@pytest.mark.parametrize(
    "run", [in_a_crowd, joining_late, with_few_rows, retracted, paused_and_retracted], ids=lambda run: run.__name__
)
def test_a_sample_is_the_same_whatever_goes_on_beside_it(
    folder: Path, plain: Plain, run: Callable[[Path], RequestOutput]
) -> None:
    expected, found = alone(folder), run(folder)
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert plain.worst(CHOSEN, found) < 1e-4


def cells(core: EngineCore) -> int:
    assert isinstance(core.lane, FastRunner)
    return core.lane.cache.rows * core.lane.cache.columns


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 120), st.integers(0, 6)), min_size=1, max_size=25),
    st.sampled_from([350, 600, 1500]),
    st.integers(1, 7),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_cache_stays_within_its_bound_and_every_request_is_answered_in_full(
    folder: Path, plain: Plain, requests: list[tuple[int, int, int]], budget: int, slots: int
) -> None:
    core = make_core(folder, cache_tokens=budget, batch_slots=slots, prefill_chunk_tokens=24)
    pending = [(task(n, prompt(n, length), limit), pause) for n, (length, limit, pause) in enumerate(requests)]
    tasks = [one for one, _ in pending]
    done: dict[int, RequestOutput] = {}
    waiting = iter(pending)
    pause = 0
    following = next(waiting, None)
    while following is not None or core.can_work:
        if following is not None and pause == 0:
            core.check(len(following[0].prompt), following[0].sampling.max_new_tokens)
            core.submit([following[0]])
            pause = following[1]
            following = next(waiting, None)
        pause = max(0, pause - 1)
        if core.can_work:
            core.cycle()
        assert cells(core) <= budget
        assert core.running <= slots
    done = {d.number: d for d in core.outbox}
    assert [len(done[one.number].tokens) for one in tasks] == [one.sampling.max_new_tokens for one in tasks]
    sampled = tasks[len(tasks) // 2]
    assert plain.worst(sampled, done[sampled.number]) < 1e-4


def test_rows_that_outgrow_the_cache_give_their_place_back_and_lose_nothing(folder: Path) -> None:
    tasks = [task(n, prompt(n, 20), 150) for n in range(8)]
    expected = finish(make_core(folder), tasks)
    core = make_core(folder, cache_tokens=700)
    found = finish(core, tasks)
    assert core.retractions > 0
    assert {n: d.tokens for n, d in found.items()} == {n: d.tokens for n, d in expected.items()}
    # The oldest never left.
    assert found[0].retractions == 0


def test_requests_wait_while_the_cache_is_full(folder: Path) -> None:
    core = make_core(folder, cache_tokens=400)
    core.submit([task(n, prompt(n, 100), 20) for n in range(6)])
    core.cycle()
    assert core.running == 2
    assert core.waiting == 4
    assert len(finish(core, [])) == 6


def test_a_request_that_could_never_fit_is_refused_at_once(folder: Path) -> None:
    core = make_core(folder, cache_tokens=400)
    core.check(300, 60)
    with pytest.raises(
        EngineError, match=r"prompt of 300 tokens and max_new_tokens 90 exceed the 368 .*rollout.cache_tokens"
    ):
        core.check(300, 90)


def test_a_long_prompt_is_read_between_the_tokens_of_those_that_run(folder: Path, plain: Plain) -> None:
    core = make_core(folder, prefill_chunk_tokens=32)
    core.submit([task(0, prompt(0, 5), 200)])
    core.cycle()
    long = task(1, prompt(1, 700), 4)
    core.submit([long])
    made = []
    while core.waiting:
        before = core.generated_tokens
        core.cycle()
        made.append(core.generated_tokens - before)
    # 700 tokens in portions of 32; in each cycle the other had its token.
    assert len(made) == 22
    assert all(tokens == 1 for tokens in made[:-1])
    assert plain.worst(long, finish(core, [])[1]) < 1e-4


def test_a_short_prompt_does_not_pass_a_long_one_that_is_being_read(folder: Path) -> None:
    core = make_core(folder, prefill_chunk_tokens=32)
    core.submit([task(0, prompt(0, 5), 100)])
    core.cycle()
    core.submit([task(1, prompt(1, 200), 1), task(2, prompt(2, 3), 1)])
    ended: dict[int, int] = {}
    for cycle in range(10):
        core.cycle()
        ended |= {d.number: cycle for d in core.outbox}
        core.outbox.clear()
    assert ended[1] <= ended[2]


class Counted:
    """How many forward passes a core makes, and over how many tokens."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        forward = core.model.forward

        def counted(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            self.shapes.append(tuple(ids.shape))
            return forward(ids, *rest, **more)

        monkeypatch.setattr(type(core.model), "forward", lambda model, *rest, **more: counted(*rest, **more))


def test_a_burst_of_short_prompts_is_read_in_one_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(folder)
    counted = Counted(core, monkeypatch)
    core.submit([task(n, prompt(n, 8), 2) for n in range(40)])
    core.cycle()
    assert counted.shapes == [(40, 8), (40, 1)]


def test_samples_of_one_prompt_have_it_read_once_and_tell_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(folder, batch_slots=4)
    counted = Counted(core, monkeypatch)
    lengths = {0: 9, 1: 30, 2: 9, 3: 9, 4: 9, 5: 9}
    done = finish(core, [task(n, prompt(1, 40), limit) for n, limit in lengths.items()])
    assert [shape for shape in counted.shapes if shape[1] > 1] == [(1, 40)]
    # One had it computed; those that joined with it or after it got it from there.
    assert [done[n].cached_tokens for n in range(6)] == [0, 40, 40, 40, 40, 40]
    assert len({d.tokens[:9] for d in done.values()}) == 6


def test_a_prompt_that_nobody_has_any_more_is_read_again_and_told_as_not_cached(folder: Path) -> None:
    core = make_core(folder)
    first = finish(core, [task(0, prompt(1, 40), 5)])[0]
    again = finish(core, [task(0, prompt(1, 40), 5)])[0]
    assert again.tokens == first.tokens
    assert first.cached_tokens == again.cached_tokens == 0


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_likeliest_and_named_tokens_are_told_for_each_token_made(
    folder: Path, plain: Plain, temperature: float
) -> None:
    one = task(0, prompt(2, 7), 12, temperature=temperature, top_logprobs=3, named_tokens=(8, 20))
    done = finish(make_core(folder, batch_slots=2), [task(1, (4,), 30), one, task(2, (4,), 30)])[0]
    table = plain.table([*one.prompt, *done.tokens], temperature)[len(one.prompt) - 1 : -1]
    assert len(done.tops) == len(done.named) == 12
    for row, top, named in zip(table, done.tops, done.named, strict=True):
        assert [v for v, _ in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
        assert [float(row[token]) for _, token in top] == pytest.approx([v for v, _ in top], abs=1e-5)
        assert named == pytest.approx([float(row[8]), float(row[20])], abs=1e-5)


def test_requests_without_top_logprobs_get_none(folder: Path) -> None:
    done = finish(make_core(folder), [task(0, (5, 6), 4), task(1, (5, 6), 4, top_logprobs=1)])
    assert done[0].tops == done[0].named == ()
    assert done[0].prompt_logprobs is None
    assert len(done[1].tops) == 4


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused in place"])
def test_new_weights_make_the_following_tokens_and_leave_the_cache_of_the_old_ones(
    folder: Path, other: Path, paused: bool
) -> None:
    core = make_core(folder)
    one = task(0, prompt(4, 10), 30)
    change = 12

    def between(cycle: int) -> None:
        if cycle == change:
            if paused:
                core.pause("in_place")
            core.change_weights(stage_weights(core.model, other), "0.1", flush=False, abort=False)
            core.resume()

    done = finish(core, [one, *(task(n, prompt(n, 9), 40) for n in range(1, 4))], between)[0]
    assert [(s.version, s.start, s.end) for s in done.spans] == [("0.0", 0, 13), ("0.1", 13, 30)]
    # The same by hand: the old weights' keys and values of all but the last token, then the new weights.
    old, new = Plain(folder).model, Plain(other).model
    known = [*one.prompt, *done.tokens[:13]]
    with torch.inference_mode():
        past = old(torch.tensor([known[:-1]]), use_cache=True).past_key_values
        for token, following, logprob in zip(
            [known[-1], *done.tokens[13:-1]], done.tokens[13:], done.logprobs[13:], strict=True
        ):
            out = new(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            assert float(torch.log_softmax(out.logits[0, -1], -1)[following]) == pytest.approx(logprob, abs=1e-4)


def test_a_change_of_weights_with_flush_makes_the_cache_anew(folder: Path, other: Path) -> None:
    core = make_core(folder, prefill_chunk_tokens=16)
    one, long = task(0, prompt(4, 10), 30), task(1, prompt(5, 200), 5)
    core.submit([one])
    for _ in range(6):
        core.cycle()
    core.submit([long])
    for _ in range(6):
        core.cycle()
    assert core.waiting == 1
    core.change_weights(stage_weights(core.model, other), "0.1", flush=True, abort=False)
    done = finish(core, [])
    plain = Plain(other)
    assert plain.worst(long, done[1]) < 1e-4
    (_, span) = done[0].spans
    table = plain.table([*one.prompt, *done[0].tokens])[len(one.prompt) - 1 : -1]
    expected = table.gather(-1, torch.tensor(done[0].tokens)[:, None])[span.start :, 0]
    assert expected.tolist() == pytest.approx(done[0].logprobs[span.start :], abs=1e-4)


def test_a_prompt_that_the_old_weights_began_is_not_given_to_later_samples(folder: Path, other: Path) -> None:
    core = make_core(folder, prefill_chunk_tokens=16)
    core.submit([task(0, (3,), 60)])
    core.cycle()
    core.submit([task(1, prompt(5, 100), 40)])
    for _ in range(3):
        core.cycle()
    core.change_weights(stage_weights(core.model, other), "0.1", flush=False, abort=False)
    while core.waiting:
        core.cycle()
    later = task(2, prompt(5, 100), 5)
    done = finish(core, [later])
    assert done[2].cached_tokens == 0
    assert Plain(other).worst(later, done[2]) < 1e-4


def test_an_abort_reaches_what_runs_what_is_being_read_and_what_waits(folder: Path) -> None:
    core = make_core(folder, batch_slots=2, prefill_chunk_tokens=16)
    core.submit([task(0, (3, 4), 50)])
    core.cycle()
    core.submit([task(1, prompt(1, 90), 5), task(2, (5,), 5), task(3, (6,), 5)])
    core.cycle()
    core.abort(lambda one: one.number in (0, 1, 3))
    ended = {d.number: d for d in core.outbox}
    assert {d.ending.kind for d in ended.values() if d.ending} == {"abort"}
    assert len(ended[0].tokens) == 3
    assert ended[1].tokens == ended[3].tokens == ()
    core.outbox.clear()
    assert list(finish(core, [])) == [2]


def test_weights_that_become_nonsense_end_samples_with_a_reason_and_harm_no_later_ones(
    folder: Path, plain: Plain
) -> None:
    core = make_core(folder, batch_slots=2)
    good = stage_weights(core.model, folder)
    core.submit([task(n, (3, 4), 50) for n in range(3)])
    for _ in range(5):
        core.cycle()
    with torch.no_grad():
        core.model.module.get_input_embeddings().weight.fill_(float("nan"))
    done = finish(core, [])
    assert len(done) == 3
    for delivery in done.values():
        assert delivery.ending is not None
        assert delivery.ending.kind == "abort"
        assert "not finite" in str(delivery.ending.message)
        assert len(delivery.tokens) == len(delivery.logprobs)
        assert all(logprob == logprob for logprob in delivery.logprobs)
    core.change_weights(good, None, flush=False, abort=False)
    after = [task(n, prompt(n, 3 + n), 30) for n in range(5)]
    done = finish(core, after)
    assert max(plain.worst(one, done[one.number]) for one in after) < 1e-4


def test_many_sets_of_stop_strings_are_forgotten_again(tmp_path: Path) -> None:
    from gcore.engines.detokenizer import Detokenizer
    from gcore.engines.launch import EngineLaunch
    from gcore.engines.torch.scheduler import MOST_STOP_SETS
    from gcore.engines.torch.server import start_engine

    folder = make_tiny_model(tmp_path, ends=False)
    text = Detokenizer.load(folder)
    core = start_engine(EngineLaunch(model=str(folder), device="cpu", batch_slots=4), text)
    free = finish(core, [task(0, (5, 6), 40)])[0].tokens
    assert text is not None
    stops = itertools.product("abcdefghijklmnop0123456789", repeat=2)
    tasks = [task(n, (5, 6), 40, seed=0, stop=("".join(next(stops)),)) for n in range(200)]
    done = finish(core, tasks)
    for one in tasks:
        (stop,) = one.sampling.stop
        whole = text.decode(free, skip_special_tokens=False)
        ended = done[one.number].ending
        assert ended is not None
        assert (ended.matched == stop) == (stop in whole)
    assert core._decoder.rows._suspect_tokens.shape[0] <= MOST_STOP_SETS + 5


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), id="cuda"),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
            id="cpu",
        ),
        pytest.param(MemoryError("Unable to allocate 9 TiB for an array"), id="numpy"),
    ],
)
@pytest.mark.parametrize("when", ["read", "step"])
def test_memory_that_runs_out_ends_in_a_sentence_that_names_what_to_lower(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, when: str
) -> None:
    core = make_core(folder)
    core.submit([task(0, (3, 4), 5)])

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(core.lane, when, fail)
    with pytest.raises(EngineError) as caught:
        core.cycle()
    for name in ("rollout.cache_tokens", "rollout.batch_slots", "rollout.prefill_chunk_tokens"):
        assert name in str(caught.value)


def test_a_defect_is_not_taken_for_a_lack_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(folder)
    core.submit([task(0, (3, 4), 5)])

    def fail(*_: object) -> None:
        raise RuntimeError("The size of tensor a must match the size of tensor b")

    monkeypatch.setattr(core.lane, "step", fail)
    with pytest.raises(RuntimeError, match="size of tensor"):
        core.cycle()
