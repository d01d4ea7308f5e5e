"""The running rows and one decode step over them, whatever the lane.

Joining: a prompt that several joining rows share is read once, and one that a running row has is not read at all where the
lane can copy it: its keys, values and last logits are taken over. The first token is drawn from the prompt's last logits,
every further one by `step`. A row that comes back, with tokens it made before, has them read like a prompt, or (where the
lane replays) makes them again and keeps what it had.

Not thread-safe, knows no queue and no clock: the runner's thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gcore.rollout.engine.columns import refill
from gcore.rollout.engine.lane import Lane, Origin
from gcore.rollout.engine.model import Model
from gcore.rollout.engine.prefill import Chunk, Prompt
from gcore.rollout.engine.rows import Ended, Rows
from gcore.rollout.engine.sampling import Forbidden, RowParams, draw, likeliest, named
from gcore.rollout.engine.tasks import Work, prompt_key

Key = tuple[bytes, int | None, int, tuple[int, ...]]
"""What a prompt that is read is known by: its content, and which log-probabilities of it are wanted."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a join or a step made: rows from `first` on have one more token. `broken`: rows whose numbers are not finite."""

    first: int
    ended: Ended
    broken: tuple[int, ...]


class Decoder:
    """A lane and the running rows. `slots`: rows at once, at most."""

    def __init__(self, model: Model, lane: Lane, slots: int) -> None:
        self.model = model
        self.lane = lane
        self.slots = slots
        self.rows = Rows()
        self._after_prompt: list[torch.Tensor | None] = []
        """By row: the logits after its prompt, as long as they are what another row with this prompt would begin with."""
        self._prompts: dict[Key, Prompt] = {}
        """Prompts that are being read."""
        self._params: RowParams | None = None
        self._asking = False
        """Whether any row asks for the log-probabilities of tokens besides its own."""

    def key(self, work: Work) -> Key:
        """By what its prompt is known."""
        again = bool(work.tokens) and not self.lane.replays
        content = prompt_key(self.ids(work)) if again else work.task.key
        sampling = work.task.sampling
        if sampling.prompt_logprobs_from is None or work.prompt_logprobs is not None:
            return (content, None, 0, ())
        return (content, sampling.prompt_logprobs_from, sampling.top_logprobs, sampling.named_tokens)

    def ids(self, work: Work) -> tuple[int, ...]:
        """What is read before it joins."""
        return work.task.prompt if self.lane.replays else work.task.prompt + tuple(work.tokens)

    def known(self) -> dict[Key, int]:
        """Prompts that running rows have, and the row."""
        if not self.lane.copies:
            return {}
        return {
            (work.task.key, None, 0, ()): row
            for row, work in enumerate(self.rows.works)
            if self._after_prompt[row] is not None
        }

    def prompt(self, work: Work) -> Prompt:
        """The work's prompt as it is being read; a new one when it is not."""
        key = self.key(work)
        if key not in self._prompts:
            self._prompts[key] = Prompt(self.ids(work), *key[1:])
        return self._prompts[key]

    @torch.inference_mode()
    def read(self, chunks: Sequence[Chunk]) -> None:
        """Parts of prompts through the model."""
        self.lane.read(chunks)

    @torch.inference_mode()
    def join(self, works: Sequence[Work]) -> Made:
        """These, whose prompts are read or known, become the last rows, and each draws a token."""
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
                origins.append(Origin(len(self.ids(work)), logits, row=row))
                work.cached_tokens = origins[-1].length
            else:
                assert prompt.logits is not None
                origins.append(Origin(len(prompt.tokens), prompt.logits, prompt=prompt))
                # One of those that share a prompt has it computed, the others get it from there.
                work.cached_tokens = origins[-1].length if key in paid else 0
                work.prompt_logprobs = work.prompt_logprobs or prompt.logprobs
            paid.add(key)
        return self._enter(works, origins, paid)

    def _enter(self, works: Sequence[Work], origins: Sequence[Origin], read: set[Key]) -> Made:
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

    def _is_private(self, prompt: Prompt) -> bool:
        """Whether what follows the prompt is not for other rows: other weights read a part of it; or it came with the
        logits of more positions, which where every bit counts are not those of one."""
        return prompt.stale or (self.lane.replays and prompt.logprobs_from is not None)

    @torch.inference_mode()
    def step(self) -> Made:
        """Every row makes a token; there must be one."""
        return self._draw(self.lane.step(self.rows.pending(), self.rows.lengths), 0)

    def _draw(self, logits: torch.Tensor, first: int) -> Made:
        rows, device = self.rows, self.model.shape.device
        if first or self._params is None:
            new = slice(first, rows.active)
            params = RowParams.of(rows.temperature[new], rows.top_p[new], rows.top_k[new], rows.min_p[new], device)
            self._params = None if first else params
        else:
            params = self._params
        cells = rows.forbidden(first)
        forbidden = Forbidden(*torch.tensor(cells, device=device).unbind(1)) if cells else None
        drawn = draw(logits, torch.from_numpy(rows.uniforms(first)).to(device), params, forbidden)
        logprobs = drawn.logprobs.cpu().numpy()
        ended = rows.record(first, drawn.tokens.cpu().numpy(), logprobs)
        if self._asking:
            self._tell_others(logits, first)
        if np.isfinite(logprobs).all():
            return Made(first, ended, ())
        self.lane.clean()
        return Made(first, ended, tuple((np.flatnonzero(~np.isfinite(logprobs)) + first).tolist()))

    def _tell_others(self, logits: torch.Tensor, first: int) -> None:
        """The likeliest tokens and the named ones, for the rows that ask for them."""
        for row in range(first, self.rows.active):
            work, own = self.rows.works[row], logits[row - first : row - first + 1]
            sampling = work.task.sampling
            if self.rows.replays(row):
                continue
            if sampling.top_logprobs:
                work.tops += likeliest(own, [sampling.temperature], sampling.top_logprobs)
            if sampling.named_tokens:
                work.named += named(own, [sampling.temperature], sampling.named_tokens)

    @torch.inference_mode()  # moving rows writes to tensors that were made in it
    def leave(self, leaving: Sequence[int]) -> list[Work]:
        """These rows give their place back; their works, with all that they made, in the order asked for."""
        if not leaving:
            return []
        works = [self.rows.save(row) for row in leaving]
        change = refill(leaving, self.rows.active)
        self.lane.leave(change)
        for hole, source in zip(change.holes, change.sources, strict=True):
            self._after_prompt[hole] = self._after_prompt[source]
        self.rows.refill(change)
        del self._after_prompt[change.active :]
        self._params = None
        return works

    def drop_prompts(self, works: Sequence[Work] = ()) -> None:
        """Forget what has been read of prompts, all but those of these works."""
        keep = {self.key(work) for work in works}
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key in keep}

    def distrust_prompts(self) -> None:
        """The weights have changed: what is known of a prompt is not for others any more."""
        self._after_prompt = [None] * self.rows.active
        for prompt in self._prompts.values():
            prompt.stale = prompt.stale or prompt.done > 0
