"""The launch documents of this node's workers: the command and the settings with which a worker's child process is
started.

All engines get the same settings under the same names, as far as they have them; `rollout.engine` selects the
engine. `controllers.workers.launcher` starts the processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gcore.api.tls import Connector, ServingTls
from gcore.config.node import NodeConfig
from gcore.config.spec import JobSpec
from gcore.engines.emulated.launch import HostLaunch, PlacedEngine, ServedJudge, is_emulated
from gcore.engines.environments import ENVIRONMENTS
from gcore.engines.vllm.command import program
from gcore.errors import GcoreError
from gcore.ledger.records.job import EnginePlace
from gcore.models.layout import FIRST_WEIGHTS
from gcore.system.slots import count_threads, is_cuda
from placement.slots import sizes_of

ENGINE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "torch": (sys.executable, "-P", "-m", "gcore.engines.torch"),
    "sglang": (sys.executable, "-P", "-m", "gcore.engines.sglang"),
    "hf": (sys.executable, "-P", "-m", "gcore.engines.hf"),
    "diffusers": (sys.executable, "-P", "-m", "gcore.engines.diffusers"),
    "sglang-diffusion": (sys.executable, "-P", "-m", "gcore.engines.sglang_diffusion"),
}
"""Commands of the engines that start with this Python."""

RANK_COMMAND = (sys.executable, "-P", "-m", "gcore.train")
# The former module name, kept for compatibility; the code is in `gcore.engines.emulated.rank`.
EMULATED_RANK_COMMAND = (sys.executable, "-P", "-m", "gcore.emulated.rank")

START_LIMITS_S: Mapping[str, float] = {
    "torch": 600.0,
    "hf": 600.0,
    "diffusers": 1800.0,
    "sglang": 1800.0,
    "sglang-diffusion": 1800.0,
    "vllm": 1800.0,
}
"""Maximum time from an engine's start to its serving. SGLang and vLLM load big models and capture CUDA graphs."""


class EngineMissing(GcoreError):
    """Raised if a job needs an engine on a node that does not have it."""


@dataclass(frozen=True, slots=True)
class LaunchDocument:
    """How a worker's child process is started: command, settings (`document`), additional environment variables, and
    the maximum seconds until it must serve."""

    command: tuple[str, ...]
    document: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    start_limit_s: float = START_LIMITS_S["torch"]


def engine_document(
    spec: JobSpec, place: EnginePlace, config: NodeConfig, adapter_digests: Mapping[str, str] = {}
) -> LaunchDocument:
    """The launch document of an engine, for the policy or for a judge, on slots of the node of `config`. Raises EngineMissing.

    `adapter_digests`: as of `JobRecord`.
    """
    judge = next((one for one in spec.judges if one.name == place.judge), None)
    model, serving = (spec.model, spec.rollout) if judge is None else (judge.model, judge.serving)
    assert model is not None
    cuda = is_cuda(place.slot)
    document: dict[str, Any] = {
        "model": model.path,
        "host": config.workers_listen_on,
        "port": 0,
        "batch_slots": serving.batch_slots,
        "cache_tokens": serving.cache_tokens,
        "prefill_chunk_tokens": serving.prefill_chunk_tokens,
        "context_length": model.max_length,
        "dtype": "bfloat16" if cuda else "float32",
        "device": "cuda" if cuda else "cpu",
        "threads": count_threads(place.slots),
        "trust_remote_code": model.trust_remote_code,
        "weight_version": str(FIRST_WEIGHTS),
        "task": "classify" if judge is not None and judge.kind == "classifier" else "generate",
    }
    if serving.engine in ("torch", "hf"):
        # A judge's engine need not be of the kind that can be deterministic.
        deterministic = spec.rollout.deterministic and serving.engine == "torch"
        document |= {"kind": "engine", "deterministic": deterministic}
        if judge is None and spec.judge_adapters:
            document["adapters"] = spec.judge_adapters
            document["adapter_digests"] = dict(adapter_digests)
        command = ENGINE_COMMANDS[serving.engine]
    elif serving.engine == "diffusers":
        document |= {"kind": "diffusers", "average": spec.train.averages}
        command = ENGINE_COMMANDS["diffusers"]
    else:
        environment = ENVIRONMENTS[serving.engine]
        python = config.vllm_python if serving.engine == "vllm" else config.sglang_python
        if python is None:
            key = "rollout.engine" if judge is None else f"the engine of judge {judge.name!r}"
            missing = f"{key} is {serving.engine}, but node {config.node} has no {environment.name}"
            raise EngineMissing(missing, fix=environment.how)
        document |= {"kind": serving.engine, "engine_args": list(serving.engine_args)}
        if serving.engine == "vllm":
            command = (python, "-P", program())
        else:
            command = ENGINE_COMMANDS[serving.engine]
            document["python"] = python
        if serving.engine == "sglang-diffusion":
            document["dtype"] = "float32"  # SGLang rounds states to the network's type
        else:
            document["gpus"] = len(place.slots) if cuda else 1
    if judge is None and spec.rollout.diffusion is not None:
        how = spec.rollout.diffusion
        document |= {"guidance": how.guidance, "height": how.height, "width": how.width}
    return LaunchDocument(command, document, device_env(*place.slots), START_LIMITS_S[serving.engine])


def emulated_engine(place: EnginePlace, host: str) -> PlacedEngine:
    """An emulated engine at this place of the plan, with its own instance name. `host`: name of the process that hosts
    it."""
    role, judge = ("reward", f"-{place.judge}") if place.judge else ("rollout", "")
    instance = f"{role}-{host}{judge}-{place.slot.rpartition(':')[2]}"
    return PlacedEngine(instance=instance, slot=place.slot, judge=place.judge, further=place.further)


def emulated_host(
    spec: JobSpec,
    config: NodeConfig,
    job_uid: str,
    name: str,
    engines: tuple[PlacedEngine, ...],
    blobs: tuple[str, str] = ("", ""),
) -> HostLaunch:
    """The settings of the single process that hosts a node's emulated engines, of the policy and of judges. `name`: of
    the process. `blobs`: base URL of the node's blob store, and the job's key for it; empty for a job without pictures."""
    asked = {engine.judge for engine in engines}
    judges = tuple(
        ServedJudge(
            name=judge.name,
            model=judge.model.path,
            rows=judge.serving.batch_slots,
            longest=judge.max_new_tokens,
            verdict=judge.verdict.model_dump(mode="json"),
        )
        for judge in spec.judges
        if judge.name in asked and judge.model is not None
    )
    drawn = spec.rollout.diffusion
    pictures = {} if drawn is None else {"guidance": drawn.guidance, "height": drawn.height, "width": drawn.width}
    return HostLaunch(
        **pictures,
        name=name,
        node=config.node,
        job_uid=job_uid,
        store=config.etcd,
        engines=engines,
        model=spec.model.path,
        host=config.workers_listen_on,
        tls=serving_tls(config),
        rows=spec.rollout.batch_slots,
        longest=spec.rollout.max_new_tokens,
        judges=judges,
        slots=config.slots,
        widest=sizes_of(spec).widest,
        weight_version=str(FIRST_WEIGHTS),
        blob_store=blobs[0],
        blob_key=blobs[1],
        lease_ttl_s=config.lease_ttl_s,
        orphan_grace_s=config.orphan_grace_s,
    )


def access_settings(config: NodeConfig, connector: Connector, role: str, instance: str) -> dict[str, Any]:
    """The settings by which a worker restricts access: the certificate of its node, and the API key of an engine."""
    secrets: dict[str, Any] = {}
    if (tls := serving_tls(config)) is not None:
        secrets["tls"] = tls.model_dump()
    if role != "train" and (key := connector.engine_key(instance)) is not None:
        secrets["api_key"] = key
    return secrets


def serving_tls(config: NodeConfig) -> ServingTls | None:
    """The certificate with which a node's workers serve."""
    return None if config.tls is None else ServingTls(ca=config.tls.ca, cert=config.tls.cert, key=config.tls.key)


def interface_env(config: NodeConfig) -> dict[str, str]:
    """Environment variables that select the network interface for gradient exchange, if it is configured."""
    name = config.train_interface
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def rank_command(slot: str) -> tuple[str, ...]:
    """The command that starts a train rank on this slot."""
    return EMULATED_RANK_COMMAND if is_emulated(slot) else RANK_COMMAND


def device_env(*slots: str) -> dict[str, str]:
    """Environment variables that restrict a worker to the devices of its slots, in their order and with the driver's
    numbering, and that disable downloads from model hubs."""
    seen = ",".join(slot.removeprefix("cuda:") for slot in slots if is_cuda(slot))
    return {"CUDA_VISIBLE_DEVICES": seen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HF_HUB_OFFLINE": "1"}
