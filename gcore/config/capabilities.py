"""What each engine and each train backend can do, as the documents show it and as specs are validated.

A setting that needs a capability names the engines or backends that have it in its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def _row(words: str, otherwise: Any = MISSING) -> Any:
    """A field with the words of its row in the documents' table. `otherwise`: its value if it is not given."""
    return field(default=otherwise, metadata={"row": words})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The abilities of an engine; what is not given, it lacks. Text says under which condition."""

    devices: str = _row("runs on")
    several_slots: bool = _row("one engine on several slots of a node (`slots_per_engine`)", False)
    several_nodes: bool = _row("one engine on several nodes", False)
    arguments: bool = _row("command-line arguments of its own (`engine_args`)", False)
    deterministic: bool = _row("the same response whatever else is in the batch (`rollout.deterministic`)", False)
    abort: bool = _row("an abort returns the tokens so far, with log-probabilities", False)
    partial: bool = _row("reports partial responses (`rollout.told_every`)", False)
    versions: bool = _row("records which weights made which tokens of a response", False)
    updates: str = _row("weight updates")
    sleeps_on: tuple[str, ...] = _row("releases its memory and restores it (`placement.memory: in_turns`)")
    classifiers: bool = _row("serves classifiers as judges", False)
    adapters: bool = _row("loads adapters alone (`train.lora.publish: adapter`)", False)
    judge_adapters: bool = _row("serves judges that are adapters of the policy's model (`judges[].adapter`)", False)
    judge_pictures: bool = _row("serves judges that see pictures (`judges[].images`)", False)
    generates_pictures: bool = _row("generates pictures (`rollout.diffusion`), and no texts", False)
    pictures: str = _row("pictures in prompts", "")
    turn_pictures: bool = _row(
        "pictures in responses of several turns, such as those of tools (`environment.tools.max_pictures`)", False
    )
    partial_updates: bool = _row("gets only what is trained (`train.freeze`)", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCapabilities:
    """The abilities of a train backend. Text says how."""

    package: str = _row("Python package")
    split: str = _row("divided among ranks at `train.zero_stage` 1, 2, 3")
    reduction: str = _row("gradients are reduced in")
    offload_state: bool = _row("weights, gradients and Adam's state in host memory (`train.offload_state`, GPUs only)")
    adapters: bool = _row("adapters (`train.lora`)")
    checkpointing: bool = _row("activation checkpointing")
    rest: bool = _row("releases its memory between steps (`placement.memory: in_turns`)")
    replicas: bool = _row("replicas in memory, and worlds that grow and shrink")
    exchange: bool = _row("continues checkpoints and replicas of the other backend")
    sequence_parallel: bool = _row("sequence parallelism (`train.sequence_parallel`)")


ENGINES: Mapping[str, EngineCapabilities] = {
    "torch": EngineCapabilities(
        devices="CPU, or one GPU",
        deterministic=True,
        abort=True,
        partial=True,
        versions=True,
        updates="folder, broadcast",
        sleeps_on=("CPU", "GPU"),
        classifiers=True,
        adapters=True,
        judge_adapters=True,
        judge_pictures=True,
        pictures="yes",
        turn_pictures=True,
        partial_updates=True,
    ),
    "sglang": EngineCapabilities(
        devices="CPU, or GPUs",
        several_slots=True,
        arguments=True,
        abort=True,
        partial=True,
        versions=True,
        updates="folder, broadcast",
        sleeps_on=("GPU",),
        classifiers=True,
        pictures="Qwen3-VL",
    ),
    "vllm": EngineCapabilities(
        devices="CPU, or GPUs",
        several_slots=True,
        arguments=True,
        abort=True,
        partial=True,
        versions=True,
        updates="folder, broadcast",
        sleeps_on=("GPU",),
        adapters=True,
    ),
    "hf": EngineCapabilities(
        devices="CPU, or one GPU",
        abort=True,
        partial=True,
        versions=True,
        updates="folder, broadcast",
        sleeps_on=("CPU", "GPU"),
        adapters=True,
        pictures="yes",
        turn_pictures=True,
        partial_updates=True,
    ),
    "diffusers": EngineCapabilities(
        devices="CPU, or one GPU",
        versions=True,
        updates="folder",
        sleeps_on=("CPU", "GPU"),
        generates_pictures=True,
    ),
    "sglang-diffusion": EngineCapabilities(
        devices="CPU, or one GPU",
        arguments=True,
        versions=True,
        updates="folder",
        sleeps_on=("GPU",),
        generates_pictures=True,
    ),
}

PICTURE_ENGINES = tuple(name for name, engine in ENGINES.items() if engine.generates_pictures)
"""Engines whose responses are pictures."""

PICTURE_MODELS: Mapping[str, tuple[str, ...]] = {"sglang": ("qwen3_vl",)}
"""By engine: the model types of which it serves pictures. Other engines that serve pictures do so for all types that gcore
supports (`gcore.media.placeholders`)."""

PICTURE_CLASSIFIERS = ("gemma3", "qwen3_5")
"""The model types of classifiers that see pictures. transformers has sequence-classification heads with pictures for no
other type that gcore supports."""

PICTURE_SCORERS = ("clip",)
"""The model types of classifiers that score a picture, with a text or alone: CLIP scores, PickScore, HPSv2, and heads on
embeddings of pictures."""

BACKENDS: Mapping[str, BackendCapabilities] = {
    "deepspeed": BackendCapabilities(
        package="deepspeed",
        split="Adam's state; also gradients; also weights",
        reduction="`train.dtype`",
        offload_state=False,
        adapters=True,
        checkpointing=True,
        rest=True,
        replicas=True,
        exchange=True,
        sequence_parallel=True,
    ),
    "fsdp2": BackendCapabilities(
        package="torch",
        split="everything, at each stage",
        reduction="float32",
        offload_state=True,
        adapters=True,
        checkpointing=True,
        rest=True,
        replicas=True,
        exchange=True,
        sequence_parallel=True,
    ),
}


def having(known: Mapping[str, Any], capability: str) -> str:
    """Name the engines or backends of `known` that have a capability, for a sentence."""
    *first, last = [name for name, can in known.items() if getattr(can, capability)]
    return f"{', '.join(first)} or {last}" if first else last


def lacking(known: Mapping[str, Any], word: str, name: str, settings: Mapping[str, tuple[str, bool]]) -> Iterator[str]:
    """Yield a sentence for each setting that is used and needs a capability that `name` lacks.

    `known`: `ENGINES` or `BACKENDS`; `word`: the key that selects one, engine or backend. `settings`: by the name of the
    setting, the capability that it needs, and whether the spec uses it.
    """
    for setting, (capability, used) in settings.items():
        if used and not getattr(known[name], capability):
            yield f"{setting} needs {word}: {having(known, capability)}, not {name}; set it, or leave {setting} out"


def table(known: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the documents' table: a capability in words, and what each engine or backend says of it."""
    for one in fields(next(iter(known.values()))):
        yield one.metadata["row"], *(_cell(getattr(can, one.name)) for can in known.values())


def _cell(value: bool | str | tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value or "no" if isinstance(value, str) else " and ".join(value)
