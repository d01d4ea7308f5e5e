"""Engine core that generates with `generate` of transformers: the plainest engine, and the slowest.

One call of `generate` produces tokens for all running requests (rows), padded on the left to one length. The call runs
in a thread of its own and stops before each token (`TransformersCall`). There the engine chooses the tokens of all rows,
ends requests, and takes aborts, pauses and weight updates.

A call cannot take in further rows. When requests wait and rows are free, the engine drops the call and begins another
with all prompts and the tokens so far. The new call computes the keys and values of every row again, so this engine is
slow. It has no other batching.

Tokens are sampled like in the torch engine (`torch.sampler`): the same seed gives the same tokens, up to rounding.
Log-probabilities are those of the logits that `generate` hands out, without media tokens, before any truncation.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from gcore.data.tokenizer import end_tokens
from gcore.engines.detokenizer import Detokenizer, tail_length
from gcore.engines.launch import EngineLaunch
from gcore.engines.pictures import PictureReader
from gcore.engines.request import ABORTED, Finish, GenerationRequest, PromptLogprobs, SequenceState
from gcore.engines.torch import server
from gcore.engines.torch.engine import GeneratorBase
from gcore.engines.torch.kv_cache import CacheShape
from gcore.engines.torch.model import (
    DTYPES,
    FORBIDDEN,
    TOLERANCES,
    TOO_BIG,
    check_vocabulary,
    context_length,
    device_of,
    explain_memory_error,
    load_module,
)
from gcore.engines.torch.prefill import PromptPrefill, logit_positions, record_logits
from gcore.engines.torch.sampler import BatchSamplingParams, ForbiddenTokens, sample, token_logprobs, top_logprobs
from gcore.engines.torch.scheduler import BELOW_ONE
from gcore.errors import DataError, EngineError, UsageError, one_line
from gcore.models.adapter_checks import BaseFiles
from gcore.models.checks import check_code, require_config
from gcore.models.vision import (
    PictureTensors,
    auto_class,
    has_processor,
    has_vision,
    media_token_ids,
    picture_arguments,
)
from gcore.system.control_line import ControlLine
from gcore.system.memory import is_out_of_memory

PADDING = 0
"""Token in front of shorter rows, and of rows that have ended. The attention mask hides the former."""

TRIED = (3, 1, 12)
"""Lengths in tokens of the prompts of the trial at start."""


@dataclass(slots=True)
class HfModel:
    """A causal language model as transformers loads it, with its own attention, cache and positions."""

    module: Any
    folder: Path
    shape: CacheShape
    """Dtype and device of the weights; the layers of the cache are the model's own business."""
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]
    base: BaseFiles | None = None
    """The folder's weight files when the model was loaded; None: updates add no adapter to them."""
    reader: PictureReader | None = None
    """Reads pictures for a vision-language model; None: the model takes none."""
    forbidden: tuple[int, ...] = ()
    """Token IDs of media, which are never sampled."""
    pads: bool = True
    """Whether rows of different lengths can share a call."""
    asleep: bool = False


class TransformersCall:
    """One call of `generate` for several rows, in a thread of its own, which waits before each token.

    `step` returns the logits [row, vocabulary] of the next token, and `choose` sets the tokens with which the call
    continues. Between two steps nothing of the model runs, so its weights may change. `rows`: tokens of each row.
    `pictures`: of each row, in order. `most`: maximum number of tokens.
    """

    def __init__(
        self, model: HfModel, rows: Sequence[Sequence[int]], pictures: Sequence[Sequence[PictureTensors]], most: int
    ) -> None:
        self._model = model
        self._rows = rows
        self._pictures = [one for row in pictures for one in row]
        self._most = most
        self._logits: queue.SimpleQueue[torch.Tensor | Exception] = queue.SimpleQueue()
        self._tokens: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._chosen: torch.Tensor | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)

    def choose(self, tokens: torch.Tensor) -> None:
        """Set the tokens [row] that the rows continue with at the next `step`."""
        self._chosen = tokens

    def step(self) -> torch.Tensor:
        """Pass the chosen tokens, or at first the prompts, through the model. Raises what the model raises."""
        if self._chosen is None:
            self._thread.start()
        else:
            self._tokens.put(self._chosen)
        logits = self._logits.get()
        if isinstance(logits, Exception):
            raise logits
        return logits

    def stop(self) -> None:
        """End the call and free its cache. It must wait for tokens, or have ended."""
        self._tokens.put(None)
        self._thread.join()

    def _run(self) -> None:
        device = self._model.shape.device
        longest = max(map(len, self._rows))
        ids = torch.full((len(self._rows), longest), PADDING)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(self._rows):
            ids[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask[row, longest - len(tokens) :] = 1
        config = GenerationConfig(
            do_sample=False, max_new_tokens=self._most, pad_token_id=PADDING, disable_compile=True
        )
        try:
            self._model.module.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                **seeing_arguments(self._model, ids, self._pictures),
                generation_config=config,
                logits_processor=LogitsProcessorList([self._exchange]),
                stopping_criteria=StoppingCriteriaList([self._ends]),
            )
        except Exception as error:  # noqa: BLE001  # raised again in `step`
            self._logits.put(error)
        else:
            self._logits.put(EngineError("generate ended before the engine stopped it"))

    def _exchange(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Hand out logits, wait for tokens, and return scores of which only the chosen tokens are possible."""
        self._logits.put(logits)
        tokens = self._tokens.get()
        if tokens is None:
            self._stopped = True
            return logits
        return torch.full_like(logits, -math.inf).scatter_(1, tokens[:, None], 0.0)

    def _ends(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(ids),), self._stopped, device=ids.device)


def seeing_arguments(model: HfModel, ids: torch.Tensor, pictures: Sequence[PictureTensors]) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward pass over the tokens `ids` [row, token] with these pictures, in the order of
    their placeholders; none without pictures.
    """
    if not pictures or model.reader is None:
        return {}
    device, types = model.shape.device, (ids == model.reader.token).long()
    name = model.reader.type_argument or ("mm_token_type_ids" if model.reader.three else "")
    return picture_arguments(pictures, device) | ({name: types.to(device)} if name else {})


@dataclass(slots=True, eq=False)
class Row:
    """A request and its random numbers, one for each token, whatever calls produce the tokens."""

    work: SequenceState
    stream: np.random.Generator

    @classmethod
    def of(cls, task: GenerationRequest) -> Row:
        """Return the row of a new request."""
        return cls(SequenceState(task), np.random.Generator(np.random.Philox(key=task.sampling.seed % 2**128)))

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and tokens so far."""
        return (*self.work.task.prompt, *self.work.tokens)

    @property
    def pictures(self) -> Sequence[PictureTensors]:
        """Pictures of the prompt."""
        found: Any = self.work.task.pictures
        return () if found is None else found.pictures

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest response."""
        return len(self.work.task.prompt) + self.work.task.sampling.max_new_tokens

    def uniform(self) -> float:
        """Return the uniform number that samples the next token. A greedy row needs none."""
        return min(self.stream.random(), BELOW_ONE) if self.work.task.sampling.temperature > 0 else 0.0


class HfCore(GeneratorBase):
    """Engine core over `generate`. `text`: the tokenizer, needed for stop strings. `slots`: maximum number of rows.

    `cache_tokens`: maximum number of rows times the longest that one of them can become; None: no limit.
    """

    def __init__(
        self, model: HfModel, text: Detokenizer | None, *, slots: int, cache_tokens: int | None, version: str
    ) -> None:
        longest = min(model.context, cache_tokens or model.context)
        super().__init__(model, version=version, longest=longest, cache_tokens=cache_tokens, reader=model.reader)
        self._model = model
        self._text = text
        self._slots = slots if model.pads else 1
        self._waiting: deque[Row] = deque()
        self._call: TransformersCall | None = None
        self._rows: list[Row | None] = []
        """Rows of the call, in its order; None: ended."""

    @property
    def model(self) -> HfModel:
        """The loaded model."""
        return self._model

    @property
    def facts(self) -> dict[str, Any]:
        """Name of the engine, and whether rows share a call."""
        return {"engine": "gcore Hugging Face engine", "padding": self._model.pads}

    @property
    def rows(self) -> int:
        """Maximum number of rows."""
        return self._slots

    @property
    def running(self) -> int:
        """Number of rows that have not ended."""
        return len(self._live())

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def _live(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def submit(self, tasks: list[GenerationRequest]) -> None:
        """Queue requests that were checked before."""
        self._waiting.extend(map(Row.of, tasks))

    def cycle(self) -> None:
        """Begin a call if rows can join, and generate one token for each row. Raises EngineError if memory runs out."""
        with explain_memory_error("while it was generating"):
            admitted = self._admissible()
            if admitted:
                self._begin([*self._live(), *(self._waiting.popleft() for _ in range(admitted))])
            assert self._call is not None
            self._sample(self._call.step())

    def _admissible(self) -> int:
        """Return how many waiting requests join now.

        0 while less than a quarter of the rows is free: each time rows join, all others are prefilled again.
        """
        live = self._live()
        free = self._slots - len(live)
        if live and free < max(1, self._slots // 4):
            return 0
        longest = max((row.longest for row in live), default=0)
        count = 0
        for row in islice(self._waiting, free):
            longest = max(longest, row.longest)
            if self.cache_tokens is not None and (len(live) + count + 1) * longest > self.cache_tokens:
                break
            count += 1
        return count

    def _begin(self, rows: list[Row]) -> None:
        self._drop_call()
        for row in rows:
            work = row.work
            work.mark(self.version, len(work.tokens))
            if work.task.sampling.prompt_logprobs_from is not None and work.prompt_logprobs is None:
                work.prompt_logprobs = self._prompt_logprobs(row)
        most = max(row.longest - len(row.ids) for row in rows)
        # One more than any row needs, so that the engine ends the call and not `generate`.
        ids, pictures = [row.ids for row in rows], [row.pictures for row in rows]
        self._call = TransformersCall(self._model, ids, pictures, most + 1)
        self._rows = list(rows)

    def _drop_call(self) -> None:
        if self._call is not None:
            self._call.stop()
        self._call, self._rows = None, []

    @torch.inference_mode()
    def _prompt_logprobs(self, row: Row) -> PromptLogprobs | None:
        """Compute what the request wants to know of its prompt, by a forward pass of its own."""
        task, sampling = row.work.task, row.work.task.sampling
        prompt = PromptPrefill(task.prompt, sampling.prompt_logprobs_from, sampling.top_logprobs, sampling.named_tokens)
        positions = logit_positions(prompt, 0, len(task.prompt))
        ids = torch.tensor([task.prompt], device=self._model.shape.device)
        seeing = seeing_arguments(self._model, ids, row.pictures)
        logits = self._model.module(input_ids=ids, use_cache=False, **seeing).logits[0, positions]
        record_logits(prompt, positions, self._mask(logits))
        return prompt.logprobs

    @torch.inference_mode()
    def _sample(self, logits: torch.Tensor) -> None:
        """Choose the next token of each row, record it, and end the rows that it completes."""
        places = [place for place, row in enumerate(self._rows) if row is not None]
        rows, own = self._live(), self._mask(logits[places])
        drawn = sample(own, *self._sampling(rows, own.device))
        assert self._call is not None
        chosen = torch.full((len(self._rows),), PADDING, device=own.device)
        chosen[places] = drawn.tokens
        self._call.choose(chosen)
        self.generated_tokens += len(rows)
        for i, (place, row, token, logprob) in enumerate(
            zip(places, rows, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
        ):
            work, sampling = row.work, row.work.task.sampling
            work.tokens.append(token)
            work.logprobs.append(logprob)
            if sampling.top_logprobs:
                work.tops += top_logprobs(own[i : i + 1], [sampling.temperature], sampling.top_logprobs)
            if sampling.named_tokens:
                work.named += token_logprobs(own[i : i + 1], [sampling.temperature], sampling.named_tokens)
            ending = self._ending(work)
            if ending is not None:
                self._rows[place] = None
            if ending is not None or work.task.streams:
                self.outbox.append(work.output(self.version, ending))
        if not self._live():
            self._drop_call()

    def _mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Give media tokens no probability. `logits` [row, vocabulary]: not changed."""
        forbidden = self._model.forbidden
        if not forbidden:
            return logits
        places = torch.tensor(forbidden, device=logits.device)
        return logits.index_fill(-1, places, max(FORBIDDEN, torch.finfo(logits.dtype).min))

    def _sampling(
        self, rows: Sequence[Row], device: torch.device
    ) -> tuple[torch.Tensor, BatchSamplingParams, ForbiddenTokens | None]:
        """Return the sampler's arguments for these rows: random numbers, parameters, and tokens that are too early."""
        sampling = [row.work.task.sampling for row in rows]
        params = BatchSamplingParams.of_requests(sampling, device)
        forbidden = ForbiddenTokens.of_requests(sampling, [len(row.work.tokens) for row in rows], device)
        uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=device)
        return uniforms, params, forbidden

    def _ending(self, work: SequenceState) -> Finish | None:
        """Return how the newest token ends the sample; None if it continues."""
        sampling, token = work.task.sampling, work.tokens[-1]
        if not math.isfinite(work.logprobs[-1]):
            work.drop_last()
            return Finish("abort", message="the model's output is not finite; its weights may be damaged")
        if sampling.stop:
            assert self._text is not None
            if (met := self._text.met(sampling.stop, work.tokens[-tail_length(sampling.stop) :])) is not None:
                return Finish("stop", matched=met)
        if token in sampling.stop_token_ids:
            return Finish("stop", matched=token)
        return Finish("length") if len(work.tokens) >= sampling.max_new_tokens else None

    def abort(self, unwanted: Callable[[GenerationRequest], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true, with the tokens that they have so far."""
        gone = [row for row in (*self._live(), *self._waiting) if unwanted(row.work.task)]
        self._rows = [None if row in gone else row for row in self._rows]
        self._waiting = deque(row for row in self._waiting if row not in gone)
        ending = Finish("abort", message=message)
        self.outbox += [row.work.output(self.version, ending) for row in gone]
        if not self._live():
            self._drop_call()

    def rename(self, version: str) -> None:
        """Set the version of the served weights, also for the next tokens of running rows. Raises EngineError."""
        super().rename(version)
        for row in self._live():
            row.work.mark(version, len(row.work.tokens))

    def _retract(self) -> None:
        live = self._live()
        self._drop_call()
        for row in live:
            row.work.retractions += 1
        self._waiting.extendleft(reversed(live))


def load_model(launch: EngineLaunch, text: Detokenizer | None) -> HfModel:
    """Load the model of a launch document, and find out whether padding changes its results.

    Raises UsageError or DataError if it cannot be served.
    """
    folder, device = Path(launch.model), torch.device(device_of(launch))
    config = require_config(folder)
    check_code(config, trusted=launch.trust_remote_code, where=launch.model)
    base = BaseFiles.found(folder)
    module = load_module(auto_class(config), folder, DTYPES[launch.dtype], trust_remote_code=launch.trust_remote_code)
    # The model's defaults (penalties, sampling, end tokens) would change what `generate` hands out.
    module.generation_config = GenerationConfig()
    inner = module.config.get_text_config()
    check_vocabulary(text, inner.vocab_size, folder)
    module.to(device).eval().requires_grad_(False)
    model = HfModel(
        module,
        folder,
        CacheShape((), DTYPES[launch.dtype], device),
        inner.vocab_size,
        context_length(inner, launch.context_length),
        end_tokens(folder, config, lambda token: None if text is None else text.token_id(token)),
        base,
        forbidden=media_token_ids(module.config),
    )
    if has_vision(config) and has_processor(folder):
        model.reader = PictureReader(module, folder, Path(launch.blobs) if launch.blobs else None)
    try:
        rows = _trial_rows(model)
        alone = torch.cat([_try(model, [row]) for row in rows])
        difference = float((alone - _try(model, rows)).abs().max())
    except Exception as error:  # the model's own code may raise anything
        if is_out_of_memory(error):
            raise
        raise DataError(
            f"transformers cannot generate with this model ({one_line(error)})",
            where=launch.model,
            fix="Serve it with SGLang instead",
        ) from error
    model.pads = difference <= TOLERANCES[model.shape.dtype]
    return model


TrialRow = tuple[Sequence[int], Sequence[PictureTensors]]
"""Tokens and pictures of a prompt of the trial at start."""


def _trial_rows(model: HfModel) -> list[TrialRow]:
    """Return prompts of unequal lengths; for a model with pictures, also one with a picture and one with two."""
    text = [token for token in range(model.vocabulary) if token not in model.forbidden]
    prompts = [[text[(7 * n + i) % len(text)] for i in range(n)] for n in TRIED]
    rows: list[TrialRow] = [(prompt, ()) for prompt in prompts]
    if model.reader is not None:
        one, other = (("", model.reader.noise(64, width)) for width in (64, 96))
        for pictures in ((one,), (one, other)):
            short = [*prompts[0], *(token for _ in pictures for token in (model.reader.token, *prompts[0]))]
            rows.append((model.reader.expand(short, pictures), [tensors for _, tensors in pictures]))
    return rows


def _try(model: HfModel, rows: list[TrialRow]) -> torch.Tensor:
    """Return log-probabilities [prompt, vocabulary] after one token that follows each prompt."""
    call = TransformersCall(model, [ids for ids, _ in rows], [pictures for _, pictures in rows], 3)
    call.step()
    call.choose(torch.ones(len(rows), dtype=torch.int64, device=model.shape.device))
    logits = call.step()
    call.stop()
    return torch.log_softmax(logits, dim=-1)


def start_engine(launch: EngineLaunch, text: Detokenizer | None) -> HfCore:
    """Create the engine core for a launch document. Raises UsageError, DataError or EngineError."""
    for setting, wanted, what in (
        ("task", launch.task == "classify", "serves no classifiers"),
        ("deterministic", launch.deterministic, "has no deterministic decoding"),
        ("adapters", bool(launch.adapters), "serves no adapters of judges"),
    ):
        if wanted:
            raise UsageError(f"the Hugging Face engine {what}", where=setting, fix="Set rollout.engine: torch")
    if launch.cache_tokens is not None and launch.cache_tokens < server.SHORTEST:
        raise UsageError(
            f"a cache of {launch.cache_tokens} tokens is too small even for a request of {server.SHORTEST} tokens",
            where="--cache-tokens",
            fix="Raise rollout.cache_tokens, or remove it",
        )
    with explain_memory_error("while it loaded the model", TOO_BIG):
        model = load_model(launch, text)
    return HfCore(
        model, text, slots=launch.batch_slots, cache_tokens=launch.cache_tokens, version=launch.weight_version
    )


def serve_engine(launch: EngineLaunch, control: ControlLine | None) -> None:
    """Load the model of a launch document and serve it (`torch.server.serve_engine`)."""
    server.serve_engine(launch, control, start_engine)
