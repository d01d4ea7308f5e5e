"""Adapters at run time: rows of several adapters in one batch equal models into which their adapter was merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_core import EXPERTS, LLAMA_LIKE, Plain, finish, make_core, prompt, save, task
from engine_processes import engine_process
from safetensors.torch import load_file, save_file

from gcore.engines.hf.engine import start_engine as start_hf
from gcore.engines.launch import EngineLaunch, parse_arguments
from gcore.engines.request import GenerationRequest, RequestOutput
from gcore.engines.torch.engine import EngineCore
from gcore.engines.torch.model import StagedWeights
from gcore.engines.torch.model_runner import DeterministicRunner, FastRunner, GenericRunner
from gcore.engines.torch.server import start_core
from gcore.errors import DataError, EngineError, UsageError
from gcore.models.adapter_checks import BaseFiles, check_adapter
from gcore.models.adapters import AdapterConfig, adapted_tensors, read_adapters
from gcore.models.hubs import ADAPTER_CONFIG
from gcore.models.layout import ADAPTER_FILE, ADAPTER_PREFIX, SAMPLE_FILE, adapter_digest
from gcore.rollout.client import EngineClient, SamplingParams
from gcore.types import Version

TARGETS = ("q_proj", "v_proj", "down_proj")
SEVERAL = ("x", "y")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "eos_token_id": None,
    "bos_token_id": None,
}


def write_adapter(base: Path, folder: Path, seed: int, rank: int = 2, targets: tuple[str, ...] = TARGETS) -> Path:
    """An adapter of random matrices that changes the model's answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in Plain(base).model.named_modules():
        if name.endswith(targets):
            out, width = layer.weight.shape
            tensors[f"{ADAPTER_PREFIX}{name}.lora_A.weight"] = (
                torch.randn(rank, width, generator=generator) / width**0.5
            )
            tensors[f"{ADAPTER_PREFIX}{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG).write_bytes(AdapterConfig(str(base), rank, 2.0 * rank, targets).encode())
    return folder


def merge(base: Path, adapter: Path) -> Path:
    """The model with the adapter merged, beside the adapter."""
    folder = adapter.with_name(f"{adapter.name}-merged")
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    merged = {one.name: one.tensor.contiguous() for one in adapted_tensors(base, adapter)}
    save_file(merged, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(transformers.LlamaConfig(**LLAMA_LIKE), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two judges of different ranks and targets, and two successive adapters of the policy."""
    at = tmp_path_factory.mktemp("adapters")
    return {
        "x": write_adapter(base, at / "x", 1),
        "y": write_adapter(base, at / "y", 2, rank=5, targets=("o_proj", "q_proj", "up_proj")),
        "one": write_adapter(base, at / "one", 3, rank=3),
        "two": write_adapter(base, at / "two", 4),
    }


@pytest.fixture(scope="module")
def references(base: Path, folders: dict[str, Path]) -> dict[str, Plain]:
    return {"": Plain(base)} | {name: Plain(merge(base, folder)) for name, folder in folders.items()}


def start(base: Path, folders: dict[str, Path], **launch: Any) -> EngineCore:
    return make_core(base, adapters={name: str(folders[name]) for name in SEVERAL}, weight_version="0.0", **launch)


def update(core: EngineCore, folder: Path, version: str) -> None:
    core.change_weights(core.stage_weights(folder), version, flush=True, abort=False)


def requests(first: int = 0) -> list[GenerationRequest]:
    """The same prompts for the policy (0) and both judges, of several lengths, greedy and sampled."""
    found = []
    for place, (length, adapter) in enumerate((length, adapter) for length in (1, 7, 30, 60) for adapter in (0, 1, 2)):
        one = task(first + place, prompt(length, length), 8, temperature=0.7 * (length > 1), seed=5)
        found.append(replace(one, adapter=adapter))
    return found


def check(asked: list[GenerationRequest], found: dict[int, RequestOutput], by_number: list[Plain]) -> None:
    for one in asked:
        assert by_number[one.adapter].worst(one, found[one.number]) < 1e-5, one


@pytest.mark.parametrize(
    ("launch", "runner"),
    [
        pytest.param({}, FastRunner, id="fast"),
        pytest.param({"batch_slots": 3, "prefill_chunk_tokens": 16}, FastRunner, id="few-rows-and-chunks"),
        pytest.param({"deterministic": True}, DeterministicRunner, id="deterministic"),
    ],
)
def test_rows_of_several_adapters_equal_merged_models(
    base: Path, folders: dict[str, Path], references: dict[str, Plain], launch: dict[str, Any], runner: type
) -> None:
    core = start(base, folders, **launch)
    assert type(core.lane) is runner
    check(requests(), finish(core, requests()), [references[name] for name in ("", *SEVERAL)])
    update(core, folders["one"], "0.1")
    check(requests(100), finish(core, requests(100)), [references[name] for name in ("one", *SEVERAL)])


def test_adapters_work_with_the_generic_runner(tmp_path: Path) -> None:
    config = transformers.MambaConfig(**SMALL, state_size=4, pad_token_id=0)
    base = save(config, tmp_path / "base")
    folders = {
        name: write_adapter(base, tmp_path / name, seed, targets=("in_proj",)) for seed, name in enumerate(SEVERAL)
    }
    core = start(base, folders)
    assert type(core.lane) is GenericRunner
    asked = [replace(task(n, prompt(n, 9, 60), 6, temperature=0.0), adapter=n % 3) for n in range(7)]
    check(asked, finish(core, asked), [Plain(base), *(Plain(merge(base, folders[name])) for name in SEVERAL)])


def test_adapters_work_in_layers_that_get_the_tokens_of_all_rows_in_one_dimension(tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        **SMALL, ffn_dim=48, num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32
    )
    base = save(config, tmp_path / "base")
    folders = {
        name: write_adapter(base, tmp_path / name, seed, targets=("fc1", "fc2")) for seed, name in enumerate(SEVERAL)
    }
    core = start(base, folders)
    asked = [replace(task(n, prompt(n, 9, 60), 6, temperature=0.0), adapter=n % 3) for n in range(7)]
    check(asked, finish(core, asked), [Plain(base), *(Plain(merge(base, folders[name])) for name in SEVERAL)])


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_update_changes_the_policy_alone(
    base: Path, folders: dict[str, Path], references: dict[str, Plain], deterministic: bool
) -> None:
    core = start(base, folders, deterministic=deterministic)
    before = finish(core, requests())
    for number, name in enumerate(("one", "two"), 1):
        update(core, folders[name], f"0.{number}")
        asked = requests(100 * number)
        found = finish(core, asked)
        check(asked, found, [references[one] for one in (name, *SEVERAL)])
        for one in asked:
            version = "0.0" if one.adapter else f"0.{number}"
            assert {span.version for span in found[one.number].spans} == {version}
            if one.adapter:
                earlier = before[one.number - 100 * number]
                assert found[one.number].tokens == earlier.tokens
                assert found[one.number].logprobs == (
                    earlier.logprobs if deterministic else pytest.approx(earlier.logprobs, abs=1e-5)
                )
    update(core, base, "0.3")
    check(requests(900), finish(core, requests(900)), [references[name] for name in ("", *SEVERAL)])


def test_an_update_in_the_middle_leaves_the_judges_version(base: Path, folders: dict[str, Path]) -> None:
    core = start(base, folders)
    asked = [replace(task(n, prompt(n, 9), 30, temperature=0.0), adapter=n) for n in (0, 1)]

    def between(cycle: int) -> None:
        if cycle == 9:
            update(core, folders["one"], "0.1")

    found = finish(core, asked, between)
    assert [span.version for span in found[0].spans] == ["0.0", "0.1"]
    assert [span.version for span in found[1].spans] == ["0.0"]
    assert found[1].tokens == finish(start(base, folders), [asked[1]])[1].tokens


def test_deterministic_rows_do_not_depend_on_other_adapters(base: Path, folders: dict[str, Path]) -> None:
    chosen = replace(task(500, prompt(3, 21), 40, temperature=0.8), adapter=1)
    core = start(base, folders, deterministic=True)
    alone = finish(core, [chosen])[500]
    crowd = [replace(task(n, prompt(n, 5 + n), 20), adapter=n % 3) for n in range(40)]
    assert finish(core, [*crowd, chosen])[500].logprobs == alone.logprobs


def test_sleep_keeps_the_adapters(base: Path, folders: dict[str, Path]) -> None:
    core = start(base, folders)
    update(core, folders["one"], "0.1")
    expected = finish(core, requests())
    core.release(frozenset({"weights", "kv_cache"}))
    with pytest.raises(EngineError, match="released"):
        core.stage_weights(folders["two"])
    core.wake(frozenset({"weights", "kv_cache"}))
    found = finish(core, requests())
    assert {n: one.tokens for n, one in found.items()} == {n: one.tokens for n, one in expected.items()}


def test_an_adapter_of_another_model_is_refused_and_changes_nothing(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    wider = save(transformers.LlamaConfig(**{**LLAMA_LIKE, "hidden_size": 48}), tmp_path / "wider")
    strange = write_adapter(wider, tmp_path / "strange", 0)
    with pytest.raises(DataError, match=r"layer model\.layers\.0\.mlp\.down_proj, \[32, 48\]"):
        start(base, folders | {"x": strange})
    output = write_adapter(base, tmp_path / "output", 0, targets=("lm_head",))
    with pytest.raises(DataError, match="lm_head, which is no linear layer inside"):
        start(base, folders | {"x": output})
    core = start(base, folders)
    before = finish(core, requests())
    with pytest.raises(EngineError, match="do not fit"):
        update(core, strange, "0.1")
    assert core.version == "0.0"
    assert finish(core, requests())[0].tokens == before[0].tokens


def test_an_adapter_of_another_base_with_the_same_layout_is_refused(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    core, other = start(base, folders), save(transformers.LlamaConfig(**LLAMA_LIKE), tmp_path / "other", seed=1)
    trained = shutil.copytree(folders["one"], tmp_path / "trained")
    (trained / SAMPLE_FILE).write_text(BaseFiles.of(other).sample())
    with pytest.raises(DataError, match="another base model"):
        update(core, trained, "0.1")
    assert core.version == "0.0"
    (trained / SAMPLE_FILE).write_text(BaseFiles.of(base).sample())
    update(core, trained, "0.1")


def test_a_policy_that_is_not_finite_leaves_the_judges_alone(
    base: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(folders["one"], tmp_path / "broken")
    save_file({name: one * float("nan") for name, one in read_adapters(broken).items()}, broken / ADAPTER_FILE)
    core = start(base, folders, deterministic=True)
    before = finish(core, requests())
    update(core, broken, "0.1")
    for number, found in finish(core, requests()).items():
        assert found.ending is not None
        if number % 3:
            assert found.logprobs == before[number].logprobs
        else:
            assert found.ending.kind == "abort"


@pytest.mark.parametrize("file", [ADAPTER_CONFIG, ADAPTER_FILE])
def test_a_judges_adapter_that_changed_since_its_submission_is_refused(
    base: Path, folders: dict[str, Path], tmp_path: Path, file: str
) -> None:
    changing = shutil.copytree(folders["x"], tmp_path / "changing")
    digests = {"x": adapter_digest(changing), "y": adapter_digest(folders["y"])}
    start(base, folders | {"x": changing}, adapter_digests=digests)
    shutil.copy(folders["one"] / file, changing / file)
    with pytest.raises(DataError, match="adapter of judge 'x' changed since the job was submitted") as error:
        start(base, folders | {"x": changing}, adapter_digests=digests)
    assert error.value.where == str(changing)


def fill(kind: str, value: float, tensors: dict[str, torch.Tensor]) -> None:
    name = min(name for name in tensors if f".lora_{kind}." in name)
    tensors[name][0, 0] = value


@pytest.mark.parametrize(("kind", "value"), [("A", float("nan")), ("B", float("inf")), ("B", 3e38)])
def test_a_judge_whose_matrices_are_not_finite_is_refused_by_its_layer(
    base: Path, folders: dict[str, Path], tmp_path: Path, kind: str, value: float
) -> None:
    broken = shutil.copytree(folders["one"], tmp_path / "broken")
    change_tensors(broken, partial(fill, kind, value))
    with pytest.raises(
        DataError, match=r"layer model\.layers\.0\.mlp\.down_proj has values that are not finite"
    ) as error:
        start(base, folders | {"x": broken})
    assert error.value.where == str(broken)


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def drop_ups(folder: Path) -> None:
    save_file({n: one for n, one in read_adapters(folder).items() if ".lora_A." in n}, folder / ADAPTER_FILE)


def drop_all(folder: Path) -> None:
    save_file({}, folder / ADAPTER_FILE)


def add_foreign(folder: Path) -> None:
    save_file({**read_adapters(folder), "base_model.model.norm.weight": torch.ones(4)}, folder / ADAPTER_FILE)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = read_adapters(folder)
    change(tensors)
    save_file(tensors, folder / ADAPTER_FILE)


FIRST = "base_model.model.model.layers.0.mlp.down_proj"


def convert(dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}.lora_A.weight"] = tensors[f"{FIRST}.lora_A.weight"].to(dtype)


def add(name: str, shape: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = torch.ones(shape)


def lose_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix(ADAPTER_PREFIX)] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(partial(convert, torch.int32), r"down_proj\.lora_A\.weight has dtype I32", id="integer"),
        pytest.param(partial(convert, torch.bool), "has dtype BOOL", id="bool"),
        pytest.param(partial(convert, torch.complex64), "has dtype C64", id="complex"),
        pytest.param(partial(add, f"{FIRST}.lora_B.bias", (4,)), "lora_B.bias is no part of a pair", id="bias"),
        pytest.param(partial(add, f"{FIRST}.lora_A", (3, 4)), "lora_A is no part of a pair", id="no-weight"),
        pytest.param(partial(add, f"{FIRST}.lora_embedding_A", (3, 4)), "embedding_A is no part", id="embedding"),
        pytest.param(partial(add, f"{FIRST}.lora_magnitude_vector", (4,)), "vector is no part", id="dora"),
        pytest.param(partial(add, f"{FIRST}.lora_A.weight", (3, 4, 1)), r"is \[3, 4, 1\]", id="three-dimensions"),
        pytest.param(lose_prefix, "is no part of a pair", id="without-prefix"),
    ],
)
def test_a_submission_refuses_each_tensor_that_the_engine_refuses(
    base: Path, folders: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    strange = shutil.copytree(folders["one"], tmp_path / "strange")
    change_tensors(strange, change)
    for load in (check_adapter, lambda folder, base: start(base, folders | {"x": folder})):
        with pytest.raises(DataError, match=said) as error:
            load(strange, base)
        assert error.value.where == str(strange / ADAPTER_FILE)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(partial(change_config, r=7), "its configuration has rank 7", id="another-rank"),
        pytest.param(partial(change_config, r=0), r"r should be a whole number above 0 \(got 0\)", id="rank-0"),
        pytest.param(
            partial(change_config, lora_alpha=float("inf")), "lora_alpha should be a finite number", id="endless-alpha"
        ),
        pytest.param(partial(change_config, use_rslora=True), "only plain LoRA", id="rslora"),
        pytest.param(partial(change_config, rank_pattern={"q_proj": 4}), "only plain LoRA", id="several-ranks"),
        pytest.param(partial(change_config, layer_replication=[[0, 2]]), "only plain LoRA", id="repeated-layers"),
        pytest.param(partial(change_config, init_lora_weights="pissa"), "only plain LoRA", id="pissa"),
        pytest.param(drop_ups, "no part of a pair", id="no-up"),
        pytest.param(drop_all, "has no matrices", id="empty"),
        pytest.param(add_foreign, "norm.weight is no part of a pair", id="foreign-tensor"),
    ],
)
@pytest.mark.parametrize("beside", [False, True], ids=["merged", "beside-judges"])
def test_an_incomplete_adapter_is_refused_and_changes_nothing(
    base: Path, folders: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], said: str, beside: bool
) -> None:
    damaged = shutil.copytree(folders["one"], tmp_path / "damaged")
    damage(damaged)
    core = start(base, folders) if beside else make_core(base, weight_version="0.0")
    before = finish(core, requests()[::3])
    with pytest.raises((EngineError, DataError), match=said):
        update(core, damaged, "0.1")
    assert core.version == "0.0"
    assert {n: one.logprobs for n, one in finish(core, requests()[::3]).items()} == {
        n: one.logprobs for n, one in before.items()
    }
    if beside:
        with pytest.raises(DataError, match=said):
            start(base, folders | {"x": damaged})


def test_an_adapter_is_added_to_a_base_whose_files_have_more_than_the_module(
    base: Path, folders: dict[str, Path], references: dict[str, Plain], tmp_path: Path
) -> None:
    older = shutil.copytree(base, tmp_path / "older")
    tensors = load_file(older / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | table, older / "model.safetensors", {"format": "pt"})
    core = make_core(older, weight_version="0.0")
    update(core, folders["one"], "0.1")
    asked = [task(1, prompt(3, 9), 8, temperature=0.0)]
    check(asked, finish(core, asked), [references["one"]])


def test_an_adapter_is_added_to_a_base_whose_files_name_its_experts_one_by_one(tmp_path: Path) -> None:
    base = save(transformers.Qwen3MoeConfig(**LLAMA_LIKE, **EXPERTS), tmp_path / "base")
    folders = [write_adapter(base, tmp_path / f"{seed}", seed, targets=("q_proj", "v_proj")) for seed in (1, 2)]
    core = make_core(base, weight_version="0.0")
    served = []
    for folder in (merge(base, folders[0]), *folders, folders[0]):
        update(core, folder, "0.1")
        served.append({name: one.clone() for name, one in core.model.module.state_dict().items()})
    merged, alone, _, again = served
    assert all(torch.equal(one, alone[name]) and torch.equal(one, again[name]) for name, one in merged.items())


def test_an_adapter_of_the_output_layer_is_refused_before_an_engine_starts(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(base, tmp_path / "head", 1, targets=("lm_head",))
    with pytest.raises(DataError, match=r"changes the output layer \(lm_head\)"):
        check_adapter(folder, base)


def test_the_base_under_adapters_cannot_be_replaced(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    other = save(transformers.LlamaConfig(**LLAMA_LIKE), tmp_path / "other", seed=1)
    core = start(base, folders)
    with pytest.raises(EngineError, match=r"serves adapters on them \(x, y\)"):
        core.stage_weights(other)
    broadcast = StagedWeights({"lm_head.weight": torch.zeros(1)})
    with pytest.raises(EngineError, match="cannot be replaced"):
        core.change_weights(broadcast, "0.1", flush=True, abort=True)
    assert core.version == "0.0"


def test_engines_that_serve_no_adapters_refuse_them_at_the_start(base: Path, folders: dict[str, Path]) -> None:
    launch = EngineLaunch(model=str(base), device="cpu", adapters={"x": str(folders["x"])})
    with pytest.raises(UsageError, match="no adapters"):
        start_hf(launch, None)
    with pytest.raises(UsageError, match="no adapters"):
        start_core(launch.model_copy(update={"task": "classify"}), None)


async def test_requests_of_an_engine_process_name_its_adapters(
    base: Path, folders: dict[str, Path], references: dict[str, Plain]
) -> None:
    named = ",".join(f"{name}={folders[name]}" for name in SEVERAL)
    ids = prompt(3, 9)
    with engine_process(base, device="cpu", batch_slots=4, adapters=named, weight_version="0.0") as url:
        client = EngineClient(url, timeout_s=60)
        try:
            await client.update_weights(str(folders["one"]), Version(0, 1))
            params = [SamplingParams(0.0, 6, adapter=name) for name in (None, *SEVERAL)]
            found = await client.generate_each([ids] * 3, params, seeds=[1, 2, 3], rid="r")
            assert [sample.spans[0].version for sample in found] == [Version(0, 1), Version(0, 0), Version(0, 0)]
            for name, sample in zip(("one", *SEVERAL), found, strict=True):
                table = references[name].table([*ids, *sample.token_ids])[len(ids) - 1 : -1]
                assert table.argmax(-1).tolist() == list(sample.token_ids)
            with pytest.raises(EngineError, match=r"'z', which this engine does not have \(it has x, y"):
                await client.generate(ids, SamplingParams(0.0, 6, adapter="z"), seeds=[1], rid="s")
        finally:
            await client.close()


@pytest.mark.parametrize("given", ["x", "x=", "=folder", "x=folder,", "x=a,x=b"])
def test_adapters_of_a_command_line_need_names_and_folders(given: str) -> None:
    with pytest.raises(UsageError, match="adapters"):
        parse_arguments(EngineLaunch, "engine", ["--model", "m", "--adapters", given])
