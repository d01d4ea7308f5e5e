"""In-memory engine for tests of code that uses `gcore.rollout.api.Engine`: tokens are a function of prompt and seed.

A sample gets one token every `TOKEN_S` seconds of its clock, up to `max_new_tokens`. Pauses, aborts, sleep and weight
versions follow the rules of real engines. The text consists of the tokens' numbers; log-probabilities are those of a
uniform distribution.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.errors import EngineError, EngineGaveUp
from gcore.rollout.api import PauseMode, ProgressCallback, RequestPictures, SamplingParams
from gcore.system.clock import Clock
from gcore.types import FinishReason, Sample, Version, VersionSpan

TOKEN_S = 0.0005
"""Seconds of the clock to generate one token."""


class FakeEngine:
    """An `Engine` in memory. `version`: the weights that it serves. `vocabulary`: number of token ids; all are below it."""

    def __init__(self, clock: Clock, version: Version | None = None, *, vocabulary: int = 100) -> None:
        self._clock = clock
        self.base_url = "memory://engine"
        self._vocabulary = vocabulary
        self._logprob = struct.unpack("<f", struct.pack("<f", -math.log(vocabulary)))[0]
        self._version = version
        self._paused = False
        self._asleep = False
        self._released = False
        self._aborted: set[str] = set()
        self._running: set[str] = set()

    async def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int],
        rid: str,
        growing: ProgressCallback | None = None,
    ) -> tuple[Sample, ...]:
        """Generate one sample per prompt."""
        each = [params] * len(seeds) if isinstance(params, SamplingParams) else params
        if any(token not in range(self._vocabulary) for prompt in prompts for token in prompt):
            raise EngineError(
                f"a token id of a prompt is not in the vocabulary of {self._vocabulary} tokens", where=self.base_url
            )
        samples = (
            self._sample(i, prompt, one, seed, f"{rid}-{i}", growing)
            for i, (prompt, one, seed) in enumerate(zip(prompts, each, seeds, strict=True))
        )
        return tuple(await asyncio.gather(*samples))

    async def _sample(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        rid: str,
        growing: ProgressCallback | None,
    ) -> Sample:
        draws = np.random.default_rng([*prompt, *((1, seed) if params.temperature else (0,))])
        tokens: list[int] = []
        spans: list[VersionSpan] = []
        self._running.add(rid)
        try:
            while len(tokens) < params.max_new_tokens and rid not in self._aborted:
                await self._clock.sleep(TOKEN_S)
                if self._paused or self._asleep or rid in self._aborted:
                    continue
                tokens.append(int(draws.integers(self._vocabulary)))
                self._mark(spans, len(tokens))
                if growing is not None and len(tokens) % growing.every == 0:
                    growing.tell(index, self._made(tokens, spans, "abort"))
            return self._made(tokens, spans, "length" if len(tokens) == params.max_new_tokens else "abort")
        finally:
            self._running.discard(rid)
            self._aborted.discard(rid)

    def _mark(self, spans: list[VersionSpan], count: int) -> None:
        version = self._version or Version(0, 0)
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, count)
        else:
            spans.append(VersionSpan(version, count - 1, count))

    def _made(self, tokens: Sequence[int], spans: Sequence[VersionSpan], reason: FinishReason) -> Sample:
        text = " ".join(map(str, tokens))
        return Sample(tuple(tokens), (self._logprob,) * len(tokens), text, reason, tuple(spans))

    async def classify(
        self, questions: Sequence[Sequence[int]], *, rid: str, pictures: Sequence[RequestPictures | None] = ()
    ) -> tuple[float, ...]:
        """Return the last token of each question divided by the vocabulary size."""
        if self._asleep:
            raise EngineGaveUp("the engine gave up on a question", where=self.base_url, fix="It is asked again")
        return tuple(question[-1] / self._vocabulary for question in questions)

    async def abort(self, rid: str, count: int) -> None:
        """End the samples 0 to `count` - 1 of the request `rid` with the tokens that they have."""
        self._aborted |= {f"{rid}-{i}" for i in range(count)} & self._running

    async def update_weights(self, path: str, version: Version) -> None:
        """Serve `version` from now on; `path` is not read.

        Raises EngineError for a version older than the served one, and while the memory is released.
        """
        if self._released:
            raise EngineError("the weights are released", where=self.base_url)
        if self._version is not None and version < self._version:
            raise EngineError(
                f"version {version} is older than the served version {self._version}", where=self.base_url
            )
        self._version, self._asleep, self._paused = version, False, False

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop generating tokens. With `mode` abort, also end all running samples."""
        self._paused = True
        if mode == "abort":
            self._aborted |= self._running

    async def resume(self) -> None:
        """Generate tokens again."""
        self._paused = False

    async def sleep(self) -> None:
        """Abort all samples and count the memory as released."""
        await self.pause("abort")
        self._asleep = self._released = True

    async def take_memory(self) -> None:
        """Count the memory as restored. The engine still serves nothing until `wake`."""
        self._released = False

    async def wake(self, version: Version) -> None:
        """Restore the memory and serve `version`, the weights that it had before `sleep`."""
        await self.take_memory()
        self._version, self._asleep, self._paused = version, False, False

    async def sleeps(self) -> bool:
        """Whether `sleep` was called, and neither `wake` nor `update_weights` since."""
        return self._asleep

    async def released(self) -> bool:
        """Whether `sleep` released the memory and nothing has restored it."""
        return self._released

    async def load(self) -> tuple[int | None, int | None]:
        """Return the number of running samples, and 0 for queued ones."""
        return len(self._running), 0

    async def served(self) -> Version | None:
        """Return the version of the served weights; None while the engine sleeps."""
        return None if self._asleep else self._version

    async def scheduler_state(self) -> Mapping[str, Any]:
        """Return the scheduler's state in the form of SGLang's `/server_info`."""
        return {"internal_states": [{"num_running_reqs": len(self._running), "paused": self._paused}]}

    async def metrics(self) -> str:
        """Return an empty text, because this engine has no metrics."""
        return ""

    async def close(self) -> None:
        """Do nothing: there are no connections."""
