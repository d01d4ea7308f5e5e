"""The timing model of emulated devices: scaled times, hidden differences in speed, responses that are functions of seeds."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.engines.emulated.launch import LAW_FILE, is_emulated
from gcore.engines.emulated.law import ReplicaTiming, TimingModel, read_timing_model
from gcore.engines.emulated.responses import HEAD, EmulatedVerdict, ResponseModel, Vocabulary, make_response
from gcore.engines.request import RequestSampling
from gcore.errors import UsageError

WORDS = Vocabulary(size=20, ordinary=tuple(range(3, 20)), end_tokens=(1,), context=512)
MANY = Vocabulary(size=1000, ordinary=tuple(range(3, 1000)), end_tokens=(1,), context=4096)
VOICE, PROMPT = ResponseModel(TimingModel(), WORDS), (3, 4, 5)


def sampling(seed: int, most: int = 64, **more: object) -> RequestSampling:
    return RequestSampling(**({"max_new_tokens": most, "seed": seed, "stop_token_ids": (1,)} | more))  # type: ignore[arg-type]


def test_replicas_have_paces_of_their_own_which_last() -> None:
    law = TimingModel(event_noise=0.0, replica_noise=0.3)
    first, other = (ReplicaTiming(law, name).decode_step(1) for name in ("a", "b"))
    assert first != other
    timing = ReplicaTiming(law, "a")
    assert [timing.decode_step(1) for _ in range(3)] == [first] * 3


def test_noise_has_the_mean_one() -> None:
    law = TimingModel(event_noise=0.2, replica_noise=0.0, publish_s=1.0)
    timing = ReplicaTiming(law, "a")
    assert statistics.mean(timing.publish() for _ in range(4000)) == pytest.approx(1.0, abs=0.02)


def test_without_noise_the_numbers_are_the_laws() -> None:
    law = TimingModel(event_noise=0.0, replica_noise=0.0)
    timing = ReplicaTiming(law, "a")
    assert timing.decode_step(9) == pytest.approx(law.decode_s + 8 * law.decode_per_sequence_s)
    assert timing.prefill(100) == pytest.approx(100 / law.prefill_tokens_per_s)
    assert timing.train(500) == pytest.approx(law.train_s + 500 / law.train_tokens_per_s)
    assert (timing.load(), timing.sleep(), timing.wake(), timing.save()) == pytest.approx(
        (law.load_s, law.sleep_s, law.wake_s, law.save_s)
    )


@given(seed=st.integers(0, 2**64 - 1), most=st.integers(1, 80), least=st.integers(0, 80), ends=st.booleans())
def test_a_response_fits_what_was_asked_for(seed: int, most: int, least: int, ends: bool) -> None:
    asked = sampling(seed, most, min_new_tokens=min(least, most), stop_token_ids=(1,) if ends else ())
    response = make_response(VOICE, PROMPT, asked, "0.0")
    assert min(least, most) <= len(response.tokens) <= most
    assert len(response.logprobs) == len(response.tokens) >= 1
    assert all(value <= 0 and np.isfinite(value) for value in response.logprobs)
    stopped = response.ending.kind == "stop"
    assert stopped == (1 in response.tokens)
    assert stopped or len(response.tokens) == most
    assert response == make_response(VOICE, PROMPT, asked, "0.3")


def test_other_seeds_and_other_prompts_are_answered_otherwise() -> None:
    one = make_response(VOICE, PROMPT, sampling(1), "0.0")
    assert one != make_response(VOICE, PROMPT, sampling(2), "0.0")
    assert one != make_response(VOICE, (5, 6, 7), sampling(1), "0.0")


def test_a_greedy_response_follows_the_weights_and_no_seed() -> None:
    greedy = [
        make_response(VOICE, PROMPT, sampling(s, temperature=0.0), v) for s, v in ((1, "0.0"), (2, "0.0"), (1, "0.1"))
    ]
    assert greedy[0] == greedy[1] != greedy[2]


def test_responses_to_one_prompt_are_alike_in_length_as_far_as_the_law_says() -> None:
    voice = ResponseModel(TimingModel(response_likeness=0.7, response_tokens=200, response_spread=0.5), MANY)

    def logs(prompt: int, seed: int) -> float:
        return float(np.log(len(make_response(voice, (prompt,), sampling(seed, 100_000), "0.0").tokens)))

    pairs = np.array([(logs(p, 0), logs(p, 1)) for p in range(800)])
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(0.7, abs=0.08)
    assert float(np.exp(np.median(pairs))) == pytest.approx(200, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), again=st.integers(0, 2**64 - 1), share=st.floats(0, 1), judge=st.booleans())
def test_an_engine_that_goes_on_behind_what_another_made_ends_it_where_the_other_would_have(
    seed: int, again: int, share: float, judge: bool
) -> None:
    longest = 300
    verdict = EmulatedVerdict((500, 501), (502, 503, 504)) if judge else None
    voice = ResponseModel(TimingModel(response_tokens=60, judge_response_tokens=60), MANY, longest, verdict)
    whole = make_response(voice, PROMPT, sampling(seed, longest), "0.3", step=3)
    made = min(max(HEAD, round(share * len(whole.tokens))), len(whole.tokens) - 1)
    rest = make_response(voice, (*PROMPT, *whole.tokens[:made]), sampling(again, longest - made), "0.3", step=3)
    assert made + len(rest.tokens) == len(whole.tokens)
    assert rest.ending.kind == whole.ending.kind
    if judge and made < len(whole.tokens) - 5:
        assert rest.tokens[-3:] == whole.tokens[-3:]


def test_a_prompt_that_only_looks_as_if_it_had_been_begun_is_a_prompt() -> None:
    """Half of the job's longest response is asked for, and the prompt's second half is not what an engine made."""
    voice, prompt = ResponseModel(TimingModel(response_tokens=60, response_spread=0.1), MANY, 100), tuple(range(5, 105))
    lengths = [len(make_response(voice, prompt, sampling(seed, 50), "0.0").tokens) for seed in range(200)]
    assert statistics.median(lengths) > 40


def test_responses_get_longer_by_the_step_and_jump_where_the_law_says() -> None:
    law = TimingModel(response_tokens=100, response_growth=1.1, response_jump_at=4, response_jump=3.0)
    voice = ResponseModel(law, MANY)

    def median(step: int) -> float:
        found = (len(make_response(voice, (n,), sampling(n, 100_000), "0.0", step).tokens) for n in range(600))
        return float(statistics.median(found))

    assert median(0) == pytest.approx(100, rel=0.12)
    assert median(3) / median(0) == pytest.approx(1.1**3, rel=0.02)
    assert median(4) / median(3) == pytest.approx(3.3, rel=0.02)
    assert law.of_policy.lengths.median_at(10**9) > 1e20  # and is a number


def test_judges_become_slow_at_the_step_that_the_law_names_and_others_do_not() -> None:
    law = TimingModel(event_noise=0.0, replica_noise=0.0, judge_decode_s=0.5, judge_slow_at=2, judge_slow=4.0)
    judge, policy = ReplicaTiming(law, "a", law.of_judges), ReplicaTiming(law, "b")
    before = policy.decode_step(1)
    assert (judge.decode_step(1), judge.decode_step(1)) == pytest.approx((0.5, 0.5))
    judge.step = policy.step = 2
    assert (judge.decode_step(1), policy.decode_step(1)) == pytest.approx((2.0, before))
    assert law.judges_change
    assert not TimingModel().judges_change


@settings(max_examples=6, deadline=None)
@given(share=st.sampled_from([0.0, 0.3, 1.0]), end=st.booleans())
def test_a_judges_answers_end_with_a_verdict_and_as_many_are_the_best_as_the_law_says(share: float, end: bool) -> None:
    verdict = EmulatedVerdict(best=(500, 501), worst=(502,))
    voice = ResponseModel(TimingModel(judge_positive=share), MANY, 200, verdict)
    asked = sampling(1, 200, temperature=0.0, stop_token_ids=(1,) if end else ())
    answers = [make_response(voice, (number, 9), asked, "0.0").tokens for number in range(3, 150)]
    told = [answer[:-1] if end else answer for answer in answers]
    best = [answer[-2:] == verdict.best for answer in told]
    assert all(good or answer[-1:] == verdict.worst for answer, good in zip(told, best, strict=True))
    assert statistics.mean(best) == pytest.approx(share, abs=0.1)
    assert answers == [make_response(voice, (number, 9), asked, "0.0").tokens for number in range(3, 150)]


def test_the_law_is_the_files_that_the_environment_names(tmp_path: Path) -> None:
    file = tmp_path / "law.json"
    file.write_text('{"speedup": 4.0}')
    assert read_timing_model({LAW_FILE: str(file)}) == TimingModel(speedup=4.0)
    assert read_timing_model({}) == TimingModel()


@pytest.mark.parametrize("text", ["{", '{"speedup": 0}', '{"sped": 1}'], ids=["no JSON", "impossible", "misspelt"])
def test_a_file_that_holds_no_law_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "law.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=str(file)):
        read_timing_model({LAW_FILE: str(file)})
    with pytest.raises(UsageError, match="cannot read"):
        read_timing_model({LAW_FILE: str(tmp_path / "none.json")})


def test_only_emulated_slots_are() -> None:
    assert is_emulated("emulated:3")
    assert not any(map(is_emulated, ("cpu:0", "cuda:0")))


@pytest.mark.parametrize(("slots", "gain", "times"), [(1, 0.8, 1.0), (4, 0.5, 2.0), (2, 1.0, 2.0), (8, 0.0, 1.0)])
def test_an_engine_over_several_slots_is_faster_by_the_laws_own_scale(slots: int, gain: float, times: float) -> None:
    law = TimingModel(replica_noise=0, event_noise=0, span_gain=gain)
    one, wide = ReplicaTiming(law, "a"), ReplicaTiming(law, "a", slots=slots)
    assert one.decode_step(5) == pytest.approx(times * wide.decode_step(5))
    assert one.prefill(100) == pytest.approx(times * wide.prefill(100))
    assert one.publish() == wide.publish(), "what is copied takes as long"
