"""Adapters in a model in training, in files, and merged, compared with PEFT and transformers."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_core import make_core
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gcore.config.train import LoraSpec
from gcore.engines.torch.model import stage_weights
from gcore.errors import DataError, SpecError
from gcore.models.adapter_checks import BaseFiles, check_adapter, check_same_base
from gcore.models.adapters import (
    AdapterConfig,
    describe_base,
    merged_tensors,
    read_adapters,
    stored_name,
    stored_shapes,
)
from gcore.models.checks import check_adapters, check_whole, weight_files
from gcore.models.dtypes import CODES
from gcore.models.export import copy_model
from gcore.models.hubs import ADAPTER_CONFIG, ModelError
from gcore.models.layout import (
    ADAPTER_FILE,
    BASE_FILE,
    EXP_AVG_FILE,
    EXP_AVG_SQ_FILE,
    MANIFEST_FILE,
    SAMPLE_FILE,
    Manifest,
    checkpoint_folder,
    companion_files,
    copy_companions,
    file_entry,
    read_manifest,
)
from gcore.models.publisher import NamedTensor
from gcore.system.clock import SystemClock
from gcore.testing.models import make_tiny_model, rank_launch
from gcore.train.backends.adapters import BaseReference, adapter_config, add_adapters, load_adapters
from gcore.train.checkpoint.run_files import BackgroundWriter, RetryingWriter
from gcore.train.checkpoint.writer import CheckpointWriter, FolderPublisher, MergedModel, UpdateCounts
from gcore.train.hf_models import load_module
from gcore.train.rank import main as rank
from gcore.train.rank.launch import RankLaunch
from gcore.train.rank.main import _manifest, agreed_sample
from gcore.types import Version

LORA = LoraSpec(rank=4, alpha=6)
IDS = torch.tensor([[5, 9, 17, 4, 30, 8]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def adapted(model: Path, lora: LoraSpec = LORA, *, seed: int = 1, trained: bool = True) -> nn.Module:
    """The model with adapters; with `trained`, B is as if it had been trained."""
    module = load_module(model, torch.float32)
    add_adapters(module, lora, seed, torch.float32, model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if trained and ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)
    return module


def logits(module: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = module(input_ids=IDS).logits
    return found


def saved(module: nn.Module, folder: Path, model: Path, lora: LoraSpec = LORA) -> Path:
    folder.mkdir()
    trained = {stored_name(name): one.detach() for name, one in module.named_parameters() if one.requires_grad}
    save_file(trained, folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config(module, lora, model).encode())
    return folder


def checkpoint(model: Path, folder: Path) -> Path:
    """As the trainer writes one: adapters, moments, and everything of the model but its weights."""
    saved(adapted(model), folder, model)
    (folder / BASE_FILE).write_bytes(describe_base(model))
    for name in (EXP_AVG_FILE, EXP_AVG_SQ_FILE):
        save_file({"x": torch.zeros(1)}, folder / name)
    copy_companions(model, folder)
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    manifest = Manifest(job_uid="j", world="w", lineage=0, step=1, updates=1, files=files)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    return folder


class Policy:
    def __init__(self, module: Any) -> None:
        self.module = module
        self.outputs_of = lambda ids: module(input_ids=ids).logits


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(model: Path) -> None:
    plain, module = load_module(model, torch.float32), adapted(model, trained=False)
    assert torch.equal(logits(module), logits(plain))
    names = [name for name, one in module.named_parameters() if one.requires_grad]
    assert len(names) == 2 * 7 * 2, "seven matrices in each of two layers, A and B of each"
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert torch.equal(logits(adapted(model)), logits(adapted(model)))
    assert not torch.equal(logits(adapted(model, seed=1)), logits(adapted(model, seed=2)))


def test_the_frozen_model_has_the_values_that_engines_serve(model: Path) -> None:
    module = load_module(model, torch.float32)
    add_adapters(module, LORA, 0, torch.bfloat16, model)
    frozen = [one for one in module.parameters() if not one.requires_grad]
    assert all(torch.equal(one, one.bfloat16().float()) for one in frozen)
    assert {one.dtype for one in module.parameters()} == {torch.float32}


def test_peft_loads_a_checkpoints_folder_with_the_same_outputs(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    module = adapted(model)
    folder = saved(module, tmp_path / "adapter", model)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(folder))
    assert torch.allclose(logits(loaded.eval()), logits(module), atol=1e-6)
    again = adapted(model, trained=False)
    load_adapters(again, folder)
    assert torch.equal(logits(again), logits(module))


def test_the_merged_model_has_the_outputs_of_the_adapted_one(model: Path, tmp_path: Path) -> None:
    module = adapted(model)
    assert not torch.allclose(logits(module), logits(load_module(model, torch.float32)), atol=1e-2)
    folder = saved(module, tmp_path / "adapter", model)
    tensors = {one.name: one.tensor for one in merged_tensors(model, read_adapters(folder), LORA.scale, torch.float32)}
    assert list(tensors) == list(stored_shapes(model))
    merged = make_tiny_model(tmp_path / "merged", seed=9)
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    assert torch.allclose(logits(load_module(merged, torch.float32)), logits(module), atol=1e-5)


class Trained(Policy):
    """A policy whose backend gathers the parameters that are trained."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {one.name: tuple(one.tensor.shape) for one in self.tensors("master")}

    def tensors(self, kind: str) -> list[NamedTensor]:
        return [NamedTensor(name, one.detach()) for name, one in self.module.named_parameters() if one.requires_grad]

    def buffers(self) -> list[NamedTensor]:
        return []


def launch_of(model: Path, run: Path, publish: str = "merged", **rank: Any) -> RankLaunch:
    """Rank 0 of a job with adapters of the model."""
    spec = {
        "name": "j",
        "model": {"path": str(model)},
        "data": {"path": "d"},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
        "train": {"lora": {"rank": LORA.rank, "alpha": LORA.alpha, "publish": publish}},
    }
    return rank_launch(spec, run, **rank)


def staged(module: nn.Module, model: Path, run: Path, publish: str) -> Path:
    """The folder that a step writes for the engines."""
    launch = launch_of(model, run, publish)
    writer = BackgroundWriter(launch.run_path, launch.world)
    insisting = RetryingWriter(writer.hindered, 60.0)
    publisher = FolderPublisher(launch, Trained(module), writer, insisting, list)  # type: ignore[arg-type]
    return launch.run_path / publisher.stage(Version(0, 1), lambda: None).folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_serve_the_same_bits_from_adapters_alone_as_from_the_merged_model(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"dtype": dtype}))
    module = adapted(model)
    merged, alone = (staged(module, model, tmp_path / publish, publish) for publish in ("merged", "adapter"))
    assert sorted(path.name for path in alone.iterdir()) == [ADAPTER_CONFIG, ADAPTER_FILE, SAMPLE_FILE]
    core = make_core(model)
    served = {}
    for folder in (merged, alone, merged, alone):  # an adapter is added to the base, and not to what is served
        core.change_weights(stage_weights(core.model, folder), None, flush=True, abort=False)
        served[folder] = {name: one.clone() for name, one in core.model.module.state_dict().items()}
    assert all(torch.equal(one, served[alone][name]) for name, one in served[merged].items())
    base = load_module(model, torch.float32).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(served[alone][name], base[name])


def test_an_engine_adds_no_adapters_of_another_base_model(tmp_path: Path) -> None:
    """Nodes that share no folder have copies of the model, which may differ."""
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    alone = staged(adapted(model), model, tmp_path / "run", "adapter")
    stage_weights(make_core(shutil.copytree(model, tmp_path / "copy")).model, alone)
    with pytest.raises(DataError, match=r"other: the adapters are trained on another base model .* Copy the model"):
        stage_weights(make_core(other).model, alone)
    (alone / SAMPLE_FILE).unlink()  # as of a rank of an earlier release
    stage_weights(make_core(other).model, alone)


def test_ranks_that_read_other_files_of_the_model_do_not_start(model: Path, tmp_path: Path) -> None:
    told: list[list[int]] = []
    collective: Any = SimpleNamespace(agree=lambda what, numbers: told.append(numbers))
    other = make_tiny_model(tmp_path / "other", seed=1)
    for folder in (model, shutil.copytree(model, tmp_path / "copy"), other):
        files = BaseFiles.of(folder)
        assert agreed_sample(collective, files, folder) == files.sample()
    assert told[0] == told[1] != told[2]
    assert all(0 <= number < 2**63 for (number,) in told)
    (other / "config.json").unlink()
    with pytest.raises(DataError, match=r"other: cannot read the model \(No such file"):
        agreed_sample(collective, BaseFiles.of(other), other)


def test_a_base_model_that_changes_after_its_comparison_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stamps were taken seconds after it was compared with the checkpoint's."""
    order: list[str] = []

    def compare(*_: Any) -> None:
        order.append("compared")
        raise InterruptedError

    def look(folder: Path) -> BaseFiles:
        order.append("looked at")
        return BaseFiles({})

    monkeypatch.setattr(rank, "_manifest", compare)
    monkeypatch.setattr(rank, "BaseFiles", SimpleNamespace(of=look))
    launch, none = resumed(model, tmp_path / "run"), cast(Any, None)
    with pytest.raises(InterruptedError):
        rank.load_rank(launch, none, SystemClock(), lambda phase: None, none)
    assert order == ["looked at", "compared"]


def test_all_ranks_wait_for_each_tensor_of_the_merged_model(model: Path) -> None:
    """Ranks that waited for the whole model in silence would be ended by their watchdogs."""
    begun, progress = threading.Barrier(2, timeout=60), [0, 0]

    def highest(numbers: Sequence[float]) -> list[float]:
        begun.wait()
        return list(numbers)

    def gather(rank: int) -> list[NamedTensor]:
        def tell() -> None:
            progress[rank] += 1

        served = MergedModel(Trained(modules[rank]), LORA, model, torch.float32, highest)  # type: ignore[arg-type]
        return list(served.tensors(writes=rank == 0, tell=tell))

    modules = [adapted(model), adapted(model)]
    with ThreadPoolExecutor(2) as pool:
        merged, none = pool.map(gather, range(2))
    assert (len(merged), none) == (len(stored_shapes(model)), [])
    assert progress[1] - progress[0] == len(merged)


def resumed(model: Path, run: Path) -> RankLaunch:
    """Rank 0 of a world that starts from a checkpoint with adapters of the model."""
    folder = checkpoint_folder(run, Version(0, 1))
    folder.parent.mkdir(parents=True)
    checkpoint(model, folder)
    return launch_of(model, run, start={"step": 1, "checkpoint": "checkpoints/0-1"})


def test_the_first_checkpoint_reads_the_base_with_progress_and_its_absence_costs_no_step(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    saver = CheckpointWriter(launch_of(model, tmp_path / "run"), Trained(adapted(model)))  # type: ignore[arg-type]
    found = []
    for step in (1, 2, 3):
        if step == 1:
            model.rename(tmp_path / "away")
        elif step == 2:
            (tmp_path / "away").rename(model)
        saver.checkpoint(Version(0, step), UpdateCounts(step, 0), lambda: None)
        assert saver.writer.wait(60)
        found.append(saver.writer.writing)
    away, first, next_ = found
    assert away is not None
    assert first is not None
    assert next_ is not None
    assert away.error
    assert away.over
    assert (first.error, next_.error) == ("", "")
    assert (first.written, next_.written) == (first.total, next_.total)
    assert first.total - next_.total == (model / "model.safetensors").stat().st_size
    assert saver.writer.saved is not None
    check_same_base(model, tmp_path / "run" / saver.writer.saved.file, "")


def change_in_place(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def replace_by_copy(path: Path) -> None:
    stamp = path.stat()
    copy = path.with_suffix(".new")
    change_in_place(shutil.copyfile(path, copy))
    os.utime(copy, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    copy.replace(path)


CHANGED = r"model\.safetensors: the base model of the adapters changed while the job runs\. Restore"


@pytest.mark.parametrize("publish", ["merged", "adapter"])
@pytest.mark.parametrize("change", [change_in_place, replace_by_copy])
def test_a_step_ends_if_the_base_changed_since_the_rank_loaded_it(
    tmp_path: Path, change: Callable[[Path], None], publish: str
) -> None:
    model = make_tiny_model(tmp_path / "model")
    launch, base, module = launch_of(model, tmp_path / "run", publish), BaseFiles.of(model), adapted(model)
    change(model / "model.safetensors")
    writer = BackgroundWriter(launch.run_path, launch.world)
    insisting = RetryingWriter(writer.hindered, 60.0)
    publisher = FolderPublisher(launch, Trained(module), writer, insisting, list, base)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=CHANGED):
        publisher.stage(Version(0, 1), lambda: None)
    assert not (launch.run_path / "weights" / "0-1").exists()
    saver = CheckpointWriter(launch, Trained(module), base=base)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=CHANGED):
        saver.checkpoint(Version(0, 1), UpdateCounts(1, 0), lambda: None)


def test_a_merge_ends_if_the_base_changes_while_it_is_read(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    served = MergedModel(Trained(adapted(model)), LORA, model, torch.float32, list)  # type: ignore[arg-type]
    tensors = served.tensors(writes=True, tell=lambda: None)
    next(tensors)
    os.utime(model / "model.safetensors", ns=(1, 1))
    with pytest.raises(DataError, match=CHANGED):
        list(tensors)


@pytest.mark.parametrize("change", [change_in_place, replace_by_copy])
def test_an_engine_adds_no_adapter_to_a_base_that_changed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    model = make_tiny_model(tmp_path / "model")
    core, folder = make_core(model), saved(adapted(model), tmp_path / "adapter", model)
    stage_weights(core.model, folder)
    change(model / "model.safetensors")
    with pytest.raises(DataError, match=CHANGED):
        stage_weights(core.model, folder)


def test_a_world_does_not_continue_adapters_on_another_base(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    launch = resumed(model, tmp_path / "run")
    phases: list[str] = []
    manifest = _manifest(launch, phases.append)
    assert manifest is not None
    assert manifest.version == Version(0, 1)
    assert set(phases) == {"loading"}
    shutil.rmtree(model)
    make_tiny_model(model, seed=1)
    with pytest.raises(DataError, match=r"not that of the adapter's base model\. Restore the model in model\.path"):
        _manifest(launch, phases.append)


def test_a_world_does_not_continue_adapters_on_a_base_with_another_configuration(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    launch = resumed(model, tmp_path / "run")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(
        DataError, match=r"config\.json: the configuration of the adapters' base model changed.*Restore"
    ):
        _manifest(launch, lambda _: None)


def test_a_world_continues_a_checkpoint_that_does_not_describe_its_base(model: Path, tmp_path: Path) -> None:
    """Checkpoints of earlier releases have no digests of the base."""
    launch = resumed(model, tmp_path / "run")
    folder = checkpoint_folder(launch.run_path, Version(0, 1))
    (folder / BASE_FILE).unlink()
    old = read_manifest(folder)
    files = {name: entry for name, entry in old.files.items() if name != BASE_FILE}
    (folder / MANIFEST_FILE).write_bytes(old.model_copy(update={"files": files}).encode())
    manifest = _manifest(launch, lambda _: None)
    assert manifest is not None
    assert BASE_FILE not in manifest.files


def test_weights_beside_those_of_the_base_are_another_base_if_transformers_loads_them(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    parts = tmp_path / "parts"
    assert len(weight_files(parts)) > 1
    described = tmp_path / "adapter"
    described.mkdir()
    (described / BASE_FILE).write_bytes(describe_base(parts))
    check_same_base(parts, described, "")
    shutil.copy(make_tiny_model(tmp_path / "other", seed=5) / "model.safetensors", parts)
    module = AutoModelForCausalLM.from_pretrained(parts)
    assert torch.equal(logits(module), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "other")))
    assert weight_files(parts) == [parts / "model.safetensors"]
    with pytest.raises(DataError, match=r"parts/model\.safetensors: the file is not that of the adapter's base model"):
        check_same_base(parts, described, "")


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b'{"/dev/zero": ""}', b'{"../model.safetensors": ""}'])
def test_a_list_of_base_files_that_names_no_files_is_refused_unread(
    model: Path, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / BASE_FILE).write_bytes(content)
    with pytest.raises(DataError, match="does not list the files of a base model"):
        check_same_base(model, tmp_path, "")


@pytest.mark.parametrize("missing", [0, 5000])
def test_the_weights_of_a_judges_adapter_are_refused_if_they_are_not_whole(
    model: Path, tmp_path: Path, missing: int
) -> None:
    folder = saved(adapted(model), tmp_path / "adapter", model)
    check_adapter(folder, model)
    whole = (folder / ADAPTER_FILE).read_bytes()
    (folder / ADAPTER_FILE).write_bytes(whole[:-missing] if missing else b"")
    with pytest.raises(DataError, match="the file is cut off"):
        check_adapter(folder, model)


def test_adapters_of_another_model_are_refused_by_the_engine(model: Path, tmp_path: Path) -> None:
    core = make_core(make_tiny_model(tmp_path / "other", layers=1))
    folder = saved(adapted(model), tmp_path / "adapter", model)
    with pytest.raises(DataError, match=r"fits no matrix of the base model"):
        stage_weights(core.model, folder)
    (folder / ADAPTER_FILE).write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot read the tensors"):
        stage_weights(core.model, folder)


def test_the_sum_is_rounded_once(model: Path, tmp_path: Path) -> None:
    adapters = read_adapters(saved(adapted(model), tmp_path / "adapter", model))
    exact = {one.name: one.tensor for one in merged_tensors(model, adapters, LORA.scale, torch.float32)}
    for one in merged_tensors(model, adapters, LORA.scale, torch.bfloat16):
        assert torch.equal(one.tensor, exact[one.name].bfloat16())
        assert CODES[one.tensor.dtype] == "BF16"


def test_the_reference_is_the_model_without_its_adapters(model: Path) -> None:
    module = adapted(model)
    before = logits(module)
    reference = BaseReference(Policy(module))  # type: ignore[arg-type]
    with reference.awake() as outputs_of:
        assert torch.equal(outputs_of(IDS), logits(load_module(model, torch.float32)))  # type: ignore[arg-type]
    assert torch.equal(logits(module), before)
    assert list(reference.forward_tensors()) == []
    assert all(one.requires_grad for name, one in module.named_parameters() if ".lora_" in name)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (LoraSpec(targets=("query",)), r"no linear layer of the model is called 'query'.*q_proj"),
        (LoraSpec(targets=("q_proj", "norm")), r"no linear layer of the model is called 'norm'"),
        (LoraSpec(rank=33), r"rank 33 is above the width of layer .*k_proj.* \(16\). Set it to 16 or less"),
        (LoraSpec(targets=("lm_head",)), r"the output layer shares its matrix with the embedding"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused(model: Path, lora: LoraSpec, said: str) -> None:
    module = load_module(model, torch.float32)
    with pytest.raises(DataError, match=said):
        add_adapters(module, lora, 0, torch.float32, model)
    assert all(one.requires_grad for one in module.parameters()), "nothing was changed"


def test_adapters_of_a_model_without_linear_layers_are_refused() -> None:
    module = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=1, n_head=2, n_embd=8))
    with pytest.raises(DataError, match=r"train\.lora: a gpt2 has no linear layer .* beside its output layer"):
        add_adapters(module, LORA, 0, torch.float32, Path("gpt2"))


def test_targets_are_named_by_the_end_of_their_names(model: Path) -> None:
    module = adapted(model, LoraSpec(targets=("q_proj", "model.layers.1.mlp.up_proj")))
    names = {name for name, one in module.named_parameters() if one.requires_grad and ".lora_A." in name}
    assert {name.partition(".lora_A")[0].removeprefix("model.layers.") for name in names} == {
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "1.mlp.up_proj",
    }


def test_adapters_of_another_shape_or_model_are_refused(model: Path, tmp_path: Path) -> None:
    folder = saved(adapted(model), tmp_path / "adapter", model)
    with pytest.raises(DataError, match=r"adapters of the checkpoint differ from those of the spec"):
        load_adapters(adapted(model, LoraSpec(rank=2)), folder)
    with pytest.raises(DataError, match=r"adapters of the checkpoint differ from those of the spec"):
        load_adapters(adapted(model, LoraSpec(rank=4, targets=("q_proj",))), folder)
    wider = make_tiny_model(tmp_path / "wider", hidden=64)
    shallow = make_tiny_model(tmp_path / "shallow", layers=1)
    for other in (wider, shallow):
        with pytest.raises(DataError, match=r"fits no matrix of the base model"):
            list(merged_tensors(other, read_adapters(folder), LORA.scale, torch.float32))


def test_the_configuration_is_read_as_it_was_written(model: Path, tmp_path: Path) -> None:
    folder = saved(adapted(model), tmp_path / "adapter", model)
    every = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert AdapterConfig.read(folder) == AdapterConfig(str(model), 4, 6.0, every)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    for found, read in ((None, ()), (r".*\.q_proj", (r".*\.q_proj",))):
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings | {"target_modules": found}))
        assert AdapterConfig.read(folder).targets == read
    (folder / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(DataError, match=r"no configuration of a LoRA adapter"):
        AdapterConfig.read(folder)


def test_an_exported_model_is_the_merged_one_and_an_exported_adapter_is_pefts(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    folder, trained = checkpoint(model, tmp_path / "checkpoint"), logits(adapted(model))
    copy_model(folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), trained, atol=1e-5)
    assert not list((tmp_path / "merged").glob("adapter*"))
    copy_model(folder, tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert torch.allclose(logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), trained, atol=1e-5)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    moved = shutil.copytree(model, tmp_path / "moved")
    copy_model(folder, tmp_path / "again", base=moved)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "merged" / "model.safetensors"
    ).read_bytes()


def test_an_adapter_is_merged_with_its_own_base_model_only(model: Path, tmp_path: Path) -> None:
    folder = checkpoint(model, tmp_path / "checkpoint")
    other = make_tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(DataError, match=r"the file is not that of the adapter's base model.*--base"):
        copy_model(folder, tmp_path / "to", base=other)
    with pytest.raises(DataError, match=r"the adapter's base model is not here"):
        copy_model(folder, tmp_path / "to", base=tmp_path / "nowhere")
    assert not (tmp_path / "to").exists()
    with pytest.raises(ModelError, match=r"the folder has an adapter and not the whole model"):
        check_whole(folder)


def test_a_models_own_adapter_configuration_is_refused_and_never_copied(model: Path, tmp_path: Path) -> None:
    both = shutil.copytree(model, tmp_path / "both")
    check_whole(both)
    (both / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ModelError, match=r"a model and adapter_config.json.*Remove adapter_config.json"):
        check_whole(both)
    assert ADAPTER_CONFIG not in companion_files(both)


@pytest.mark.parametrize(
    ("targets", "rank", "said"),
    [
        (("query",), 8, r"no layer of the model is called 'query'. Name some of .*q_proj"),
        (("embed_tokens",), 8, r"no layer of the model is called 'embed_tokens'. Name some of down_proj, gate_proj"),
        (("q_proj", "k_proj"), 33, r"rank 33 is above the width of layer .*k_proj \(16\). Set it to 16 or less"),
        (("",), 17, r"rank 17 is above the width of layer model.layers.0.self_attn.k_proj"),
    ],
)
def test_a_submission_is_refused_by_the_files_of_the_model(
    model: Path, targets: tuple[str, ...], rank: int, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        check_adapters(model, targets, rank)
    check_adapters(model, ("q_proj", "layers.1.mlp.up_proj", ""), 8)


def test_the_sample_of_a_base_model_depends_on_its_weights_and_its_configuration(model: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    assert BaseFiles.of(elsewhere).sample() == BaseFiles.of(model).sample()
    (path,) = weight_files(elsewhere)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert BaseFiles.of(elsewhere).sample() != BaseFiles.of(model).sample(), "another size"
    save_file({name: tensor * 1.01 for name, tensor in load_file(model / path.name).items()}, path, {"format": "pt"})
    assert path.stat().st_size == len(data)
    assert BaseFiles.of(elsewhere).sample() != BaseFiles.of(model).sample(), "another training"
    path.write_bytes(data)
    assert BaseFiles.of(elsewhere).sample() == BaseFiles.of(model).sample()
    config = json.loads((elsewhere / "config.json").read_text())
    (elsewhere / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert BaseFiles.of(elsewhere).sample() != BaseFiles.of(model).sample(), "another configuration"
