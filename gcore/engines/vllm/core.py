"""Engine core over vLLM: hands requests to vLLM's engine core, runs it step by step, and collects its outputs.

vLLM's core runs in this process and in the model's thread, so every operation takes effect between two of its steps: no
step is under way when weights change, and the version of each token is exact. vLLM schedules, prefills, decodes and
samples. gcore finds stop strings, keeps the tokens so far for aborts, and records versions.

`client` is vLLM's `InprocClient`. This module imports neither vLLM nor its workers; tests drive it with a scripted client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gcore.engines.detokenizer import Detokenizer, tail_length
from gcore.engines.request import (
    ABORTED,
    Finish,
    GenerationRequest,
    PromptLogprobs,
    SequenceState,
    Top,
)
from gcore.engines.torch.engine import GeneratorBase
from gcore.engines.torch.kv_cache import CacheShape
from gcore.engines.torch.model import StagedWeights, check_awake
from gcore.errors import EngineError
from gcore.models.adapter_checks import BaseFiles
from gcore.models.adapters import adapted_tensors, check_fit, meta_tensors
from gcore.models.layout import ADAPTER_FILE

FINISHES = ("stop", "length", "abort", "error", "repetition")
"""vLLM's finish reasons, in the order of its numbers."""

ALL_MEMORY = frozenset({"weights", "kv_cache"})

TIED = frozenset({"lm_head.weight"})
"""Tensors that a checkpoint may have or lack: vLLM skips them if they are tied."""


@dataclass(slots=True)
class ServedModel:
    """What gcore knows of the model in vLLM's workers.

    `folder`: the model's folder. `tensors`: the tensors of its checkpoint, on the meta device: names, shapes and dtypes. `vocabulary`: number of
    tokens. `context`: context length in tokens. `end_tokens`: end a sample unless the request ignores them.
    """

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]
    config: Any
    """The model's configuration, as transformers has it."""
    shape: CacheShape
    """Dtype and device of the weights; vLLM keeps the layers of its KV cache to itself."""
    base: BaseFiles | None = None
    """The folder's weight files before vLLM loaded them; None: they may change."""
    asleep: bool = False
    module: Any = field(init=False, repr=False)
    """This object: stands for a module where its tensors' names and shapes are checked."""

    def __post_init__(self) -> None:
        self.module = self

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the checkpoint's tensors."""
        return self.tensors


@dataclass(frozen=True, slots=True)
class StagedFolder(StagedWeights):
    """A folder with weights that fit the model. vLLM's workers read it themselves, each its own part."""

    folder: Path = field(default=Path())


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """Limits of vLLM: running sequences (`slots`), and tokens in its KV cache.

    `shares_prefixes`: whether its cache keeps the keys and values of ended requests for others with the same beginning.
    `sleeps`: whether it can release its memory, which its build for CPUs cannot.
    """

    slots: int
    cache_tokens: int
    shares_prefixes: bool
    sleeps: bool


@dataclass(slots=True)
class _Running:
    """A sequence in vLLM. `request`: vLLM's own record of it, which counts its preemptions."""

    state: SequenceState
    request: Any


class VllmCore(GeneratorBase):
    """Engine core of a causal language model that vLLM serves. `text`: the tokenizer, needed for stop strings.

    `request_of`: turns a request into vLLM's, under the name that is its first argument.
    """

    def __init__(
        self,
        client: Any,
        model: ServedModel,
        text: Detokenizer | None,
        limits: VllmLimits,
        *,
        version: str,
        request_of: Callable[[str, GenerationRequest], Any],
    ) -> None:
        longest = min(model.context, limits.cache_tokens)
        super().__init__(model, version=version, longest=longest, cache_tokens=limits.cache_tokens, reader=None)
        self._client = client
        self._scheduler = client.engine_core.scheduler
        self._served = model
        self._text = text
        self._limits = limits
        self._request_of = request_of
        self._sequences: dict[str, _Running] = {}
        """Sequences that run or wait in vLLM, by the names that they have there."""
        self._received: dict[str, torch.Tensor] = {}
        """Broadcast tensors that are not loaded yet, because others are missing."""
        self._suspects: dict[tuple[str, ...], npt.NDArray[np.bool_]] = {}
        """By stop strings: which tokens may complete one of them."""

    @property
    def model(self) -> ServedModel:
        """The loaded model."""
        return self._served

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the engine for `/server_info`."""
        return {"engine": "vLLM", "prefix_caching": self._limits.shares_prefixes}

    @property
    def rows(self) -> int:
        """Maximum number of running sequences."""
        return self._limits.slots

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait in vLLM's queue."""
        return len(self._sequences) - self.running

    def submit(self, tasks: list[GenerationRequest]) -> None:
        """Queue requests that were checked before."""
        for task in tasks:
            name = str(task.number)
            self._client.add_request(self._request_of(name, task))
            self._sequences[name] = _Running(SequenceState(task), self._scheduler.requests[name])

    def cycle(self) -> None:
        """Run one step of vLLM: schedule, forward pass, sample, finish requests."""
        for output in self._client.get_output().outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                self._receive(output.request_id, sequence, output)

    def _receive(self, name: str, sequence: _Running, output: Any) -> None:
        """Add the new tokens of one step to a sequence, and deliver it if it streams or has ended."""
        state, sampling = sequence.state, sequence.state.task.sampling
        if output.prefill_stats is not None and not state.tokens:
            state.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_prompt_logprobs_tensors is not None:
            state.prompt_logprobs = _prompt_logprobs(state.task, output.new_prompt_logprobs_tensors)
        if not output.new_token_ids and output.finish_reason is None:
            return
        if output.new_token_ids:
            state.mark(self.version, len(state.tokens))
            self._add_tokens(state, output)
        ending = self._ending(state, output)
        if ending is not None and output.finish_reason is None:
            self._client.abort_requests([name])
        if ending is not None or (state.task.streams and sampling.max_new_tokens):
            self._deliver(name, sequence, ending)

    def _add_tokens(self, state: SequenceState, output: Any) -> None:
        sampling = state.task.sampling
        ids, values, *_ = output.new_logprobs
        state.tokens += output.new_token_ids
        state.logprobs += values[:, 0].tolist()
        self.generated_tokens += len(output.new_token_ids)
        for row_ids, row in zip(ids, values, strict=True):
            if sampling.top_logprobs:
                state.tops.append(_top(row_ids, row, sampling.top_logprobs))
            if sampling.named_tokens:
                state.named.append(_named(row_ids, row, sampling.named_tokens))

    def _ending(self, state: SequenceState, output: Any) -> Finish | None:
        """Return why a sequence ended with its newest tokens; None: it goes on."""
        if state.logprobs and not math.isfinite(state.logprobs[-1]):
            state.drop_last()
            return Finish("abort", message="the model's output is not finite; its weights may be damaged")
        if (met := self._stop_string(state, len(output.new_token_ids))) is not None:
            return Finish("stop", matched=met)
        if output.finish_reason is None:
            return None
        match FINISHES[int(output.finish_reason)]:
            case "stop":
                return Finish("stop", matched=output.stop_reason)
            case "length":
                return Finish("length")
            case reason:
                return Finish("abort", message=f"vLLM ended the request ({reason})")

    def _stop_string(self, state: SequenceState, new: int) -> str | None:
        stop = state.task.sampling.stop
        if not stop or not new:
            return None
        assert self._text is not None  # checked before
        if stop not in self._suspects:
            used = {sequence.state.task.sampling.stop for sequence in self._sequences.values()}
            self._suspects = {strings: table for strings, table in self._suspects.items() if strings in used}
            self._suspects[stop] = self._text.suspects(stop, self._served.vocabulary)
        if not self._suspects[stop][state.tokens[-new:]].any():
            return None
        return self._text.met(stop, state.tokens[-tail_length(stop) :])

    def _deliver(self, name: str, sequence: _Running, ending: Finish | None) -> None:
        state = sequence.state
        state.retractions = sequence.request.num_preemptions
        if ending is not None:
            del self._sequences[name]
        self.outbox.append(state.output(self.version, ending))

    def abort(self, unwanted: Callable[[GenerationRequest], bool], message: str = ABORTED) -> None:
        """End the sequences for which `unwanted` is true, with the tokens that they have so far."""
        leaving = {name: one for name, one in self._sequences.items() if unwanted(one.state.task)}
        self._client.abort_requests(list(leaving))
        for name, sequence in leaving.items():
            self._deliver(name, sequence, Finish("abort", message=message))

    def stage_weights(self, folder: Path) -> StagedWeights:
        """Check that a folder's weights fit the model, by the headers of its files. A folder with adapters is added to the
        model's own folder. Raises EngineError, DataError.
        """
        check_awake(self._served)
        if (folder / ADAPTER_FILE).is_file():
            adapted = {one.name: one.tensor for one in adapted_tensors(self._served.folder, folder, self._served.base)}
            check_fit(self._served.tensors, adapted, folder, TIED)
            return StagedWeights(adapted)
        check_fit(self._served.tensors, meta_tensors(folder), folder, TIED)
        return StagedFolder({}, folder=folder)

    def change_weights(self, staged: StagedWeights, version: str | None, *, flush: bool, abort: bool) -> None:
        """Let vLLM's workers load weights. See `EngineBase.change_weights`.

        Broadcast tensors are kept until all of the model's are there. The last ones name the version.
        Running sequences keep their keys and values only without `flush`, and without a shared cache: a later request
        would otherwise begin with keys and values of the old weights.
        """
        self.check_version(version)
        check_awake(self._served)
        if abort:
            self.abort_all("aborted by a weight update")
        if isinstance(staged, StagedFolder):
            self._load({"weights_path": str(staged.folder)})
        else:
            self._received |= staged.tensors
            if missing := sorted(self._served.tensors.keys() - self._received.keys() - TIED):
                # vLLM joins some tensors of a checkpoint (q, k, v) and cannot load a part of them.
                if version is not None:
                    raise EngineError(
                        f"vLLM loads all weights at once, and {missing[0]} was not received",
                        fix="Broadcast all tensors before the version changes",
                    )
                return
            self._load({"weights_iterator": list(self._received.items())})
        if flush or self._limits.shares_prefixes:
            self._retract()
        self.rename(version or self.version)

    def _load(self, options: Mapping[str, Any]) -> None:
        self._received = {}
        with torch.no_grad():
            self._client.collective_rpc(load_weights, kwargs=options)

    def release(self, tags: frozenset[str]) -> None:
        """Release the weights and the KV cache. Raises EngineError while sequences run, and where vLLM cannot."""
        if not self._limits.sleeps:
            raise EngineError(
                "vLLM cannot release its memory on a CPU", fix="Set placement.memory: kept, or use the torch engine"
            )
        if self.running:
            raise EngineError(f"{self.running} requests are running", fix="Pause or abort them first")
        if self.asleep >= tags:
            return
        if tags != ALL_MEMORY:
            raise EngineError(
                f"vLLM releases its weights and its KV cache together, not only {', '.join(sorted(tags))}",
                fix="Name both tags",
            )
        self.wake(self.asleep)  # vLLM cannot release a part that is released already
        self._client.sleep(level=1, mode="keep")  # level 1 keeps the weights in host memory
        self._served.asleep = True
        self.asleep = ALL_MEMORY

    def wake(self, tags: frozenset[str]) -> None:
        """Restore the released memory named by `tags`."""
        released = sorted(tags & self.asleep)
        if not released:
            return
        self._client.wake_up(tags=released)
        self.asleep -= tags
        self._served.asleep = "weights" in self.asleep

    def _retract(self) -> None:
        # vLLM drops the keys and values of ended requests in the same call.
        self._client.reset_prefix_cache(reset_running_requests=True)

    def _free_cache(self) -> None:
        """vLLM's cache is allocated once; `_retract` has emptied it."""


def load_weights(worker: Any, **options: Any) -> None:
    """Load weights in one of vLLM's workers, from a folder or from tensors. vLLM calls it in each worker.

    On CPUs vLLM 0.32 packs an output layer that is tied to the embeddings at start, and leaves the packed copy as it is
    when the embeddings change. So it is packed again.
    """
    worker.reload_weights(**options)
    for module in worker.get_model().modules():
        if getattr(module, "cpu_linear", None) is not None and hasattr(module, "tie_weights"):
            module.quant_method.process_weights_after_loading(module)


def _top(ids: npt.NDArray[Any], row: npt.NDArray[Any], count: int) -> Top:
    """Return the most likely tokens of a position. Column 0 of a row is the sampled token, then the likeliest follow."""
    return tuple(zip(row[1 : count + 1].tolist(), ids[1 : count + 1].tolist(), strict=True))


def _named(ids: npt.NDArray[Any], row: npt.NDArray[Any], named: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probabilities of these tokens, which the row has in some column."""
    by_token = dict(zip(ids.tolist(), row.tolist(), strict=True))
    return tuple(by_token[token] for token in named)


def _prompt_logprobs(task: GenerationRequest, tensors: Any) -> PromptLogprobs:
    """Convert vLLM's log-probabilities of a prompt. Its row `i` is of token `i` + 1; column 0 is that token."""
    start = task.sampling.prompt_logprobs_from or 0
    ids, values = tensors[0].numpy()[max(0, start - 1) :], tensors[1].numpy()[max(0, start - 1) :]
    first: tuple[None, ...] = (None,) * (start == 0)
    count, named = task.sampling.top_logprobs, task.sampling.named_tokens
    tops = tuple(_top(*pair, count) for pair in zip(ids, values, strict=True)) if count else ()
    others = tuple(_named(*pair, named) for pair in zip(ids, values, strict=True)) if named else ()
    return PromptLogprobs(
        start,
        (*first, *values[:, 0].tolist()),
        (*first, *tops) if count else (),
        (*first, *others) if named else (),
    )
