"""Engine core: schedules, prefills and decodes sequences, and finishes requests.

One cycle preempts sequences that no longer fit, admits waiting sequences, prefills a chunk of their prompts, and
generates one token for every running sequence (`scheduler` decides each of these). Weight updates, pauses and aborts
take effect between cycles. After a weight update with `flush` the KV cache is recomputed with the new weights;
otherwise it is kept. In both cases the spans of an output say which version generated which tokens.

Single-threaded, and never reads the time; the model thread calls it. `EngineBase` is shared with the classifier's core;
`Decoder` generates tokens for the running sequences (*rows*) with any model runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from gcore.engines.detokenizer import Detokenizer, tail_length
from gcore.engines.pictures import PictureReader
from gcore.engines.request import (
    ABORTED,
    Finish,
    GenerationRequest,
    NumberedOutput,
    NumberedRequest,
    PauseMode,
    PicturesOfPrompt,
    RequestOutput,
    SequenceState,
    check_version,
)
from gcore.engines.torch.model import (
    MEMORY_FIX,
    LoadedModel,
    Model,
    StagedWeights,
    WeightOffloader,
    apply_weights,
    check_awake,
    explain_memory_error,
    stage_weights,
)
from gcore.engines.torch.model_runner import ModelRunner, PrefillResult
from gcore.engines.torch.prefill import PrefillChunk, PromptPrefill
from gcore.engines.torch.sampler import BatchSamplingParams, ForbiddenTokens, sample, token_logprobs, top_logprobs
from gcore.engines.torch.scheduler import (
    IDLE_TOKENS,
    Admission,
    BatchSize,
    FinishedRows,
    RunningBatch,
    WaitingQueue,
    longest_request,
    num_admissible,
    plan_compaction,
    prefill_lengths,
    rows_to_preempt,
)
from gcore.errors import DataError, EngineError
from gcore.models.adapter_checks import check_sample
from gcore.models.layout import ADAPTER_FILE
from gcore.system.memory import release_free_memory

ENGINE_NAME = "gcore torch engine"
"""Name of the engine in `/server_info`."""

R = TypeVar("R", bound=NumberedRequest)
O = TypeVar("O", bound=NumberedOutput)  # noqa: E741  # an output

Key = tuple[bytes, int | None, int, tuple[int, ...], int]
"""Identifies a prompt in prefill: its content, the requested log-probabilities, and the adapter."""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The result of joining rows or of a decode step: rows from `first` on have one more token.

    `ended`: rows that may be finished. `broken`: rows whose logits are not finite.
    """

    first: int
    ended: FinishedRows
    broken: tuple[int, ...]


class Decoder:
    """Generates tokens for the running sequences (rows) with a model runner (`lane`). `slots`: maximum number of rows.

    A prompt shared by several joining rows is prefilled once. If a running row has the prompt and the runner can copy
    it, the prompt is not prefilled at all: its keys, values and last logits are copied. The first token is sampled from
    the prompt's last logits, every further token by `step`. A row that returns after preemption has its earlier tokens
    prefilled like a prompt, or (if the runner replays) passes them through the model again one by one.
    """

    def __init__(self, model: Model, lane: ModelRunner, slots: int) -> None:
        self.model = model
        self.lane = lane
        self.slots = slots
        self.rows = RunningBatch()
        self._after_prompt: list[torch.Tensor | None] = []
        """By row: the logits after its prompt, as long as another row with the same prompt could start with them."""
        self._prompts: dict[Key, PromptPrefill] = {}
        """Prompts that are being prefilled, or wait for their rows to join."""
        self._params: BatchSamplingParams | None = None
        self._asking = False
        """Whether any row requests the log-probabilities of other tokens than its own."""

    def key(self, work: SequenceState) -> Key:
        """Return the key of the tokens that are prefilled for a sequence. Sequences with equal keys share a prefill."""
        again = bool(work.tokens) and not self.lane.replays
        content = work.task.key_of(self.ids(work)) if again else work.task.key
        sampling = work.task.sampling
        if sampling.prompt_logprobs_from is None or work.prompt_logprobs is not None:
            return (content, None, 0, (), work.task.adapter)
        return (
            content,
            sampling.prompt_logprobs_from,
            sampling.top_logprobs,
            sampling.named_tokens,
            work.task.adapter,
        )

    def ids(self, work: SequenceState) -> tuple[int, ...]:
        """Return the tokens that are prefilled before a sequence joins: its prompt, and tokens from before a preemption
        unless the runner replays them.
        """
        return work.task.prompt if self.lane.replays else work.task.prompt + tuple(work.tokens)

    def known(self) -> dict[Key, int]:
        """Return the prompts that a joining row can copy, each with a running row that has it; empty if none can be."""
        if not self.lane.copies:
            return {}
        return {
            (work.task.key, None, 0, (), work.task.adapter): row
            for row, work in enumerate(self.rows.works)
            if self._after_prompt[row] is not None
        }

    def prompt(self, work: SequenceState) -> PromptPrefill:
        """Return the prefill state of a sequence's prompt. Begins a new one if no sequence with this prompt has one."""
        key = self.key(work)
        if key not in self._prompts:
            pictures: Any = work.task.pictures
            self._prompts[key] = PromptPrefill(self.ids(work), *key[1:], pictures=pictures)
        return self._prompts[key]

    @torch.inference_mode()
    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill these parts of prompts."""
        self.lane.read(chunks)

    @torch.inference_mode()
    def join(self, works: Sequence[SequenceState]) -> DecodeResult:
        """Add sequences as the last rows, and sample a token for each. Their prompts are prefilled or can be copied."""
        known = self.known()
        paid: set[Key] = set()
        origins = []
        for work in works:
            key = self.key(work)
            prompt = self._prompts.get(key)
            if prompt is None:
                row = known[key]
                logits = self._after_prompt[row]
                assert logits is not None
                origins.append(PrefillResult(len(self.ids(work)), logits, row=row))
                work.cached_tokens = origins[-1].length
            else:
                assert prompt.logits is not None
                origins.append(PrefillResult(len(prompt.tokens), prompt.logits, prompt=prompt))
                # One of the rows that share a prompt counts as having computed it, the others as having it cached.
                work.cached_tokens = origins[-1].length if key in paid else 0
                work.prompt_logprobs = work.prompt_logprobs or prompt.logprobs
            paid.add(key)
        return self._enter(works, origins, paid)

    def _enter(self, works: Sequence[SequenceState], origins: Sequence[PrefillResult], read: set[Key]) -> DecodeResult:
        before = self.rows.active
        order = self.lane.enter(origins, before)
        again = not self.lane.replays
        self.rows.join([works[i] for i in order], replay=self.lane.replays)
        for i in order:
            prompt = origins[i].prompt
            own = (again and works[i].tokens) or (prompt is not None and self._is_private(prompt))
            self._after_prompt.append(None if own else origins[i].logits)
        for key in read:
            self._prompts.pop(key, None)
        self._params = None
        asked = (work.task.sampling for work in self.rows.works)
        self._asking = any(sampling.top_logprobs or sampling.named_tokens for sampling in asked)
        return self._draw(torch.stack([origins[i].logits for i in order]), before)

    def _is_private(self, prompt: PromptPrefill) -> bool:
        """Whether rows that join later must not start with the last logits of this prompt.

        Either older weights prefilled a part of it; or its logits were computed together with those of more positions,
        which in deterministic decoding may differ in bits from those of one position.
        """
        return prompt.stale or (self.lane.replays and prompt.logprobs_from is not None)

    @torch.inference_mode()
    def step(self) -> DecodeResult:
        """Generate one token for every row. There must be at least one row."""
        rows, active = self.rows, self.rows.active
        return self._draw(self.lane.step(rows.pending(), rows.lengths, rows.adapters[:active], rows.shifts[:active]), 0)

    def _draw(self, logits: torch.Tensor, first: int) -> DecodeResult:
        rows, device = self.rows, self.model.shape.device
        if first or self._params is None:
            new = slice(first, rows.active)
            params = BatchSamplingParams.of(
                rows.temperature[new], rows.top_p[new], rows.top_k[new], rows.min_p[new], device
            )
            self._params = None if first else params
        else:
            params = self._params
        forbidden = ForbiddenTokens.of(rows.forbidden(first), device)
        drawn = sample(logits, torch.from_numpy(rows.uniforms(first)).to(device), params, forbidden)
        logprobs = drawn.logprobs.cpu().numpy()
        ended = rows.record(first, drawn.tokens.cpu().numpy(), logprobs)
        if self._asking:
            self._tell_others(logits, first)
        if np.isfinite(logprobs).all():
            return DecodeResult(first, ended, ())
        self.lane.clean()
        return DecodeResult(first, ended, tuple((np.flatnonzero(~np.isfinite(logprobs)) + first).tolist()))

    def _tell_others(self, logits: torch.Tensor, first: int) -> None:
        """Record log-probabilities of the most likely tokens and of the named ones, for rows that request them."""
        for row in range(first, self.rows.active):
            work, own = self.rows.works[row], logits[row - first : row - first + 1]
            sampling = work.task.sampling
            if self.rows.replays(row):
                continue
            if sampling.top_logprobs:
                work.tops += top_logprobs(own, [sampling.temperature], sampling.top_logprobs)
            if sampling.named_tokens:
                work.named += token_logprobs(own, [sampling.temperature], sampling.named_tokens)

    @torch.inference_mode()  # moving rows writes to tensors created in inference mode
    def leave(self, leaving: Sequence[int]) -> list[SequenceState]:
        """Remove these rows. Returns their sequences with all generated tokens, in the order of `leaving`."""
        if not leaving:
            return []
        works = [self.rows.save(row) for row in leaving]
        change = plan_compaction(leaving, self.rows.active)
        self.lane.leave(change)
        for hole, source in zip(change.holes, change.sources, strict=True):
            self._after_prompt[hole] = self._after_prompt[source]
        self.rows.refill(change)
        del self._after_prompt[change.active :]
        self._params = None
        return works

    def drop_prompts(self, works: Sequence[SequenceState] = ()) -> None:
        """Drop the prefill state of all prompts, except those of the sequences `works`."""
        keep = {self.key(work) for work in works}
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key in keep}

    def distrust_prompts(self) -> None:
        """After a change of weights: stop sharing prompts that the old weights prefilled."""
        self._after_prompt = [None] * self.rows.active
        for prompt in self._prompts.values():
            prompt.stale = prompt.stale or prompt.done > 0
            prompt.features = None


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Chunks to prefill in this cycle. `works`: how many of the sequences, in order, join or begin their prefill."""

    chunks: tuple[PrefillChunk, ...]
    works: int


def plan_prefill(needs: Sequence[PromptPrefill | None], *, budget: int, grid: int | None) -> PrefillPlan:
    """Choose which prompts, and how much of each, a cycle prefills. Several sequences may share a prompt.

    `needs`: for each sequence, in order, the prompt that it waits for; None: it can join at once. If a prompt is
    prefilled only in part, later sequences wait, except those that share it. `budget`, `grid`: see `prefill_lengths`.
    """
    prompts = list(dict.fromkeys(prompt for prompt in needs if prompt is not None))
    counts = prefill_lengths(
        [prompt.left for prompt in prompts], budget=budget, grid=grid, done=[prompt.done for prompt in prompts]
    )
    chunks = tuple(PrefillChunk(prompt, count) for prompt, count in zip(prompts, counts, strict=True) if count)
    return PrefillPlan(chunks, _works(needs, chunks))


def _works(needs: Sequence[PromptPrefill | None], chunks: Sequence[PrefillChunk]) -> int:
    begun = {chunk.prompt for chunk in chunks}
    cut = next((chunk.prompt for chunk in chunks if chunk.count < chunk.prompt.left), None)
    behind = False
    for count, prompt in enumerate(needs):
        if prompt is not None and prompt not in begun and prompt.left:
            return count
        if behind and prompt is not cut:
            return count
        behind = behind or (cut is not None and prompt is cut)
    return len(needs)


class EngineBase(ABC, Generic[R, O]):
    """Engine core: the queue, one model step at a time (`cycle`), and the operations between steps.

    Shared by the generator and the classifier. Weight updates, pauses, aborts and sleep take effect between steps. All
    methods run in the model's thread.
    """

    memory_fix = MEMORY_FIX
    """What an out-of-memory error advises the user to do."""
    generated_tokens = 0

    def __init__(self, model: LoadedModel, *, version: str) -> None:
        self._loaded = model
        self._offloader = WeightOffloader(model)
        self.version = version
        """Version of the served weights."""
        self.paused = False
        self.asleep: frozenset[str] = frozenset()
        """Names of the memory that is released: "weights", "kv_cache"."""
        self.outbox: list[O] = []
        """Outputs of ended and of streaming requests that the model's thread has not delivered yet."""

    @property
    def model(self) -> LoadedModel:
        """The loaded model."""
        return self._loaded

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts about the engine for `/server_info`: its name (`engine`), and what only this engine has."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Maximum number of sequences that run at once."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of running sequences."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of waiting sequences."""

    @property
    def can_work(self) -> bool:
        """Whether `cycle` has anything to do: there are requests, and the engine is neither paused nor asleep."""
        return not self.paused and not self.asleep and (self.running > 0 or self.waiting > 0)

    @abstractmethod
    def submit(self, tasks: list[R]) -> None:
        """Queue requests that were checked before."""

    @abstractmethod
    def cycle(self) -> None:
        """Run one engine iteration: schedule, forward pass, finish requests. Raises EngineError if memory runs out."""

    @abstractmethod
    def abort(self, unwanted: Callable[[R], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true, with the tokens that they have so far."""

    def abort_all(self, message: str = ABORTED) -> None:
        """End all requests now, with the tokens that they have so far."""
        self.abort(lambda task: True, message)

    def pause(self, mode: PauseMode) -> None:
        """Stop generating tokens until `resume`.

        `mode`: "abort" ends all requests, "retract" preempts the running ones, "in_place" keeps them and their cache.
        """
        self.paused = True
        if mode == "abort":
            self.abort_all("aborted by a pause")
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        """Generate tokens again after a pause."""
        self.paused = False

    def flush(self) -> None:
        """Free the KV cache. Raises EngineError while running sequences use it."""
        if self.running:
            raise EngineError(
                f"{self.running} requests are running", fix="Pause with mode retract, or abort them, first"
            )
        self._retract()
        self._free_cache()

    def check_version(self, version: str | None) -> None:
        """Raise EngineError for a version that is older than the served one."""
        check_version(version, self.version)

    def stage_weights(self, folder: Path) -> StagedWeights:
        """Load a folder's weights into host memory, in any thread. Raises EngineError if they do not fit."""
        return stage_weights(self._loaded, folder)

    def change_weights(self, staged: StagedWeights, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve `staged` weights from the next step on, as `version` (None: the name stays).

        `flush`: preempt running sequences, so that their keys and values are recomputed. `abort`: end all requests
        first. Raises EngineError; then nothing has changed.
        """
        self.check_version(version)
        check_awake(self._loaded)
        if abort:
            self.abort_all("aborted by a weight update")
        self._apply_weights(staged)
        self._weights_changed()
        if flush:
            self._retract()
        self.rename(version or self.version)

    def _apply_weights(self, staged: StagedWeights) -> None:
        apply_weights(self._loaded, staged)

    def rename(self, version: str) -> None:
        """Set the version of the served weights. Raises EngineError for an older one."""
        self.check_version(version)
        self.version = version

    def release(self, tags: frozenset[str]) -> None:
        """Release the memory named by `tags` ("weights", "kv_cache"). Raises EngineError while sequences run."""
        if self.running:
            raise EngineError(f"{self.running} requests are running", fix="Pause or abort them first")
        if "kv_cache" in tags:
            self._retract()
            self._free_cache()
        if "weights" in tags - self.asleep:
            self._offloader.offload()
        self.asleep |= tags
        release_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Restore the released memory named by `tags`. A KV cache grows on demand and needs no action."""
        if "weights" in tags & self.asleep:
            with explain_memory_error("while it restored the weights", self.memory_fix):
                self._offloader.reload()
        self.asleep -= tags

    def _retract(self) -> None:
        """Preempt all running sequences: move them back to the queue."""

    def _free_cache(self) -> None:
        """Free the memory of the KV cache."""

    def _weights_changed(self) -> None:
        """Drop results that the old weights computed."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of a generating engine: running sequences (`slots`), tokens in the KV cache, and prompt tokens that are
    prefilled between two decode steps.
    """

    slots: int
    cache_tokens: int
    prefill_chunk_tokens: int = 512


class GeneratingModel(LoadedModel, Protocol):
    """A model that generates: the torch engine's or the Hugging Face engine's."""

    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]


class GeneratorBase(EngineBase[GenerationRequest, RequestOutput]):
    """Engine core of a causal language model that generates.

    `longest`: maximum tokens, prompt and response together, of a request that can be served. `cache_tokens`: maximum
    tokens that all running requests hold together; None: no limit. `reader`: of pictures; None: the model takes none.
    """

    def __init__(
        self,
        model: GeneratingModel,
        *,
        version: str,
        longest: int,
        cache_tokens: int | None,
        reader: PictureReader | None,
    ) -> None:
        super().__init__(model, version=version)
        self._reader = reader
        self.longest = longest
        self.cache_tokens = cache_tokens
        self.adapters: Mapping[str, int] = {}
        """Numbers of the adapters that requests may name."""

    @property
    @abstractmethod
    def model(self) -> GeneratingModel:
        """The loaded model."""

    @property
    def takes_pictures(self) -> bool:
        """Whether requests may have pictures."""
        return self._reader is not None

    def read_pictures(self, given: Sequence[Any]) -> Sequence[Any]:
        """Read the pictures of a prompt from a request. Any thread. Raises EngineError, also if the model takes none."""
        if self._reader is None:
            raise EngineError("this engine takes no pictures", fix="Serve a vision-language model with its processor")
        return self._reader.read(given)

    def place_pictures(
        self, tokens: Sequence[int], pictures: Sequence[Any]
    ) -> tuple[Sequence[int], PicturesOfPrompt | None]:
        """Return the prompt with all placeholders of `pictures` (from `read_pictures`), and its pictures; None: it has
        none. Raises EngineError if the tokens have another number of placeholders than pictures.
        """
        if self._reader is None:
            return tokens, None
        expanded = self._reader.expand(tokens, pictures)
        return expanded, self._reader.prompt(expanded, pictures)

    def check(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise EngineError for a request that the KV cache could never hold. May be called from any thread."""
        if prompt_tokens + max_new_tokens > self.longest:
            raise EngineError(
                f"a prompt of {prompt_tokens} tokens and max_new_tokens {max_new_tokens} exceed the {self.longest} tokens "
                f"of one request that a cache of {self.cache_tokens} holds",
                fix="Shorten the request, or raise rollout.cache_tokens",
            )


class EngineCore(GeneratorBase):
    """Core of the torch engine. `text`: the tokenizer, needed for stop strings."""

    def __init__(
        self, model: Model, text: Detokenizer | None, lane: ModelRunner, limits: EngineLimits, *, version: str
    ) -> None:
        longest = longest_request(model.context, budget=limits.cache_tokens, footprint=lane.footprint)
        reader = None if model.vision is None else model.vision.reader
        super().__init__(model, version=version, longest=longest, cache_tokens=limits.cache_tokens, reader=reader)
        self._model = model
        self.limits = limits
        self.lane = lane
        self._first_version = version
        if model.adapters is not None:
            self.adapters = model.adapters.names
        self.retractions = 0
        self._text = text
        self._decoder = Decoder(model, lane, limits.slots)
        self._waiting = WaitingQueue()
        self._reading: list[SequenceState] = []
        """Admitted sequences whose prompts are not completely prefilled."""

    @property
    def model(self) -> Model:
        """The loaded model."""
        return self._model

    @property
    def rows(self) -> int:
        """Maximum number of running sequences."""
        return self.limits.slots

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return self._decoder.rows.active

    @property
    def waiting(self) -> int:
        """Number of sequences that wait or are being prefilled."""
        return len(self._waiting) + len(self._reading)

    @property
    def facts(self) -> dict[str, Any]:
        """Name of the engine, size of its KV cache and its runner."""
        cache = self.limits.cache_tokens
        return {"engine": ENGINE_NAME, "max_total_num_tokens": cache, "lane": self.lane.name}

    def stage_weights(self, folder: Path) -> StagedWeights:
        """Load a folder's weights into host memory, in any thread. Raises EngineError if they do not fit.

        With adapters at run time, a folder that has an adapter alone becomes the policy's adapter beside those of judges.
        The model's own folder takes the policy's adapter away. Other folders are refused.
        """
        adapters = self._model.adapters
        if adapters is None:
            return super().stage_weights(folder)
        check_awake(self._model)
        if (folder / ADAPTER_FILE).is_file():
            check_sample(folder, self._model.base)
            try:
                return StagedWeights({}, adapters.read(folder))
            except DataError as error:
                raise EngineError(error.what, where=error.where, fix="Repeat the weight sync") from error
        if folder.resolve() != self._model.folder.resolve():
            raise self._fixed_base(str(folder))
        return StagedWeights({})

    def _fixed_base(self, where: str | None = None) -> EngineError:
        return EngineError(
            f"the weights of {self._model.folder} cannot be replaced, because this engine serves adapters on them "
            f"({', '.join(self.adapters)})",
            where=where,
            fix="Publish an adapter alone (train.lora.publish: adapter)",
        )

    def change_weights(self, staged: StagedWeights, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve `staged` weights. See `EngineBase.change_weights`."""
        if self._model.adapters is not None and staged.tensors:
            raise self._fixed_base()
        super().change_weights(staged, version, flush=flush, abort=abort)

    def _apply_weights(self, staged: StagedWeights) -> None:
        super()._apply_weights(staged)
        if self._model.adapters is not None:
            self._model.adapters.set_policy(staged.adapter)

    def _version_of(self, task: GenerationRequest) -> str:
        """Return the version of the weights that serve a request. Adapters of judges never change."""
        return self._first_version if task.adapter else self.version

    def submit(self, tasks: list[GenerationRequest]) -> None:
        """Queue requests that were checked before."""
        self._waiting.put(SequenceState(task) for task in tasks)

    def cycle(self) -> None:
        """Run one engine iteration: preempt, prefill a chunk of prompts, and generate one token for all running
        sequences.

        Raises EngineError if memory runs out.
        """
        with explain_memory_error("while it was generating"):
            self._make_way()
            if self.waiting:
                self._read()
            if self.running:
                self._after(self._decoder.step())

    def _held(self) -> list[int]:
        reading = [len(self._decoder.ids(work)) + 1 for work in self._reading]
        return [*self._decoder.rows.lengths.tolist(), *reading]

    def _make_way(self) -> None:
        """Preempt the youngest sequences if the running ones exceed the KV cache's budget."""
        lengths, footprint = self._held(), self.lane.footprint
        if footprint(BatchSize.of(lengths)) <= self.limits.cache_tokens:
            return
        rows = self.running
        ages = [work.task.number for work in (*self._decoder.rows.works, *self._reading)]
        gone = rows_to_preempt(lengths, ages, budget=self.limits.cache_tokens, footprint=footprint)
        back = [self._reading[i - rows] for i in gone if i >= rows]
        self._reading = [work for work in self._reading if work not in back]
        self._put_back([*self._decoder.leave([i for i in gone if i < rows]), *back])
        self._decoder.drop_prompts(self._reading)

    def _put_back(self, works: Sequence[SequenceState]) -> None:
        for work in works:
            work.retractions += 1
        self.retractions += len(works)
        self._waiting.put_back(sorted(works, key=lambda work: work.task.number))

    def _read(self) -> None:
        """Admit waiting sequences that fit, prefill a chunk of their prompts, and start those whose prompt is complete."""
        decoder, works = self._decoder, [*self._reading, *self._admissible()]
        if not works:
            return
        known = decoder.known()
        needs = [None if decoder.key(work) in known else decoder.prompt(work) for work in works]
        portion = self.limits.prefill_chunk_tokens
        planned = plan_prefill(
            needs, budget=portion if self.running else max(IDLE_TOKENS, portion), grid=self.lane.grid
        )
        works, needs = works[: planned.works], needs[: planned.works]
        self._waiting.take(max(0, len(works) - len(self._reading)))
        decoder.drop_prompts(works)
        decoder.read(planned.chunks)
        self._reading = [work for work, prompt in zip(works, needs, strict=True) if prompt is not None and prompt.left]
        joining = [work for work, prompt in zip(works, needs, strict=True) if prompt is None or not prompt.left]
        if joining:
            self._prepare(joining)
            self._after(decoder.join(joining))

    def _admissible(self) -> list[SequenceState]:
        free = self.limits.slots - self.running - len(self._reading)
        first = self._waiting.peek(free)
        if not first:
            return []
        count = num_admissible(
            [
                Admission(len(w.task.prompt) + len(w.tokens), w.task.sampling.max_new_tokens - len(w.tokens))
                for w in first
            ],
            BatchSize.of(self._held()),
            free=free,
            budget=self.limits.cache_tokens,
            footprint=self.lane.footprint,
        )
        return first[:count]

    def _prepare(self, works: Sequence[SequenceState]) -> None:
        rows = self._decoder.rows
        rows.forget_stop_strings()
        for work in works:
            stop = work.task.sampling.stop
            if not rows.knows_stop_strings(stop):
                assert self._text is not None
                rows.know_stop_strings(stop, self._text.suspects(stop, self.model.vocabulary))
            work.mark(self._version_of(work.task), len(work.tokens))

    def _after(self, made: DecodeResult) -> None:
        """After new tokens: finish the sequences that ended with them, and deliver output to streaming ones."""
        rows = self._decoder.rows
        self.generated_tokens += rows.active - made.first - made.ended.replayed
        endings: dict[int, Finish] = {row: Finish("length") for row in made.ended.by_count.tolist()}
        for row in made.ended.by_token.tolist():
            endings[row] = Finish("stop", matched=rows.tail(row, 1)[0])
        for row in made.ended.suspects.tolist():
            stop = rows.works[row].task.sampling.stop
            assert self._text is not None
            if (met := self._text.met(stop, rows.tail(row, tail_length(stop)))) is not None:
                endings[row] = Finish("stop", matched=met)
        for row in made.broken:
            endings[row] = Finish("abort", message="the model's output is not finite; its weights may be damaged")
        if rows.streaming:
            for row in range(made.first, rows.active):
                if rows.works[row].task.streams and row not in endings and not rows.replays(row):
                    self._deliver(rows.save(row), None)
        if endings:
            for row, work in zip(endings, self._decoder.leave(list(endings)), strict=True):
                if row in made.broken:
                    work.drop_last()
                self._deliver(work, endings[row])

    def _deliver(self, work: SequenceState, ending: Finish | None) -> None:
        self.outbox.append(work.output(self._version_of(work.task), ending))

    def abort(self, unwanted: Callable[[GenerationRequest], bool], message: str = ABORTED) -> None:
        """End the sequences for which `unwanted` is true, with the tokens that they have so far."""
        rows = self._decoder.rows
        leaving = [row for row, work in enumerate(rows.works) if unwanted(work.task)]
        unread = [work for work in self._reading if unwanted(work.task)]
        if unread:
            self._reading = [work for work in self._reading if not unwanted(work.task)]
            self._decoder.drop_prompts(self._reading)
        for work in [*self._decoder.leave(leaving), *unread, *self._waiting.drop(unwanted)]:
            self._deliver(work, Finish("abort", message=message))

    def rename(self, version: str) -> None:
        """Set the version of the served weights, also for the next tokens of running sequences.

        Raises EngineError for an older version.
        """
        super().rename(version)
        rows = self._decoder.rows
        for row, work in enumerate(rows.works):
            work.mark(self._version_of(work.task), rows.made(row))

    def _retract(self) -> None:
        works = [*self._decoder.leave(range(self.running)), *self._reading]
        self._reading = []
        self._decoder.drop_prompts()
        self._put_back(works)

    def _free_cache(self) -> None:
        self.lane.release()

    def _weights_changed(self) -> None:
        self._decoder.distrust_prompts()
