"""The core of the Hugging Face engine: the same samples as the torch engine, padding, joins, limits and failures."""

from __future__ import annotations

import base64
import hashlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_core import LLAMA_LIKE, SMALL, Plain, finish, make_core, prompt, save, task
from transformers import AutoModelForImageTextToText

from gcore.engines.hf.engine import HfCore, start_engine
from gcore.engines.launch import EngineLaunch
from gcore.engines.request import GenerationRequest
from gcore.errors import DataError, UsageError
from gcore.models.vision import PictureProcessor, media_token_ids, picture_arguments
from gcore.testing.models import make_tiny_model
from gcore.testing.vision_models import FAMILIES, IMAGE, Family, make_picture, make_tiny_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), ends=False)


def make_hf_core(folder: Path, **launch: Any) -> HfCore:
    return start_engine(EngineLaunch(model=str(folder), device="cpu", **launch), None)


def mixed_tasks() -> list[GenerationRequest]:
    return [
        task(0, prompt(0, 3), 12),
        task(1, prompt(1, 9), 6, temperature=0.7, top_k=5, top_p=0.9),
        task(2, prompt(2, 1), 12, temperature=0.0, prompt_logprobs_from=0),
        task(3, prompt(3, 20), 9, min_p=0.1, stop_token_ids=(7, 11), min_new_tokens=3),
        task(4, prompt(4, 5), 5, top_logprobs=2, named_tokens=(3, 9), prompt_logprobs_from=2),
    ]


def test_samples_equal_those_of_the_torch_engine(folder: Path) -> None:
    expected = finish(make_core(folder), mixed_tasks())
    for slots in (8, 2):
        made = finish(make_hf_core(folder, batch_slots=slots), mixed_tasks())
        for number, one in expected.items():
            other = made[number]
            assert other.tokens == one.tokens
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)
            assert (other.ending, other.spans, other.retractions) == (one.ending, one.spans, 0)
            assert [[token for _, token in top] for top in other.tops] == [
                [token for _, token in top] for top in one.tops
            ]
            assert (other.prompt_logprobs is None) == (one.prompt_logprobs is None)
            if other.prompt_logprobs is not None and one.prompt_logprobs is not None:
                assert other.prompt_logprobs.start == one.prompt_logprobs.start
                assert other.prompt_logprobs.values[1:] == pytest.approx(one.prompt_logprobs.values[1:], abs=1e-5)


def test_a_row_that_joins_later_leaves_the_samples_of_the_others_unchanged(folder: Path) -> None:
    core, tasks = make_hf_core(folder), mixed_tasks()
    alone = finish(make_hf_core(folder), tasks)
    late = finish(core, tasks[:2], lambda cycle: core.submit(tasks[2:]) if cycle == 3 else None)
    assert {n: one.tokens for n, one in late.items()} == {n: one.tokens for n, one in alone.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_to_pictures_have_the_log_probabilities_of_a_full_forward_pass(
    tmp_path: Path, family: Family
) -> None:
    core = make_hf_core(make_tiny_vision_model(tmp_path, family, seed=1))
    assert core.takes_pictures
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    processor, media = PictureProcessor(tmp_path), list(media_token_ids(plain.config))
    tasks = []
    for number, seeds in enumerate(((), (1,), (2, 1))):
        pictures = [make_picture(32, 32, seed=seed) for seed in seeds]
        read = core.read_pictures([base64.b64encode(one).decode() for one in pictures])
        ids, placed = core.place_pictures([5, *(token for _ in seeds for token in (IMAGE, 7)), 9 - number], read)
        tasks.append(replace(task(number, ids, 6, temperature=1.0), pictures=placed))
    for number, made in finish(core, tasks).items():
        prompt_ids, placed = tasks[number].prompt, tasks[number].pictures
        tokens = torch.tensor([[*prompt_ids, *made.tokens]])
        more: dict[str, Any] = {}
        if placed is not None:
            names = [make_picture(32, 32, seed=seed) for seed in ((), (1,), (2, 1))[number]]
            read = [processor.read(hashlib.sha256(one).hexdigest(), one) for one in names]
            more = picture_arguments(read, torch.device("cpu"))
            for name in ("mm_token_type_ids", "token_type_ids"):
                if name in inspect.signature(plain.forward).parameters:
                    more[name] = (tokens == IMAGE).long()
        with torch.inference_mode():
            logits = plain(input_ids=tokens, use_cache=False, **more).logits[0]
            logits[:, media] = -torch.inf
        table = torch.log_softmax(logits, -1)[len(prompt_ids) - 1 : -1]
        expected = table.gather(-1, torch.tensor(made.tokens)[:, None])[:, 0]
        assert made.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("config", "pads"),
    [
        pytest.param(transformers.GPT2Config(**SMALL, n_embd=32, n_head=4, n_positions=64), True, id="learned positions"),
        pytest.param(transformers.MambaConfig(**SMALL, hidden_size=32, state_size=4), True, id="a state"),
        pytest.param(transformers.RwkvConfig(**SMALL, hidden_size=32, context_length=64), False, id="no mask"),
    ],
)  # fmt: skip
def test_log_probabilities_of_any_architecture_are_those_of_a_full_forward_pass(
    tmp_path: Path, config: Any, pads: bool
) -> None:
    core, plain = make_hf_core(save(config, tmp_path)), Plain(tmp_path)
    assert core.rows == (256 if pads else 1)
    tasks = [task(n, prompt(n, 1 + 4 * n), 6) for n in range(3)]
    for number, made in finish(core, tasks).items():
        assert plain.worst(tasks[number], made) < 1e-4


def test_rows_share_the_tokens_of_the_cache(folder: Path) -> None:
    core = make_hf_core(folder, cache_tokens=40)
    running: list[int] = []
    done = finish(core, [task(n, prompt(n, 4), 10) for n in range(5)], lambda cycle: running.append(core.running))
    assert len(done) == 5
    assert max(running) == 2  # three rows of 14 tokens would need 42


def test_weights_that_damage_the_output_end_samples_with_an_explanation(folder: Path) -> None:
    core = make_hf_core(folder)
    with torch.no_grad():
        core.model.module.model.norm.weight.fill_(float("nan"))
    (made,) = finish(core, [task(0, prompt(0, 3), 5)]).values()
    assert made.ending is not None
    assert (made.ending.kind, made.tokens) == ("abort", ())
    assert "not finite" in str(made.ending.message)


def test_an_error_of_the_model_reaches_the_cycle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_hf_core(folder)
    monkeypatch.setattr(core.model.module, "forward", lambda **_: [][0])
    core.submit([task(0, prompt(0, 3), 5)])
    with pytest.raises(IndexError):
        core.cycle()


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"task": "classify"}, r"task: .*no classifiers.*rollout\.engine: torch"),
        ({"deterministic": True}, "no deterministic"),
        ({"cache_tokens": 1}, r"a cache of 1 tokens is too small.*rollout\.cache_tokens"),
    ],
)
def test_unsupported_launch_settings_are_refused_at_the_start(folder: Path, launch: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_hf_core(folder, **launch)


def test_a_model_that_cannot_generate_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(transformers.LlamaConfig(**LLAMA_LIKE), tmp_path)

    def generate(*_: Any, **__: Any) -> None:
        raise ValueError("no cache\nat all")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    with pytest.raises(DataError, match=r"transformers cannot generate with this model \(no cache at all\)"):
        make_hf_core(folder)
