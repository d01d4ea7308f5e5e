"""Memory and times of policies that generate pictures, from the files of their pipelines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from large_pipelines import write_stable_diffusion_3_5_medium
from mapped_jobs import JUDGE, machines

from gcore.config import JobSpec, parse_spec
from gcore.config.load import apply_flow_settings
from gcore.errors import DataError
from gcore.ledger.records.cluster import ModelConfigs
from gcore.models.diffusion.requests import PictureRequests
from gcore.testing.pipelines import Family, write_pipeline
from placement.mapping.cluster import GIB
from placement.mapping.memory import (
    MemoryFit,
    SlotMemory,
    engine_memory,
    fit_memory,
    rank_host_bytes,
    rank_needs,
    rows_in_cache,
)
from placement.mapping.pictures import DenoiserShape, read_pipeline
from placement.mapping.search import (
    EngineReplica,
    FirstLayout,
    MachineSpeed,
    choose_first_layout,
    describe_workload,
    search_layouts,
)
from placement.mapping.workload import JobShapes, MeanLengths, Workload, make_workload, read_shape
from placement.slots import Split, SplitBounds

SMALL = {"dtype": "bf16", "micro_batch_tokens": 1}
FAMILIES: tuple[Family, ...] = ("sd3", "flux", "qwen_image", "sd")


def spec(folder: Path, flow: str = "flow_grpo", **more: Any) -> JobSpec:
    tree: dict[str, Any] = {
        "name": "j",
        "model": {"path": str(folder)},
        "data": {"path": "d"},
        "flow": {"name": flow, "steps": 3, "groups_per_step": 48, "samples_per_prompt": 24},
        "rollout": {"batch_slots": 16, "diffusion": {"steps": 10, "height": 512, "width": 512, "guidance": 4.5}},
        "reward": {"name": "/r.py:r"},
        "train": {"dtype": "bf16", "backend": "deepspeed", "micro_batch_tokens": 8192},
    }
    for name, value in more.items():
        merges = isinstance(value, dict) and name != "reward"
        tree[name] = tree.get(name, {}) | value if merges else value
    return parse_spec(apply_flow_settings(tree))


def shape_of(job: JobSpec, folder: Path) -> DenoiserShape:
    requests = PictureRequests.of(job, folder)
    assert requests is not None
    return read_pipeline(json.loads(json.dumps(requests.sizes)), where="a test")


def work(job: JobSpec, folder: Path) -> Workload:
    shape = shape_of(job, folder)
    return make_workload(job, JobShapes(shape, None, {}), MeanLengths.guessed(job, shape))


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stable_diffusion_3_5_medium(tmp_path_factory.mktemp("large") / "sd35m")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_weight_files(family: Family, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write_pipeline(tmp_path / family, family)
    more = {"guidance": 1.0, "height": 16, "width": 16, "steps": 4}
    shape = shape_of(spec(folder, "ddpo" if family == "sd" else "flow_grpo", rollout={"diffusion": more}), folder)
    files = {part.name: list(part.glob("*.safetensors")) for part in folder.iterdir()}
    counts = {part: sum(t.numel() for f in found for t in load_file(f).values()) for part, found in files.items()}
    assert shape.parameters == counts["unet" if family == "sd" else "transformer"]
    assert shape.encoders == sum(count for part, count in counts.items() if part.startswith("text_encoder"))
    assert shape.decoder == counts.get("vae", 0)
    assert (shape.decoding > 0) == (shape.decoder > 0)
    assert shape.layers > 0
    assert shape.tokens == (64 if family == "sd" else 16), "a UNet computes each latent"


def test_operations_and_activations_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Attention is not among torch's operations on a CPU."""
    import diffusers
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    side, text, width = 16, 13, 128
    module = diffusers.SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=6,
        num_attention_heads=2,
        attention_head_dim=width // 2,
        joint_attention_dim=64,
        caption_projection_dim=width,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with FlopCounterMode(display=False) as ops, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        module(
            hidden_states=torch.randn(1, 16, side, side),
            encoder_hidden_states=torch.randn(1, text, 64),
            pooled_projections=torch.randn(1, 64),
            timestep=torch.tensor([500.0]),
        )
    sizes = {
        "model_type": "pipeline",
        "network.layers": 6,
        "network.width": width,
        "network.parameters": 1,
        "text.parameters": 0,
        "vae.parameters": 0,
        "tokens": (side // 2) ** 2,
        "text_tokens": text,
        "passes": 1,
        "state": 16 * side * side,
        "height": 128,
        "width": 128,
        "trained_steps": 1.0,
        "group_bytes": 1,
    }
    shape = read_pipeline(sizes, where="a test")
    (stage,) = shape.stages
    assert 2 * stage.tokens * stage.matrices == pytest.approx(ops.get_total_flops(), rel=0.1)
    assert shape.kept_numbers == pytest.approx(sum(kept.values()), rel=0.15)


def test_an_engine_holds_all_parts_and_pictures_in_place_of_a_cache(medium: Path) -> None:
    job = work(spec(medium), medium)
    engine = engine_memory(job.rollout, size=1, rows=16, gpu=True)
    assert engine.weights == 2 * (2_243_171_520 + 83_819_683 + 123_650_304 + 694_659_840 + 4_762_310_656)
    assert (engine.least, engine.wanted) == (1, 16)
    assert 0.1 * GIB < engine.cell < GIB, "the decoder's picture of 512 x 512 pixels with 128 channels is the largest"
    assert rows_in_cache(job.rollout, 5, 16) == 5
    small, cluster = work(spec(medium, train=SMALL), medium), machines(memory_gib=24)
    fits = [fit for fit in search_layouts(small, cluster).fits if fit.way.split.mode == "coexisting"]
    found = fit_memory(fits[0].way, small, cluster, SlotMemory.of(cluster))
    assert isinstance(found, MemoryFit)
    assert found.bound == ("rollout",)
    assert found.cells == ()
    assert 1 <= dict(found.rows)["rollout"] < 16


def test_a_layout_with_fewer_pictures_at_once_says_which_field_to_set(medium: Path) -> None:
    job, cluster = work(spec(medium, train=SMALL), medium), machines(memory_gib=24)
    bounds = SplitBounds(8, 1, 1, (2, 4, 6), judged=False, colocated=False)
    first = choose_first_layout(job, cluster, bounds)
    assert isinstance(first, FirstLayout)
    rows = dict(first.fit.room.rows)["rollout"]
    assert first.cut == (
        f"rollout has room for {rows} pictures at once and by default takes more memory than that: set rollout.batch_slots: {rows}"
    )


def test_ranks_hold_the_network_alone_and_those_that_are_compared_with_it(medium: Path) -> None:
    own = {"train": {"kl_coef": 0.04, "dtype": "bf16", "micro_batch_tokens": 8192}}
    needs = {need.name: need for need in rank_needs(work(spec(medium, **own), medium).training, 1, gpu=True)}
    assert needs.keys() == {"policy training", "reference"}
    assert needs["policy training"].stays == (2 + 12) * 2_243_171_520, "bfloat16 weights, and Adam in float32"
    assert needs["reference"].stays + needs["reference"].works == 2 * 2_243_171_520
    forward = spec(medium, "diffusion_nft", rollout={"diffusion": {"steps": 10, "height": 512, "width": 512}})
    needs = {need.name: need for need in rank_needs(work(forward, medium).training, 4, gpu=True)}
    assert needs["network that follows"].stays == 2 * 2_243_171_520, "whole on every rank"
    host = rank_host_bytes(work(forward, medium).training)
    assert host == 2 * 4 * 2_243_171_520, (
        "it is loaded in float32, and so are the kept weights of the network that follows"
    )


def test_activations_are_those_of_the_rows_of_a_micro_batch(medium: Path) -> None:
    def working(tokens: int) -> int:
        job = work(spec(medium, train={"dtype": "bf16", "micro_batch_tokens": tokens}), medium)
        return next(iter(rank_needs(job.training, 8, gpu=True))).works

    row = 1366  # 1,024 image tokens, and a third for the pass of the negative prompt
    assert working(row) == working(10), "at least one row"
    assert working(3 * row) - working(2 * row) == pytest.approx(working(2 * row) - working(row), rel=1e-6)
    assert working(10**9) - working(10 * row) > 0, "a picture's rows may be in several micro-batches"


def test_times_grow_with_steps_passes_and_trained_rows(medium: Path) -> None:
    speed = MachineSpeed.of(machines())
    replica = EngineReplica(1, 16)

    def times(**diffusion: Any) -> tuple[float, float]:
        own = {"steps": 10, "height": 512, "width": 512, "guidance": 4.5} | diffusion
        job = work(spec(medium, rollout={"diffusion": own, "batch_slots": 16}), medium)
        return speed.serve_s(job.rollout, 8, replica), speed.train_s(job.training, 8)

    served, trained = times()
    assert 5 < served < 60, "1,152 pictures of 10 steps with guidance on 8 accelerators"
    more = times(steps=20)[0] - served
    assert times(steps=30)[0] - served == pytest.approx(2 * more), "decoding and encoders come apart from steps"
    assert times(guidance=1.0)[0] < 0.6 * served
    window = times(window={"size": 3})
    assert window[0] == served, "steps outside of the window are sampled too"
    assert window[1] == pytest.approx(trained / 3, rel=0.2)
    assert times(height=1024, width=1024)[0] > 4 * served, "attention grows with the square of the tokens"


def test_blobs_take_the_network_only_between_nodes(medium: Path) -> None:
    job = work(spec(medium), medium)
    assert job.blob_bytes > 48 * 24 * 10 * 4 * 16 * 64 * 64, "ten float32 states of each picture"
    assert search_layouts(job, machines(1)).fits[0].times.transferring == 0
    fit = search_layouts(job, machines(2)).fits[0]
    assert fit.times.transferring > 0
    assert fit.times.step > fit.times.transferring + fit.times.training


def test_layouts_of_a_pipeline_have_engines_of_one_slot_and_hints_that_its_spec_allows(medium: Path) -> None:
    found = search_layouts(work(spec(medium), medium), machines())
    assert {fit.way.rollout_size for fit in found.fits} == {1}
    averaged = spec(medium, train={"dtype": "bf16", "micro_batch_tokens": 8192, "diffusion": {"ema_decay": 0.9}})
    hints = search_layouts(work(averaged, medium), machines(memory_gib=24)).hints
    assert not any("activation_checkpointing" in hint or "zero_stage: 3" in hint for hint in hints)


def test_a_judge_reads_the_tokens_of_the_picture(medium: Path) -> None:
    judge = JUDGE | {
        "images": True,
        "template": "{{ prompt }}{{ response }} Is that right?",
        "serving": {"engine": "torch"},
    }
    job = spec(medium, judges=[judge], reward={"judge": "right"})
    shape = shape_of(job, medium)
    seeing = read_shape(
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text",
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "num_hidden_layers": 4,
                "intermediate_size": 2048,
                "vocab_size": 1000,
                "max_position_embeddings": 8192,
            },
            "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
        },
        where="a test",
    )
    made = make_workload(job, JobShapes(shape, None, {"right": seeing}), MeanLengths(20, 10))
    (served,) = made.judges
    assert served.patches == 32 * 32
    assert served.read == pytest.approx(20 + 16 * 16, abs=10), (
        "the words of prompt and template, and one token for 2 x 2 patches"
    )
    assert served.requests == 48 * 24


def test_the_record_of_a_job_is_enough_to_plan_it(medium: Path) -> None:
    job = spec(medium)
    requests = PictureRequests.of(job, medium)
    assert requests is not None
    stored = ModelConfigs(policy=requests.sizes)
    read = ModelConfigs.model_validate_json(stored.model_dump_json())
    assert describe_workload(job, read) == work(job, medium)


def test_a_pipeline_without_weights_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = write_stable_diffusion_3_5_medium(tmp_path / "lacking", weights=False)
    job = spec(folder)
    requests = PictureRequests.of(job, folder)
    assert requests is not None
    said = "the size of the network that denoises is not known, because the weights are not on this machine"
    with pytest.raises(DataError, match=said):
        read_pipeline(requests.sizes, where="here")
    assert describe_workload(job, ModelConfigs(policy=requests.sizes)) == f"model.path: {said}"


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", None), ("tokens", "many"), ("network.layers", 0), ("trained_steps", True)]
)
def test_wrong_sizes_are_refused_by_name(name: str, value: Any, medium: Path) -> None:
    requests = PictureRequests.of(spec(medium), medium)
    assert requests is not None
    with pytest.raises(DataError, match=name):
        read_pipeline({**requests.sizes, name: value}, where="here")


def test_a_colocated_layout_counts_what_sleeps(medium: Path) -> None:
    job = work(spec(medium), medium)
    fit = next(fit for fit in search_layouts(job, machines()).fits if fit.way.asleep)
    assert fit.room.slept > 2 * job.rollout.parameters
    assert replace(fit.way.split, mode="colocated") == Split("colocated", 8, 0, fit.way.ranks)
