"""The critic: the inputs of each value, the targets, the initial weights, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from ready_seals import ready_seal
from safetensors.torch import load_file, save_file

from gcore.config.train import TrainSpec
from gcore.errors import DataError, GcoreError
from gcore.ledger.balance import balance_samples
from gcore.ledger.records.chain import SealedGroup
from gcore.models.layout import MANIFEST_FILE, Manifest, file_entry
from gcore.testing.models import rank_launch
from gcore.train.advantages import advantages, moments, value_targets
from gcore.train.algorithms.losses import value_clip_tokens, value_loss
from gcore.train.backends.packed_attention import NAME
from gcore.train.batching import BatchIndex, StepTensors, TokenFeeding, cut_step, logits_of
from gcore.train.critic import ValueModel, ValueTally, load_backbone, make_value_model
from gcore.train.models import _other_backbone, choose_feeding
from gcore.train.packing import Packing
from gcore.train.rank.feed import StepInput, TrainGroup, TrainSample
from gcore.train.rank.launch import RankLaunch
from gcore.train.rank.main import _manifest
from gcore.types import PromptRef, Version

VOCABULARY = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CPU = torch.device("cpu")


class Alone:
    """One rank."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)


def language_model(kind: str = "Llama", **more: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def with_head(model: Any) -> ValueModel:
    """A value model whose head says something."""
    made = make_value_model(model, None)
    head = made.get_submodule("score")
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(2)))
        head.bias.fill_(0.25)
    return made


def make_work(responses: Sequence[Sequence[int]], rewards: Sequence[float], masked: tuple[int, ...] = ()) -> StepInput:
    """One group, prompt 1 2 3."""
    prompt = np.array([1, 2, 3], dtype=np.int32)
    samples = {
        i: TrainSample(np.array(ids, dtype=np.int32), np.full(len(ids), -1.0, dtype=np.float32), reward)
        for i, (ids, reward) in enumerate(zip(responses, rewards, strict=True))
    }
    ref = PromptRef(0, 0, 0)
    group = SealedGroup(
        ref=ref,
        digest="d",
        prompt_tokens=3,
        response_tokens=tuple(len(ids) for ids in responses),
        versions=(Version(0, 0),),
        holder="h",
        masked=masked,
    )
    seal = ready_seal((group,))
    return StepInput(seal, balance_samples(seal), 0, {"d": TrainGroup(ref, "d", prompt, samples)})


def make_step(work: StepInput, packing: Packing = "bucketed", **train: Any) -> StepTensors:
    return cut_step(work, TrainSpec(advantage="gae", **train), TokenFeeding(packing, VOCABULARY, CPU))


@pytest.mark.parametrize("packing", ["packed", "bucketed"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_value_has_seen_the_prompt_and_the_tokens_before_its_own_and_nothing_else(
    packing: Packing, kind: str
) -> None:
    model = language_model(kind)
    assert choose_feeding(model, TrainSpec(packing=packing), None, list).packing == packing
    module = with_head(model)

    @torch.no_grad()
    def values(responses: Sequence[Sequence[int]]) -> dict[int, torch.Tensor]:
        step = make_step(make_work(responses, [0.0] * len(responses)), packing)
        found = {}
        for place in step.places():
            batch = step.at(place)
            rows = batch.spread(logits_of(module)(batch.inputs)[:, 0])
            found |= {slot.sample: row[mask] for slot, row, mask in zip(batch.slots, rows, batch.mask, strict=False)}
        return found

    responses = [[4, 5, 6, 7, 8], [9, 10], [11]]
    before = values(responses)
    for t in range(5):
        changed = values([[*responses[0][:t], 30, *responses[0][t + 1 :]], *responses[1:]])
        torch.testing.assert_close(changed[0][: t + 1], before[0][: t + 1], atol=1e-6, rtol=0)
        assert ((changed[0][t + 1 :] - before[0][t + 1 :]).abs() > 1e-4).all(), "later values have seen it"
        assert all(torch.allclose(changed[i], before[i], atol=1e-6) for i in (1, 2)), "another sample"
    if packing == "bucketed":  # where the model may be asked for a text alone
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state[0, -1]
            prompt = float(module.get_submodule("score")(hidden))
        assert [float(row[0]) for row in before.values()] == pytest.approx([prompt] * 3, abs=1e-5)


def test_gae_gets_the_reward_at_the_last_token_and_the_values_before_each() -> None:
    step = make_step(make_work([[4, 5, 6, 7]], [1.0]))
    values = {BatchIndex(0, 0): torch.tensor([[0.5, 0.4, 0.3, 0.2]])}
    train = TrainSpec(advantage="gae", gamma=0.9, gae_lambda=0.8)
    found = value_targets(step, train, values, {})
    expected = torch.tensor([[0.00279, 0.19832, 0.456, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(found.advantages[BatchIndex(0, 0)], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        found.returns[BatchIndex(0, 0)], expected + values[BatchIndex(0, 0)].double(), atol=1e-6, rtol=0
    )


def test_the_kl_inside_the_reward_is_taken_off_at_every_token() -> None:
    step = make_step(make_work([[4, 5, 6]], [1.0]))
    place = BatchIndex(0, 0)
    penalties = {place: torch.tensor([[0.1, 0.2, 0.4]], dtype=torch.float64)}
    values = {place: torch.tensor([[0.5, 0.25, 0.75]])}
    train = TrainSpec(advantage="gae", gamma=0.5)
    found = value_targets(step, train, values, penalties)
    # With a lambda of 1 the advantage is the discounted rewards to come less the value.
    to_come = [-0.1 + 0.5 * (-0.2 + 0.5 * 0.6), -0.2 + 0.5 * 0.6, 0.6]
    assert found.returns[place][0].tolist() == pytest.approx(to_come, abs=1e-6)
    assert found.advantages[place][0].tolist() == pytest.approx(
        [r - v for r, v in zip(to_come, (0.5, 0.25, 0.75), strict=True)], abs=1e-6
    )


def test_whitening_is_over_the_trained_tokens_and_comes_after_returns() -> None:
    step = make_step(make_work([[4, 5, 6], [7, 8], [9]], [1.0, 0.0, 5.0], masked=(2,)))
    train = TrainSpec(advantage="gae")
    values = {place: torch.full(step.at(place).scored.shape, 0.25) for place in step.places()}
    targets = value_targets(step, train, values, {})
    found = advantages(step, train, {}, Alone(), targets)
    kept = torch.cat([found[place][step.at(place).mask] for place in step.places()])
    assert len(kept) == 5, "the masked sample is not there"
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    assert float(kept.var()) == pytest.approx(1, abs=1e-5)
    returns = torch.cat([targets.returns[place][step.at(place).mask] for place in step.places()])
    assert sorted(returns.tolist()) == [0.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        pytest.param([[1.0, 1.0], [0.0, 0.0]], 1.0, id="knows"),
        pytest.param([[0.5, 0.5], [0.5, 0.5]], 0.0, id="says the same of all"),
        pytest.param([[0.0, 0.0], [1.0, 1.0]], -3.0, id="has it upside down"),
    ],
)
def test_explained_variance_tells_a_critic_that_knows_from_one_that_does_not(
    values: list[list[float]], explained: float
) -> None:
    step = make_step(make_work([[4, 5], [6, 7]], [1.0, 0.0]))
    (place,) = step.places()
    by_row = torch.tensor([values[slot.sample] for slot in step.at(place).slots])
    targets = value_targets(step, TrainSpec(advantage="gae"), {place: by_row}, {})
    tally = ValueTally()
    tally.before(step, targets, {place: by_row}, Alone())
    metrics = tally.metrics(Alone())
    assert metrics["value_explained_variance"] == pytest.approx(explained)
    assert metrics["return_mean"] == pytest.approx(0.5)
    assert metrics["value_mean"] == pytest.approx(float(by_row.mean()))
    assert moments(step, {place: by_row.double()}, Alone()).count == 4


@given(
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.sampled_from([None, 0.125, 0.5]),
)
def test_a_value_is_held_back_where_its_loss_has_no_gradient_though_it_is_off(
    value: float, goal: float, old: float, clip: float | None
) -> None:
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    r, o = (torch.tensor([[one]], dtype=torch.float64) for one in (goal, old))
    value_loss(v, r, o, clip).sum().backward()
    held = bool(value_clip_tokens(v, r, o, clip).item())
    assert v.grad is not None
    if held:
        assert float(v.grad) == 0
    elif abs(value - goal) > 1e-9 and (clip is None or abs(abs(value - old) - clip) > 1e-9):
        assert float(v.grad) != 0


# Where it starts from -------------------------------------------------------------------------------------------------


def test_a_new_head_says_zero_of_everything_and_the_backbone_is_the_models() -> None:
    model = language_model()
    before = {name: one.clone() for name, one in model.base_model.named_parameters()}
    module = make_value_model(model, None)
    values = module(input_ids=torch.arange(8)[None], logits_to_keep=torch.arange(8), use_cache=False).logits
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(1, 8, 1))
    found = dict(module.named_parameters())
    assert found.keys() == {f"model.{name}" for name in before} | {"score.weight", "score.bias"}
    assert all(torch.equal(found[f"model.{name}"], one) for name, one in before.items())


def test_the_head_computes_in_float32_from_a_backbone_in_half_precision() -> None:
    module = with_head(language_model()).bfloat16()
    values = module(input_ids=torch.arange(8)[None], logits_to_keep=torch.arange(8), use_cache=False).logits
    assert values.dtype == torch.float32
    assert not torch.equal(values.bfloat16().float(), values)


def save_scorer(folder: Path, labels: int = 1) -> Path:
    config = transformers.LlamaConfig(**SIZES, num_labels=labels, pad_token_id=0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_of_rewards_lends_its_head(tmp_path: Path) -> None:
    folder = save_scorer(tmp_path / "scorer")
    module = make_value_model(load_backbone(folder, trust_remote_code=False), folder)
    stored = load_file(folder / "model.safetensors")
    found = dict(module.named_parameters())
    assert torch.equal(found["score.weight"], stored["score.weight"])
    assert all(torch.equal(found[name], one) for name, one in stored.items())
    assert torch.equal(found["score.bias"], torch.zeros(1))


def test_a_head_of_several_numbers_is_refused(tmp_path: Path) -> None:
    folder = save_scorer(tmp_path / "scorer", labels=3)
    with pytest.raises(DataError, match=r"head 'score' is 3 x 16, but a critic's is 1 x 16"):
        make_value_model(load_backbone(folder, trust_remote_code=False), folder)


def launch_of(folder: Path, critic: Path | None = None, start: dict[str, Any] | None = None) -> RankLaunch:
    spec = {
        "name": "a",
        "model": {"path": str(folder)},
        "data": {"path": "none"},
        "flow": {"steps": 4, "groups_per_step": 2, "samples_per_prompt": 1},
        "rollout": {"max_new_tokens": 4},
        "train": {"advantage": "gae", "critic": {} if critic is None else {"path": str(critic)}},
    }
    return rank_launch(spec, folder.parent / "run", start=start)


def test_a_critic_that_cannot_take_the_policys_texts_is_refused(tmp_path: Path) -> None:
    language_model(max_position_embeddings=16).save_pretrained(tmp_path / "short")
    policy = language_model()
    launch = launch_of(tmp_path / "model", tmp_path / "short")
    with pytest.raises(
        DataError, match=r"supports at most 16 tokens, but the policy's sequences have up to 64.*model\.max_length"
    ):
        _other_backbone(launch, policy)
    spec = launch.spec
    allowed = spec.model_copy(update={"model": spec.model.model_copy(update={"max_length": 16})})
    assert _other_backbone(launch.model_copy(update={"spec": allowed}), policy) is not None


def test_the_policys_own_model_is_not_read_twice(tmp_path: Path) -> None:
    assert _other_backbone(launch_of(tmp_path / "nothing here"), language_model()) is None


def test_where_the_critic_cannot_be_packed_the_policy_is_not_either() -> None:
    policy, critic = language_model(), language_model("Mistral", sliding_window=4)
    before = policy.config._attn_implementation
    found = choose_feeding(policy, TrainSpec(), 64, list, beside=critic)
    assert found.packing == "bucketed"
    assert "window" in found.reason
    assert policy.config._attn_implementation == before
    with pytest.raises(DataError, match="a mistral cannot be packed"):
        choose_feeding(policy, TrainSpec(packing="packed"), 64, list, beside=critic)
    assert choose_feeding(policy, TrainSpec(), 64, list, beside=language_model("Qwen3")).packing == "packed"
    assert policy.config._attn_implementation == NAME


def test_a_checkpoint_without_a_critic_is_refused_in_a_sentence_by_a_job_with_one(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "0-1"
    folder.mkdir(parents=True)
    for name in ("model", "exp_avg", "exp_avg_sq"):
        save_file({"a": torch.zeros(2)}, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    manifest = Manifest(job_uid="j", world="w", lineage=0, step=1, updates=4, files=files)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    launch = launch_of(tmp_path / "model", start={"step": 1, "checkpoint": "checkpoints/0-1"})
    with pytest.raises(GcoreError, match="the checkpoint has no critic, but this job trains one"):
        _manifest(launch, lambda _: None)
