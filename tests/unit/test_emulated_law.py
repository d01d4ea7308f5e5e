"""The law of emulated devices: times that scale, paces that differ and stay hidden, responses that are functions of seeds."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.emulated.launch import LAW_FILE, is_emulated
from gcore.emulated.law import Law, Timing
from gcore.emulated.law_file import read_law
from gcore.emulated.responses import Vocabulary, respond
from gcore.errors import UsageError
from gcore.rollout.engine.tasks import Sampling

WORDS = Vocabulary(size=20, ordinary=tuple(range(3, 20)), end_tokens=(1,), context=512)


def sampling(seed: int, most: int = 64, **more: object) -> Sampling:
    return Sampling(**({"max_new_tokens": most, "seed": seed, "stop_token_ids": (1,)} | more))  # type: ignore[arg-type]


def test_replicas_have_paces_of_their_own_which_last() -> None:
    law = Law(event_noise=0.0, replica_noise=0.3)
    first, other = (Timing(law, name).decode_step(1) for name in ("a", "b"))
    assert first != other
    timing = Timing(law, "a")
    assert [timing.decode_step(1) for _ in range(3)] == [first] * 3


def test_noise_has_the_mean_one() -> None:
    law = Law(event_noise=0.2, replica_noise=0.0, publish_s=1.0)
    timing = Timing(law, "a")
    assert statistics.mean(timing.publish() for _ in range(4000)) == pytest.approx(1.0, abs=0.02)


def test_without_noise_the_numbers_are_the_laws() -> None:
    law = Law(event_noise=0.0, replica_noise=0.0)
    timing = Timing(law, "a")
    assert timing.decode_step(9) == pytest.approx(law.decode_s + 8 * law.decode_per_sequence_s)
    assert timing.prefill(100) == pytest.approx(100 / law.prefill_tokens_per_s)
    assert timing.train(500) == pytest.approx(law.train_s + 500 / law.train_tokens_per_s)
    assert (timing.load(), timing.sleep(), timing.wake(), timing.save()) == pytest.approx(
        (law.load_s, law.sleep_s, law.wake_s, law.save_s)
    )


@given(seed=st.integers(0, 2**64 - 1), most=st.integers(1, 80), least=st.integers(0, 80), ends=st.booleans())
def test_a_response_fits_what_was_asked_for(seed: int, most: int, least: int, ends: bool) -> None:
    asked = sampling(seed, most, min_new_tokens=min(least, most), stop_token_ids=(1,) if ends else ())
    response = respond(Law(), WORDS, b"p", asked, "0.0")
    assert min(least, most) <= len(response.tokens) <= most
    assert len(response.logprobs) == len(response.tokens) >= 1
    assert all(value <= 0 and np.isfinite(value) for value in response.logprobs)
    stopped = response.ending.kind == "stop"
    assert stopped == (1 in response.tokens)
    assert stopped or len(response.tokens) == most
    assert response == respond(Law(), WORDS, b"p", asked, "0.3")


def test_other_seeds_and_other_prompts_are_answered_otherwise() -> None:
    one = respond(Law(), WORDS, b"p", sampling(1), "0.0")
    assert one != respond(Law(), WORDS, b"p", sampling(2), "0.0")
    assert one != respond(Law(), WORDS, b"q", sampling(1), "0.0")


def test_a_greedy_response_follows_the_weights_and_no_seed() -> None:
    greedy = [
        respond(Law(), WORDS, b"p", sampling(s, temperature=0.0), v) for s, v in ((1, "0.0"), (2, "0.0"), (1, "0.1"))
    ]
    assert greedy[0] == greedy[1] != greedy[2]


def test_responses_to_one_prompt_are_alike_in_length_as_far_as_the_law_says() -> None:
    law = Law(response_likeness=0.7, response_tokens=200, response_spread=0.5)

    def logs(prompt: int, seed: int) -> float:
        return float(np.log(len(respond(law, WORDS, str(prompt).encode(), sampling(seed, 100_000), "0.0").tokens)))

    pairs = np.array([(logs(p, 0), logs(p, 1)) for p in range(800)])
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(0.7, abs=0.08)
    assert float(np.exp(np.median(pairs))) == pytest.approx(200, rel=0.1)


def test_the_law_is_the_files_that_the_environment_names(tmp_path: Path) -> None:
    file = tmp_path / "law.json"
    file.write_text('{"speedup": 4.0}')
    assert read_law({LAW_FILE: str(file)}) == Law(speedup=4.0)
    assert read_law({}) == Law()


@pytest.mark.parametrize("text", ["{", '{"speedup": 0}', '{"sped": 1}'], ids=["no JSON", "impossible", "misspelt"])
def test_a_file_that_holds_no_law_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "law.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=str(file)):
        read_law({LAW_FILE: str(file)})
    with pytest.raises(UsageError, match="cannot be read"):
        read_law({LAW_FILE: str(tmp_path / "none.json")})


def test_only_emulated_slots_are() -> None:
    assert is_emulated("emulated:3")
    assert not any(map(is_emulated, ("cpu:0", "cuda:0")))
