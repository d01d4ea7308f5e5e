"""Engine: what a controller knows of an inference engine. `EngineClient` implements it over HTTP; tests use `gcore.testing.engines`.

Every method is one exchange with the engine, or a few in the order given. An engine that does not answer raises
`EngineUnreachable`: the request may go to another one. An engine that refuses raises `EngineError` with its own sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gcore.types import Sample, Version

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled. `temperature` 0 is greedy; `top_k` None keeps the whole vocabulary."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgressCallback:
    """Reports samples as they grow: every so many tokens all that there is of one, and its index in the request.

    A sample that still grows has the finish reason "abort".
    """

    every: int
    tell: Callable[[int, Sample], None]


@dataclass(frozen=True, slots=True)
class TransferManifest:
    """Tensors that are sent, in order. `dtypes` as in torch, without "torch."; the fields of the HTTP request."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """The weights of `version` are in `folder`, relative to the run's, as a model that engines load."""

    version: Version
    folder: str


@dataclass(frozen=True, slots=True)
class BroadcastUpdate:
    """The weights of `version` come over the weight group `group`, once the engines take part in it."""

    version: Version
    group: str
    manifest: TransferManifest


WeightUpdate = FolderUpdate | BroadcastUpdate
"""How engines get the weights of a version."""


class Engine(Protocol):
    """One engine."""

    @property
    def base_url(self) -> str:
        """Where it is, for error messages."""
        ...

    async def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int],
        rid: str,
        growing: ProgressCallback | None = None,
    ) -> tuple[Sample, ...]:
        """One sample a prompt, as one request, each with its seed; answers in the order of the prompts.

        `params`: of all, or of each. Sample `i` is called f"{rid}-{i}" there. An aborted sample comes back with the tokens it
        has and finish reason "abort". Log-probabilities are float32 values.
        """
        ...

    async def classify(self, questions: Sequence[Sequence[int]], *, rid: str) -> tuple[float, ...]:
        """A classifier's score of each question, in order. Raises EngineGaveUp if one of them was aborted."""
        ...

    async def abort(self, rid: str, count: int) -> None:
        """End the `count` samples of the request called `rid`; they come back with the tokens they have."""
        ...

    async def update_weights(self, path: str, version: Version) -> None:
        """Serve the weights in folder `path`, called `version`, from the next token on. Running requests go on under them."""
        ...

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Make no more tokens: end what runs, take it back into the queue, or leave it in place."""
        ...

    async def resume(self) -> None:
        """Make tokens again."""
        ...

    async def sleep(self) -> None:
        """Release the memory of cache and weights. Running requests come back with the tokens they have. Idempotent."""
        ...

    async def take_memory(self) -> None:
        """Take the memory again that `sleep` released. No tokens are made before `wake` or `update_weights`."""
        ...

    async def wake(self, version: Version) -> None:
        """Take the memory again of an engine whose weights never change and are called `version`, and make tokens."""
        ...

    async def sleeps(self) -> bool:
        """Whether it was put to sleep."""
        ...

    async def released(self) -> bool:
        """Whether any of its memory is released. Raises EngineMemoryUnknown."""
        ...

    async def load(self) -> tuple[int | None, int | None]:
        """Sequences that run, and that wait; None where the engine keeps no metrics."""
        ...

    async def served(self) -> Version | None:
        """The served version; None for weights that no commit made."""
        ...

    async def scheduler_state(self) -> Mapping[str, Any]:
        """State of the engine's scheduler; an answer shows that it makes progress."""
        ...

    async def metrics(self) -> str:
        """Prometheus text; empty where it exports no metrics."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
