"""Interface through which a controller uses an engine (an inference server).

`EngineClient` implements it over HTTP; tests use `gcore.testing.engines`.

Every method sends one request to the engine, or a few one after the other. An engine that does not respond raises
`EngineUnreachable`; the request may go to another engine. An engine that refuses a request raises `EngineError` with
its own message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from gcore.errors import EngineError
from gcore.media.protocol import blob_path
from gcore.types import Medium, Sample, Version

PauseMode = Literal["abort", "retract", "in_place"]
"""Effect of a pause on running requests: abort them, put them back into the queue, or keep them in place."""


class PicturesUnavailable(EngineError):
    """The blob store of the engine's node could not get a picture of the request. A new request may succeed."""


@dataclass(frozen=True, slots=True)
class RequestPictures:
    """The pictures of a request, as blobs, in order. `short`: number of tokens of the prompt with one image token for
    each picture; `token_ids`: the same prompt with all placeholders, on which the engine must run."""

    media: tuple[Medium, ...]
    short: int
    token_ids: tuple[int, ...]
    provide: Callable[[str], Awaitable[str]] = field(repr=False, compare=False)
    """Called with the name of the engine's node: lets its blob store fetch the blobs, and returns their folder there.
    Raises EngineError."""
    nodes: Callable[[], Collection[str]] = field(default=frozenset, repr=False, compare=False)
    """Returns the nodes whose blob stores have the blobs."""
    folder: str = ""
    """The folder of the blobs on the engine's node; empty before `at_node`."""

    @property
    def paths(self) -> list[str]:
        """The files of the pictures on the engine's node."""
        return [f"{self.folder}/{blob_path(one.sha256)}" for one in self.media]

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """The tokens on which the engine must run for a request with the tokens `ids`: the short prompt, and tokens that
        were generated before."""
        return [*self.token_ids, *ids[self.short :]]

    async def at_node(self, node: str) -> RequestPictures:
        """These pictures with their folder on `node`, after its store has them. Raises EngineError."""
        return replace(self, folder=await self.provide(node))


@dataclass(frozen=True, slots=True)
class DenoisingParams:
    """How an engine generates pictures by denoising. `text`, `negative`: prompt and negative prompt. `kind`: of the random
    steps. `random_steps`: their numbers, ascending; None: all that can be trained. `kept_steps`: those of them that are
    trained; None: all. `noise_level`: of the kind. `guidance`: with which the engine must have been started. `constants`:
    whether log-probabilities have the constants of the normal distribution. `returns_states`: whether the arrays for
    training are returned, and not only the picture. `noise_seeds`: of the initial states; empty: the seeds of the samples.
    `blob_holder`: whose reservation in the blob store of the engine's node the arrays use up; empty: none."""

    text: str
    steps: int
    height: int
    width: int
    guidance: float = 1.0
    negative: str = ""
    kind: Literal["sde", "cps", "dance", "ode"] = "sde"
    noise_level: float = 0.7
    random_steps: tuple[int, ...] | None = None
    kept_steps: tuple[int, ...] | None = None
    constants: bool = True
    returns_states: bool = True
    noise_seeds: tuple[int, ...] = ()
    averaged: bool = False
    """Whether the average of the trained weights generates it (`train.diffusion.ema_decay`)."""
    blob_holder: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, and what else a request needs. `temperature` 0 is greedy; `top_k` None keeps the whole
    vocabulary. `adapter`: name of the adapter that the engine adds to its model; None: the policy. `pictures`: of the
    prompt, whose tokens then have one image token for each; None: it has none. `denoising`: how pictures are generated,
    in place of all other fields; None: the response is a text."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    adapter: str | None = None
    pictures: RequestPictures | None = None
    denoising: DenoisingParams | None = None


@dataclass(frozen=True, slots=True)
class ProgressCallback:
    """Reports unfinished samples of a request: after every `every` tokens, `tell` gets the sample's index and the sample.

    An unfinished sample has the finish reason "abort".
    """

    every: int
    tell: Callable[[int, Sample], None]


@dataclass(frozen=True, slots=True)
class TransferManifest:
    """The tensors of a weight broadcast, in order: names, types and shapes. `dtypes` as in torch, without "torch."."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """The weights of `version` are in `folder` (relative to the run folder), as a model that engines load."""

    version: Version
    folder: str


@dataclass(frozen=True, slots=True)
class BroadcastUpdate:
    """The weights of `version` are broadcast over the process group `group`, once the engines have joined it."""

    version: Version
    group: str
    manifest: TransferManifest


WeightUpdate = FolderUpdate | BroadcastUpdate
"""How engines get the weights of a version: from a folder, or by broadcast."""


class Engine(Protocol):
    """Client of one engine (an inference server)."""

    @property
    def base_url(self) -> str:
        """Address of the engine, for error messages."""
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
        """Generate one sample per prompt in one request, each with its seed; results in the order of the prompts.

        `prompts`: token ids. `params`: for all prompts, or one per prompt. Sample `i` has the request id f"{rid}-{i}".
        An aborted sample returns its tokens so far with finish reason "abort". Log-probabilities are float32 values.
        """
        ...

    async def classify(
        self, questions: Sequence[Sequence[int]], *, rid: str, pictures: Sequence[RequestPictures | None] = ()
    ) -> tuple[float, ...]:
        """Score each question (token ids) with a classifier model, in order. Raises EngineGaveUp if one was aborted.

        `pictures`: those of each question; empty: no question has any.
        """
        ...

    async def abort(self, rid: str, count: int) -> None:
        """Abort the `count` samples of the request `rid`; they return their tokens so far."""
        ...

    async def update_weights(self, path: str, version: Version) -> None:
        """Load the weights in folder `path` as `version` and use them from the next token on.

        Running requests continue with them.
        """
        ...

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop generating: abort running requests, put them back into the queue, or keep them in place."""
        ...

    async def resume(self) -> None:
        """Continue to generate after `pause`."""
        ...

    async def sleep(self) -> None:
        """Release the memory of KV cache and weights. Running requests return their tokens so far. Idempotent."""
        ...

    async def take_memory(self) -> None:
        """Allocate the memory that `sleep` released. No tokens are generated before `wake` or `update_weights`."""
        ...

    async def wake(self, version: Version) -> None:
        """Undo `sleep` for an engine whose weights never change, such as a judge's; its weights are named `version`."""
        ...

    async def sleeps(self) -> bool:
        """Whether the engine was put to sleep and has got no weights since."""
        ...

    async def released(self) -> bool:
        """Whether any of the engine's memory is released. Raises EngineMemoryUnknown if the engine cannot say."""
        ...

    async def load(self) -> tuple[int | None, int | None]:
        """Number of running and of waiting sequences; None if the engine exports no metrics."""
        ...

    async def served(self) -> Version | None:
        """Version of the weights that the engine serves; None for weights that no training step produced."""
        ...

    async def scheduler_state(self) -> Mapping[str, Any]:
        """State of the engine's scheduler. A response shows that the scheduler makes progress."""
        ...

    async def metrics(self) -> str:
        """Metrics in Prometheus text format; empty if the engine exports none."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
