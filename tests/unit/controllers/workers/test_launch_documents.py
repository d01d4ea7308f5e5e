"""The launch documents of a node's workers: the same values for either engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.api.submission.checks import adapter_digests
from controllers.api.submission.nodes import check_engine, check_offload, local_warning
from controllers.workers.launch_documents import (
    ENGINE_COMMANDS,
    START_LIMITS_S,
    EngineMissing,
    access_settings,
    engine_document,
    interface_env,
    serving_tls,
)
from gcore.api.tls import PLAIN, Connector
from gcore.config import JobSpec, NodeConfig, parse_spec
from gcore.config.capabilities import PICTURE_ENGINES
from gcore.config.load import apply_flow_settings
from gcore.config.node import TlsSection
from gcore.engines import launch as sglang_launch
from gcore.engines import launch as torch_launch
from gcore.engines.environments import EngineEnvironment
from gcore.engines.launch import VllmLaunch, parse_launch
from gcore.engines.vllm.command import program
from gcore.errors import SpecError, UsageError
from gcore.ledger.records.job import EnginePlace, JobRecord, NodeRecord
from gcore.models.layout import adapter_digest
from gcore.store.reference import StoreRef

CONFIG = NodeConfig(
    node="n",
    home="/h",
    etcd=StoreRef(endpoints=("h:1",)),
    slots=("cpu:0",),
    run_root="/r",
    sglang_python="/p",
    vllm_python="/v",
)


def test_where_a_node_has_certificates_its_workers_serve_with_them_and_each_engine_has_a_key() -> None:
    files = {"ca": "/ca.pem", "cert": "/cert.pem", "key": "/key.pem"}
    config = CONFIG.model_copy(update={"tls": TlsSection(**files, engines_key="/e"), "train_interface": "eth1"})
    connector = Connector(engines=b"e" * 32)
    told = {name: access_settings(config, connector, "rollout", name) for name in ("one", "two")}
    assert told["one"]["tls"] == files
    assert told["one"]["api_key"] != told["two"]["api_key"]
    assert parse_launch(torch_launch.EngineLaunch, {"model": "/m", **told["one"]}).tls == serving_tls(config)
    assert parse_launch(sglang_launch.SglangLaunch, {"model": "/m", "python": "/p", **told["one"]}).tls == serving_tls(
        config
    )
    assert access_settings(config, connector, "train", "rank") == {"tls": files}
    assert interface_env(config) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert access_settings(CONFIG, PLAIN, "rollout", "one") == interface_env(CONFIG) == {}


def spec(**rollout: Any) -> JobSpec:
    tree = {"name": "j", "model": {"path": "/m", "max_length": 500, "trust_remote_code": True}, "data": {"path": "d"}}
    return parse_spec({**tree, "flow": {"steps": 1}, "rollout": {"max_new_tokens": 4} | rollout})


def place(slot: str, judge: str = "") -> EnginePlace:
    return EnginePlace(node="n", slot=slot, judge=judge)


TOLD: dict[str, Any] = {"batch_slots": 9, "cache_tokens": 800, "prefill_chunk_tokens": 33}


def check_common(read: Any) -> None:
    assert {name: getattr(read, name) for name in TOLD} == TOLD
    assert (read.model, read.context_length, read.trust_remote_code) == ("/m", 500, True)
    assert (read.host, read.port, read.weight_version) == ("127.0.0.1", 0, "0.0")


@pytest.mark.parametrize(("slot", "dtype", "device"), [("cpu:1", "float32", "cpu"), ("cuda:3", "bfloat16", "cuda")])
def test_the_torch_engine_reads_what_it_is_told(slot: str, dtype: str, device: str) -> None:
    child = engine_document(spec(deterministic=True, **TOLD), place(slot), CONFIG)
    assert child.command == ENGINE_COMMANDS["torch"]
    read = parse_launch(torch_launch.EngineLaunch, child.document)
    check_common(read)
    assert (read.dtype, read.device, read.deterministic) == (dtype, device, True)
    assert child.env["CUDA_VISIBLE_DEVICES"] == ("3" if device == "cuda" else "")


def test_the_hugging_face_engine_gets_the_settings_of_the_torch_engine() -> None:
    child = engine_document(spec(engine="hf", **TOLD), place("cpu:1"), CONFIG)
    assert child.command == ENGINE_COMMANDS["hf"]
    assert child.document == engine_document(spec(**TOLD), place("cpu:1"), CONFIG).document


@pytest.mark.parametrize(("slot", "dtype", "device"), [("cpu:1", "float32", "cpu"), ("cuda:3", "bfloat16", "cuda")])
def test_sglangs_worker_reads_what_it_is_told(slot: str, dtype: str, device: str) -> None:
    child = engine_document(spec(engine="sglang", engine_args=["--x", "1"], **TOLD), place(slot), CONFIG)
    assert child.command == ENGINE_COMMANDS["sglang"]
    read = parse_launch(sglang_launch.SglangLaunch, child.document)
    check_common(read)
    assert (read.dtype, read.device, read.python, read.engine_args) == (dtype, device, "/p", ("--x", "1"))
    assert child.env["CUDA_VISIBLE_DEVICES"] == ("3" if device == "cuda" else "")
    assert child.start_limit_s == START_LIMITS_S["sglang"] > START_LIMITS_S["torch"]


@pytest.mark.parametrize(("slot", "device"), [("cpu:1", "cpu"), ("cuda:3", "cuda")])
@pytest.mark.parametrize("engine", PICTURE_ENGINES)
def test_engines_of_pictures_get_the_settings_of_the_job(engine: str, slot: str, device: str) -> None:
    asked = {"engine": engine, "diffusion": {"guidance": 2.0, "height": 16, "width": 32}}
    arguments = ["--x", "1"] if engine == "sglang-diffusion" else []
    tree: dict[str, Any] = {"name": "j", "model": {"path": "/m"}}
    tree |= {"data": {"path": "d"}, "flow": {"name": "flow_grpo", "steps": 1}, "reward": {"name": "/r.py:r"}}
    tree["rollout"] = {**asked, **TOLD, "cache_tokens": None, "engine_args": arguments}
    child = engine_document(parse_spec(apply_flow_settings(tree)), place(slot), CONFIG)
    assert child.command == ENGINE_COMMANDS[engine]
    read: torch_launch.DenoisingLaunch
    if engine == "diffusers":
        read = parse_launch(torch_launch.DiffusersLaunch, child.document)
        assert read.dtype == ("bfloat16" if device == "cuda" else "float32")
    else:
        read = parse_launch(torch_launch.SglangDiffusionLaunch, child.document)
        assert (read.python, read.engine_args, read.dtype) == ("/p", ("--x", "1"), "float32")
    assert (read.model, read.guidance, read.height, read.width) == ("/m", 2.0, 16, 32)
    assert read.device == device
    assert child.env["CUDA_VISIBLE_DEVICES"] == ("3" if device == "cuda" else "")


def test_a_node_without_sglang_says_so_and_what_to_do() -> None:
    bare = CONFIG.model_copy(update={"sglang_python": None})
    with pytest.raises(EngineMissing, match=r"node n has no SGLang.*make sglang-setup"):
        engine_document(spec(engine="sglang"), place("cpu:0"), bare)
    assert engine_document(spec(), place("cpu:0"), bare).command == ENGINE_COMMANDS["torch"]


def test_a_judges_engine_is_told_of_the_judges_model_and_not_of_the_policys() -> None:
    judge = {"name": "sums", "model": {"path": "/judge", "max_length": 90}, "template": "{{ prompt }}{{ response }}"}
    served = judge | {"serving": {"batch_slots": 3, "engine": "sglang", "engine_args": ["--y", "2"]}}
    tree = spec().model_dump(mode="json")
    for one, command, slots in ((judge, "torch", 64), (served, "sglang", 3)):
        job = parse_spec(tree | {"judges": [one], "reward": {"judge": "sums"}})
        child = engine_document(job, place("cpu:0", "sums"), CONFIG)
        assert child.command == ENGINE_COMMANDS[command]
        told = child.document
        assert (told["model"], told["context_length"], told["batch_slots"]) == ("/judge", 90, slots)
        assert told["trust_remote_code"] is False
        assert engine_document(job, place("cpu:0"), CONFIG).document["model"] == "/m"


@pytest.mark.parametrize(("engine", "deterministic"), [("torch", True), ("hf", False)])
def test_only_the_torch_engine_of_a_judge_is_deterministic_with_the_policy(engine: str, deterministic: bool) -> None:
    judge = {"name": "sums", "model": {"path": "/judge"}, "template": "{{ prompt }}", "serving": {"engine": engine}}
    tree = spec(deterministic=True).model_dump(mode="json")
    job = parse_spec(tree | {"judges": [judge], "reward": {"judge": "sums"}})
    assert engine_document(job, place("cpu:0", "sums"), CONFIG).document["deterministic"] is deterministic


def node(name: str, **engines: bool) -> NodeRecord:
    return NodeRecord(name=name, incarnation=name, address="h:1", slots=("cpu:0",), pid=1).model_copy(update=engines)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        pytest.param([node("a", sglang=False), node("b", sglang=False)], "no node has SGLang", id="none has it"),
        pytest.param([node("a", sglang=True), node("b", sglang=False)], "SGLang is missing on b", id="one has not"),
        pytest.param([], "no node has SGLang", id="there is none"),
    ],
)
def test_a_job_that_wants_sglang_is_refused_where_it_is_missing(nodes: list[NodeRecord], words: str) -> None:
    with pytest.raises(SpecError, match=rf"rollout\.engine: {words}.*GCORE_SGLANG_PYTHON.*rollout\.engine: torch"):
        check_engine(spec(engine="sglang"), nodes)
    check_engine(spec(), nodes)


def test_a_job_that_wants_sglang_is_taken_where_all_nodes_have_it() -> None:
    check_engine(spec(engine="sglang"), [node("a", sglang=True), node("b", sglang=True)])


def test_a_job_that_wants_sglangs_diffusion_server_is_refused_where_its_packages_are_missing() -> None:
    tree: dict[str, Any] = {"name": "j", "model": {"path": "/m"}, "data": {"path": "d"}}
    tree |= {"flow": {"name": "flow_grpo", "steps": 1}, "reward": {"name": "/r.py:r"}}
    wants = parse_spec(apply_flow_settings(tree | {"rollout": {"engine": "sglang-diffusion"}}))
    with pytest.raises(SpecError, match=r"diffusion server is missing on b.*Or set rollout\.engine: diffusers"):
        check_engine(wants, [node("a", sglang=True, sglang_diffusion=True), node("b", sglang=True)])
    check_engine(wants, [node("a", sglang=True, sglang_diffusion=True)])


def test_vllm_is_started_as_a_program_of_its_own_python_with_the_settings_of_the_job() -> None:
    child = engine_document(spec(engine="vllm", engine_args=["--x", "1"], **TOLD), place("cuda:3"), CONFIG)
    assert child.command == ("/v", "-P", program())
    assert Path(program()).is_file()
    read = parse_launch(VllmLaunch, child.document)
    check_common(read)
    assert (read.dtype, read.device, read.gpus, read.engine_args) == ("bfloat16", "cuda", 1, ("--x", "1"))
    bare = CONFIG.model_copy(update={"vllm_python": None})
    with pytest.raises(EngineMissing, match=r"node n has no vLLM.*make vllm-setup.*0\.32\.\*"):
        engine_document(spec(engine="vllm"), place("cpu:0"), bare)


def test_a_job_that_wants_vllm_is_refused_where_vllm_cannot_do_it() -> None:
    wants = spec(engine="vllm")
    with pytest.raises(SpecError, match=r"rollout\.engine: vLLM is missing on b.*GCORE_VLLM_PYTHON"):
        check_engine(wants, [node("a", vllm=True), node("b", sglang=True)])
    check_engine(wants, [node("a", vllm=True)])
    turns = parse_spec(wants.model_dump(mode="json") | {"placement": {"policy": "colocated", "memory": "in_turns"}})
    with pytest.raises(SpecError, match=r"placement\.memory: vLLM cannot release its memory on the CPU slots of a"):
        check_engine(turns, [node("a", vllm=True)])
    other = parse_spec(turns.model_dump(mode="json") | {"rollout": {"max_new_tokens": 4, "engine": "sglang"}})
    with pytest.raises(SpecError, match=r"placement\.memory: SGLang cannot release its memory on the CPU slots of a"):
        check_engine(other, [node("a", sglang=True)])


def test_the_policys_engine_gets_the_adapters_of_judges_and_their_digests() -> None:
    tree = spec().model_dump(mode="json", exclude_unset=True)
    judge = {"name": "taste", "adapter": "/a", "template": "{{ response }}"}
    judged = parse_spec(
        {**tree, "judges": [judge], "reward": {"judge": "taste"}, "train": {"lora": {"publish": "adapter"}}}
    )
    digests = {"taste": "5" * 64}
    read = parse_launch(torch_launch.EngineLaunch, engine_document(judged, place("cpu:0"), CONFIG, digests).document)
    assert (read.adapters, read.adapter_digests) == ({"taste": "/a"}, digests)
    assert "adapter_digests" not in engine_document(spec(), place("cpu:0"), CONFIG, {}).document


def test_a_job_records_the_digests_of_its_judges_adapters(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    found = SimpleNamespace(name="taste", adapter=str(tmp_path)), SimpleNamespace(name="other", adapter=None)
    digests = adapter_digests(found)  # type: ignore[arg-type]
    assert digests == {"taste": adapter_digest(tmp_path)}
    record = JobRecord(uid="u", name="n", spec={}, run_dir="/r", created=0.0, prompts=1, adapter_digests=digests)
    assert JobRecord.decode(record.encode()) == record
    assert JobRecord.decode(record.encode(2)).adapter_digests == {}


@pytest.mark.parametrize("slots", [(), ("cuda:0",), ("cpu:0", "cuda:0"), ("emulated:0", "emulated:1")])
def test_train_state_may_move_to_host_memory_where_there_may_be_gpus(slots: tuple[str, ...]) -> None:
    check_offload(offloading(), slots)


def test_train_state_cannot_move_to_host_memory_on_cpu_slots() -> None:
    with pytest.raises(SpecError, match=r"train\.offload_state: .*all slots are CPU slots\. Leave it out"):
        check_offload(offloading(), ("cpu:0", "cpu:1-3"))
    check_offload(spec(), ("cpu:0",))


def offloading() -> JobSpec:
    return parse_spec(spec().model_dump(mode="json") | {"train": {"backend": "fsdp2", "offload_state": True}})


def test_validation_only_warns_for_the_job_may_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineEnvironment, "find", lambda self: None)
    assert "vLLM was not found on this machine" in (local_warning(spec(engine="vllm")) or "")
    assert "SGLang was not found on this machine" in (local_warning(spec(engine="sglang")) or "")
    assert local_warning(spec()) is None


def test_a_variable_that_names_nothing_is_an_error_not_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCORE_SGLANG_PYTHON", "/nowhere")
    with pytest.raises(UsageError, match="there is no such Python"):
        local_warning(spec(engine="sglang"))
