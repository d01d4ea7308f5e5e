"""The running rows and one decode step over them.

Joining: prompts go through the model together (`prefill`); a prompt that several joining rows share goes through once,
and one that a running row has goes through not at all: its keys, values and last logits are copied. The first token is
drawn from the prompt's last logits, every further one by `step`.

Not thread-safe, knows no queue and no clock: the runner's thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from gcore.rollout.engine.cache import RowCache
from gcore.rollout.engine.columns import make_room, refill, rows_for
from gcore.rollout.engine.model import Model
from gcore.rollout.engine.prefill import Pass, prefill
from gcore.rollout.engine.rows import Ended, Rows
from gcore.rollout.engine.sampling import Forbidden, RowParams, draw
from gcore.rollout.engine.tasks import Work, prompt_key


@dataclass(frozen=True, slots=True)
class Made:
    """What a join or a step made: rows from `first` on have one more token. `broken`: rows whose numbers are not finite."""

    first: int
    ended: Ended
    broken: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a joining row's prompt of `length` tokens is copied from: place `source` of a pass, or of the running rows."""

    length: int
    fresh: int | None
    """Which pass; None: the running rows."""
    source: int
    logits: torch.Tensor

    @property
    def together(self) -> tuple[int, int, int]:
        """Rows of which this is equal are written at once."""
        return (-1, self.length, self.source) if self.fresh is None else (self.fresh, self.length, 0)


class Decoder:
    """A model, its cache and the running rows. `slots`: rows at once, at most."""

    def __init__(self, model: Model, slots: int) -> None:
        self.model = model
        self.slots = slots
        self.rows = Rows()
        self.cache = RowCache(model.shape)
        self.column = 0
        """The next write column."""
        self._after_prompt: list[torch.Tensor | None] = []
        """By row: the logits after its prompt, as long as the present weights made all that is known of the prompt."""
        self._params: RowParams | None = None

    @property
    def free(self) -> int:
        """Rows that may join."""
        return self.slots - self.rows.active

    @torch.inference_mode()
    def join(self, works: Sequence[Work]) -> Made:
        """These become the last rows, and each draws a token. At most `free` of them."""
        prompts = {work.task.key if not work.tokens else prompt_key(_ids(work)): work for work in works}
        running = {
            work.task.key: row for row, work in enumerate(self.rows.works) if self._after_prompt[row] is not None
        }
        fresh = [key for key in prompts if key not in running]
        passes = prefill(self.model, self.cache, [_ids(prompts[key]) for key in fresh])
        origins = {fresh[m]: o for number, p in enumerate(passes) for m, o in _origins_of(number, p, prompts, fresh)}
        for key in prompts.keys() & running.keys():
            row = running[key]
            logits = self._after_prompt[row]
            assert logits is not None
            origins[key] = _Origin(len(_ids(prompts[key])), None, row, logits)
        return self._enter(works, origins, passes)

    def _enter(self, works: Sequence[Work], origins: dict[bytes, _Origin], passes: list[Pass]) -> Made:
        found = [(work, origins[work.task.key if not work.tokens else prompt_key(_ids(work))]) for work in works]
        found.sort(key=lambda pair: pair[1].together)
        before = self.rows.active
        self._make_room(longest=max(o.length for _, o in found), rows=before + len(found))
        row = before
        for _, group in groupby((o for _, o in found), key=lambda o: o.together):
            members = list(group)
            one, new = members[0], slice(row, row + len(members))
            if one.fresh is None:
                start = int(self.rows.starts[one.source])
                self.cache.copy(one.source, start, one.length, rows=new, column=self.column)
            else:
                prefix = passes[one.fresh].prefix
                self.cache.join(prefix, [o.source for o in members], one.length, row=row, column=self.column)
            row = new.stop
        for work, origin in found:
            work.cached_tokens = origin.length if origin.fresh is None else 0
        self.rows.join([work for work, _ in found], [self.column - o.length for _, o in found])
        self._after_prompt += [None if work.tokens else o.logits for work, o in found]
        self._params = None
        return self._draw(torch.stack([o.logits for _, o in found]), before)

    def _make_room(self, *, longest: int, rows: int) -> None:
        active = self.rows.active
        first = self.rows.first_column() if active else None
        room = make_room(first=first, column=self.column, longest=longest, columns=self.cache.columns)
        self.cache.move(
            room,
            rows=rows_for(rows, rows=self.cache.rows, most=self.slots),
            active=active,
            first=first or 0,
            column=self.column,
            starts=self.rows.starts[:active].tolist(),
        )
        self.rows.shift(room.shift)
        self.column += room.shift

    @torch.inference_mode()
    def step(self) -> Made:
        """Every row makes a token; there must be one."""
        active, device = self.rows.active, self.model.shape.device
        if self.column >= self.cache.columns:
            self._make_room(longest=0, rows=active)
        self.model.attention.bias = self.cache.aim(active=active, first=self.rows.first_column(), column=self.column)
        positions = self.column - self.rows.starts[:active]
        logits = self.model.module(
            input_ids=torch.from_numpy(self.rows.pending()[:, None]).to(device),
            position_ids=torch.from_numpy(positions[:, None]).to(device),
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.column += 1
        return self._draw(logits, 0)

    def _draw(self, logits: torch.Tensor, first: int) -> Made:
        rows, device = self.rows, self.model.shape.device
        if first or self._params is None:
            new = slice(first, rows.active)
            params = RowParams.of(rows.temperature[new], rows.top_p[new], rows.top_k[new], device)
            self._params = None if first else params
        else:
            params = self._params
        cells = rows.forbidden(first)
        forbidden = Forbidden(*torch.tensor(cells, device=device).unbind(1)) if cells else None
        drawn = draw(logits, torch.from_numpy(rows.uniforms(first)).to(device), params, forbidden)
        logprobs = drawn.logprobs.cpu().numpy()
        ended = rows.record(first, drawn.tokens.cpu().numpy(), logprobs)
        broken = () if np.isfinite(logprobs).all() else tuple((np.flatnonzero(~np.isfinite(logprobs)) + first).tolist())
        return Made(first, ended, broken)

    @torch.inference_mode()  # moving rows writes to tensors that were made in it
    def leave(self, leaving: Sequence[int]) -> list[Work]:
        """These rows give their place back; their works, with all that they made, in the order asked for."""
        works = [self.rows.save(row) for row in leaving]
        change = refill(leaving, self.rows.active)
        if change.holes:
            self.cache.refill(change, first=self.rows.first_column(), column=self.column)
            for hole, source in zip(change.holes, change.sources, strict=True):
                self._after_prompt[hole] = self._after_prompt[source]
        self.rows.refill(change)
        del self._after_prompt[change.active :]
        self._params = None
        return works

    def forget_prompts(self) -> None:
        """The weights have changed: what a running row knows of its prompt is not for others any more."""
        self._after_prompt = [None] * self.rows.active


def _ids(work: Work) -> tuple[int, ...]:
    return work.task.prompt + tuple(work.tokens)


def _origins_of(number: int, one: Pass, prompts: dict[bytes, Work], fresh: list[bytes]) -> list[tuple[int, _Origin]]:
    return [
        (member, _Origin(len(_ids(prompts[fresh[member]])), number, place, one.logits[place]))
        for place, member in enumerate(one.members)
    ]
