"""Memory estimates: their growth and reduction by each parameter, and constants equal to those of the programs.

Comparison with real processes: tests/integration/train/test_mapping_memory.py and `make bench-memory`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapped_jobs import JUDGE, SEVEN, SMALL, machines, work

from gcore.engines.sglang import command
from gcore.engines.torch import kv_cache as columns
from gcore.engines.torch import scheduler as schedule
from gcore.train import batching as logprobs
from gcore.train.backends import deepspeed as trained
from placement.mapping import memory, workload
from placement.mapping.memory import (
    activation_bytes,
    checkpoint_bytes,
    engine_memory,
    micro_tokens,
    rank_host_bytes,
    rank_needs,
    rows_in_cache,
)
from placement.mapping.search import READING_SHARE, TRAINING_SHARE, EngineReplica, MachineSpeed
from placement.mapping.workload import TowerShape, TrainWorkload

stages = st.sampled_from([1, 2, 3])
ranks = st.integers(1, 64)


def total(training: TrainWorkload, size: int) -> int:
    """Bytes of a rank while it computes."""
    needs = rank_needs(training, size, gpu=True)
    return sum(need.stays for need in needs) + max(need.works for need in needs)


def training(**more: Any) -> TrainWorkload:
    return replace(work(SMALL).training, **more)


def test_the_constants_are_those_of_the_programs() -> None:
    assert memory.BUCKET == trained.LARGEST_BUCKET
    assert memory.PIECE == logprobs.PIECE
    assert memory.IDLE_TOKENS == schedule.IDLE_TOKENS
    assert (memory.COLUMNS, memory.SLACK) == (columns.SMALLEST, columns.SLACK)
    assert float(command.CUDA_MEM_FRACTION) == workload.FIXED_SHARE
    assert command.CPU_CACHE_TOKENS == memory.FOREIGN_CPU_TOKENS


@given(stages, ranks, st.booleans())
def test_more_ranks_never_take_more_of_each(stage: int, size: int, half: bool) -> None:
    one = training(stage=stage, half=half)
    assert total(one, size + 1) <= total(one, size)


@given(ranks)
def test_a_higher_stage_keeps_less_of_what_stays(size: int) -> None:
    stays = [sum(need.stays for need in rank_needs(training(stage=stage), size, gpu=True)) for stage in (1, 2, 3)]
    assert stays[0] >= stays[1] >= stays[2]


@given(stages, ranks, st.booleans(), st.integers(1, 64))
def test_adapters_never_take_more_than_the_whole_model(stage: int, size: int, fsdp: bool, rank: int) -> None:
    whole = training(stage=stage, fsdp=fsdp, reference=True)
    adapters = replace(whole, lora_rank=rank)
    assert total(adapters, size) <= total(whole, size)
    assert checkpoint_bytes(adapters) <= checkpoint_bytes(whole)
    assert rank_host_bytes(adapters) <= rank_host_bytes(whole)


@given(ranks, st.booleans())
def test_a_state_in_host_memory_leaves_only_gathered_weights(size: int, half: bool) -> None:
    one = training(stage=3, fsdp=True, half=half)
    kept, offloaded = (rank_needs(replace(one, state_offloads=offloads), size, gpu=True) for offloads in (False, True))
    assert offloaded[0].stays < kept[0].stays
    assert rank_needs(replace(one, state_offloads=True), size, gpu=False) == rank_needs(one, size, gpu=False)


def test_the_adapters_are_counted_as_peft_makes_them() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    shape = workload.ModelShape(
        layers=2, width=32, heads=4, kv_heads=2, head_dim=8, inner=96, vocabulary=50, context=10, outputs=50
    )
    model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))
    assert shape.adapter_parameters(4) == model.get_nb_trainable_parameters()[0]


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16), ranks)
def test_more_tokens_at_once_never_take_less(tokens: int, more: int, size: int) -> None:
    shape = SMALL
    little, much = training(micro_tokens=tokens), training(micro_tokens=tokens + more)
    assert activation_bytes(shape, little, size) <= activation_bytes(shape, much, size)


@given(st.integers(1, 512), st.integers(1, 512), st.sampled_from(["torch", "sglang"]), st.booleans())
def test_more_requests_at_once_never_take_less(rows: int, more: int, engine: Any, gpu: bool) -> None:
    served = replace(work(SMALL).rollout, engine=engine)
    one, other = (engine_memory(served, size=1, rows=count, gpu=gpu) for count in (rows, rows + more))
    assert one.wanted <= other.wanted
    assert one.stays(one.wanted) + one.works <= other.stays(other.wanted) + other.works
    assert one.weights == other.weights


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 256))
def test_an_engine_over_more_slots_takes_less_of_each(size: int, rows: int) -> None:
    served = work(SEVEN).rollout
    one, other = (engine_memory(served, size=count, rows=rows, gpu=True) for count in (size, 2 * size))
    assert other.weights < one.weights
    assert other.cell <= one.cell


@given(st.integers(0, 1 << 24), st.integers(1, 256), st.sampled_from(["torch", "sglang"]))
def test_rows_in_cache_are_between_one_and_the_wanted_number(cells: int, rows: int, engine: Any) -> None:
    served = replace(work(SMALL).rollout, engine=engine)
    assert 1 <= rows_in_cache(served, cells, rows) <= rows
    wanted = engine_memory(served, size=1, rows=rows, gpu=True).wanted
    assert rows_in_cache(served, wanted, rows) == rows


def test_checkpointed_activations_are_fewer() -> None:
    assert (
        activation_bytes(SEVEN, training(recomputes=True), 8)
        < activation_bytes(SEVEN, training(recomputes=False), 8) / 3
    )


def test_a_micro_batch_is_no_larger_than_what_a_rank_has_and_no_smaller_than_its_longest_sample() -> None:
    few = training(samples=8, longest=100, micro_tokens=10_000)
    assert (micro_tokens(few, 1), micro_tokens(few, 4), micro_tokens(few, 8)) == (800, 200, 100)
    assert micro_tokens(training(micro_tokens=10, longest=100), 1) == 100


def test_a_critic_and_a_reference_are_models_of_their_own() -> None:
    more = work(SMALL, train={"advantage": "gae", "kl_coef": 0.1, "offload_reference": False}).training
    names = [need.name for need in rank_needs(more, 2, gpu=True)]
    assert names == ["policy training", "critic training", "reference"]
    assert total(more, 2) > total(work(SMALL).training, 2)


def test_an_offloaded_reference_stays_in_host_memory_until_it_is_used() -> None:
    one = work(SMALL, train={"kl_coef": 0.1}).training
    reference = rank_needs(one, 2, gpu=True)[-1]
    assert (reference.stays, reference.works) == (0, 2 * SMALL.parameters)
    assert rank_host_bytes(one) > rank_host_bytes(work(SMALL).training)
    kept = rank_needs(one, 2, gpu=False)[-1]
    assert (kept.stays, kept.works) == (2 * SMALL.parameters, 0), (
        "where there is no GPU, host memory is where it is used"
    )


def test_a_checkpoints_copy_is_twelve_bytes_a_parameter() -> None:
    assert checkpoint_bytes(work(SMALL).training) == 12 * SMALL.parameters


def test_a_judge_that_classifies_keeps_no_cache_and_one_of_pairs_is_asked_more() -> None:
    said: dict[str, Any] = {"name": "c", "kind": "classifier", "model": {"path": "p"}, "template": "{{ response }}"}
    (classifier,) = work(SMALL, SMALL, judges=[said | {"name": "right"}]).judges
    assert engine_memory(classifier, size=1, rows=8, gpu=True).wanted == 0
    (plain,) = work(SMALL, SMALL).judges
    (pairs,) = work(SMALL, SMALL, judges=[JUDGE | {"mode": "pairwise", "opponents": 3, "votes": 2}]).judges
    assert pairs.requests == 6 * plain.requests
    assert pairs.read > plain.read


TOWER = TowerShape(27, 1152, 4304, 1536, 4, 896, 2304, 3, gated=False)
SEEING = replace(SMALL, tower=TOWER)


def seeing(**more: Any) -> TrainWorkload:
    one = work(SEEING, data={"images": "images"}).training
    return replace(one, **more)


@given(stages, ranks, st.booleans(), st.booleans())
def test_a_frozen_tower_takes_less_of_a_rank_and_of_a_checkpoint(stage: int, size: int, fsdp: bool, both: bool) -> None:
    whole = seeing(stage=stage, fsdp=fsdp, recomputes=False)
    frozen = replace(whole, frozen=("vision", "projector") if both else ("vision",))
    assert total(frozen, size) < total(whole, size)
    count = TOWER.parameters + TOWER.projector_parameters * both
    assert checkpoint_bytes(whole) - checkpoint_bytes(frozen) == 8 * count
    assert rank_host_bytes(frozen) == rank_host_bytes(whole)


def test_activations_of_the_tower_grow_with_patches_up_to_those_of_a_micro_batch_of_pictures() -> None:
    blind = activation_bytes(SMALL, seeing(), 8)
    sizes = [activation_bytes(SEEING, seeing(patches=patches), 8) - blind for patches in (0, 1000, 2000, 1 << 30)]
    assert sizes[0] == 0
    assert sizes[2] == 2 * sizes[1]
    assert sizes[3] * 1000 == sizes[1] * 4 * micro_tokens(seeing(), 8)
    assert seeing().patches == 4 * 16384
    assert work(SEEING).training.patches == 0, "the job has no pictures"


def test_engines_hold_towers_and_compute_them() -> None:
    blind, with_tower = (
        engine_memory(replace(work(SMALL).rollout, shape=shape), size=1, rows=8, gpu=True) for shape in (SMALL, SEEING)
    )
    assert with_tower.weights - blind.weights == 2 * (TOWER.parameters + TOWER.projector_parameters)
    assert with_tower.works > blind.works
    assert with_tower.cell == blind.cell


def test_pictures_take_time_in_engines_and_ranks_and_less_if_the_tower_is_frozen() -> None:
    machine = MachineSpeed.of(machines(1, 2))
    blind, with_pictures = work(SEEING), work(SEEING, data={"images": "images"})
    training = with_pictures.training
    assert blind.rollout.patches == blind.training.encoded == 0
    replica = EngineReplica(1, 8)
    speed = machine.device.tflops * 1e12
    engines = [machine.serve_s(one.rollout, 2, replica) for one in (blind, with_pictures)]
    prompts = with_pictures.rollout.requests / with_pictures.rollout.shared
    patches = prompts * with_pictures.rollout.patches
    assert patches == pytest.approx(training.encoded)
    assert engines[1] - engines[0] == pytest.approx(patches / 2 * TOWER.forward_ops() / (speed * READING_SHARE))
    frozen = replace(training, frozen=("vision", "projector"))
    seconds = [machine.train_s(one, 2) for one in (blind.training, frozen, training)]
    pass_s = training.encoded * TOWER.forward_ops() / 2 / (speed * TRAINING_SHARE)
    assert seconds[1] - seconds[0] == pytest.approx((training.epochs + training.forwards) * pass_s)
    backward = (3 if training.recomputes else 2) * training.epochs
    assert seconds[2] - seconds[1] == pytest.approx(backward * pass_s)
