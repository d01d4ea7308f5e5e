"""What a rank holds, and what it may train on. Pure: events in, a new state and an answer out.

- Who names another job, world or lineage is refused, whatever they want: a world that was given up must neither be fed
  nor train, and neither must this one for those who gave it up.
- Steps come one after the other: only the step after the last applied one can be fed. Of that step the highest attempt
  is kept; feeds of lower ones are dropped without complaint, because the sender only is late. Feeds of the same attempt
  add up; the same samples twice are the same samples.
- Apply needs the READY seal of this world for exactly the token that is held, and every sample of this rank's share
  under the digest and the lengths that stand in the seal. More than the share is ignored: what is trained is the share.
- From Apply on nothing but its end changes what is held. A token is applied once; asking again does nothing. If it
  fails the process ends, so there is no way back from here.

What came over the wire is checked before it gets here (`gcore.train.messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore.ledger.balance import StepLayout, balance
from gcore.ledger.records import Seal, SealState
from gcore.types import PromptRef, Range, Token


@dataclass(frozen=True, slots=True)
class WorldName:
    """Whose rank is meant."""

    job_uid: str
    world: str
    lineage: int

    def __str__(self) -> str:
        return f"world {self.world}, lineage {self.lineage}, of job {self.job_uid}"


@dataclass(frozen=True, slots=True, eq=False)
class HeldSample:
    """A sample as training needs it: token ids [n] int32, the engine's log-probabilities [n] float32, the reward.

    `masked`: its tokens are left out of the loss; its reward counts for the group all the same.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reward: float
    masked: bool = False
    observed: tuple[Range, ...] = ()
    """Of its tokens: what the policy did not make. It trains nothing, and nothing is counted of it."""

    @property
    def told(self) -> int:
        """How many tokens were observed."""
        return sum(end - start for start, end in self.observed)


@dataclass(frozen=True, slots=True, eq=False)
class HeldGroup:
    """The samples of a group that were fed, by index.

    `prompt_ids` [n] int32; `temperature` is what it was sampled at, `baseline` what its rewards are held against, if the
    flow found one.
    """

    ref: PromptRef
    digest: str
    prompt_ids: NDArray[np.int32]
    samples: Mapping[int, HeldSample]
    temperature: float = 1.0
    baseline: float | None = None

    def joined(self, other: HeldGroup) -> HeldGroup:
        """With the samples of both; they are parts of the same group, since the digests are equal."""
        return replace(self, samples={**self.samples, **other.samples})


Listing = Mapping[str, frozenset[int]]
"""Group digest to sample indexes."""


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Work:
    """A step to train on: its seal and layout, and this rank's groups by digest."""

    seal: Seal
    layout: StepLayout
    rank: int
    groups: Mapping[str, HeldGroup]


@dataclass(frozen=True, slots=True)
class FeedState:
    """`done`: the last step this rank has weights of. `groups` are dropped once applied; `held`, their list, stays."""

    name: WorldName
    rank: int
    world_size: int
    done: int
    holding: Token | None = None
    held: Listing = field(default_factory=_nothing)
    groups: Mapping[str, HeldGroup] = field(default_factory=_nothing, repr=False)
    applying: Token | None = None
    applied: Token | None = None


@dataclass(frozen=True, slots=True)
class Fed:
    """A feed was taken, or dropped because its attempt or step is past. Either way this is what is held."""

    state: FeedState


@dataclass(frozen=True, slots=True)
class Begin:
    """Train on this now."""

    state: FeedState
    work: Work


@dataclass(frozen=True, slots=True)
class Already:
    """Being applied, or applied already: nothing to do."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Not with this rank, and why."""

    reason: str


def admit(state: FeedState, name: WorldName, token: Token | None = None) -> Refused | None:
    """Whether the caller means this world; and, with `token`, whether that can be a token of it."""
    if name != state.name:
        return Refused(f"this is rank {state.rank} of {state.name}, not of {name}")
    if token is not None and token.lineage != state.name.lineage:
        return Refused(f"token {token} is not of lineage {state.name.lineage}")
    return None


def feed(state: FeedState, name: WorldName, token: Token, groups: Mapping[str, HeldGroup]) -> Fed | Refused:
    """Samples came for `token`."""
    refused = admit(state, name, token)
    if refused is not None:
        return refused
    if token.step > state.done + 1:
        return Refused(f"step {token.step} cannot come before step {state.done + 1} was applied")
    if token.step <= state.done or state.applying is not None:
        return Fed(state)
    if state.holding is not None and state.holding.step == token.step:
        if token < state.holding:
            return Fed(state)
        if token > state.holding:
            state = _emptied(state)
    else:
        state = _emptied(state)
    merged = dict(state.groups)
    for digest, group in groups.items():
        merged[digest] = merged[digest].joined(group) if digest in merged else group
    held = {digest: frozenset(group.samples) for digest, group in merged.items()}
    return Fed(replace(state, holding=token, groups=merged, held=held))


def apply(state: FeedState, name: WorldName, token: Token, seal: Seal) -> Begin | Already | Refused:
    """`token` shall be trained on; `seal` is what the store says of it."""
    refused = admit(state, name, token)
    if refused is not None:
        return refused
    if token in (state.applying, state.applied):
        return Already()
    if token.step <= state.done:
        return Refused(f"step {token.step} was applied already, with another token than {token}")
    if state.applying is not None:
        return Refused(f"token {state.applying} is being applied, not {token}")
    wrong = _seal_fault(state, token, seal)
    if wrong:
        return Refused(wrong)
    layout = balance(seal)
    share = layout.of_rank(state.rank)
    if state.holding is not None and state.holding > token:
        return Refused(f"token {state.holding} is held, which is newer than {token}")
    held = state.groups if state.holding == token else _nothing()
    for slot in share:
        group = seal.groups[slot.group]
        lacking = _lacking(held.get(group.digest), seal, slot.group, slot.sample)
        if lacking:
            return Refused(
                f"{lacking} of prompt {group.ref}, group {group.digest}, which is this rank's share of {token}"
            )
    used = {seal.groups[number].digest for number in layout.groups_of_rank(state.rank)}
    work = Work(seal, layout, state.rank, {digest: held[digest] for digest in used})
    return Begin(replace(state, holding=token, applying=token, groups=_nothing()), work)


def applied(state: FeedState) -> FeedState:
    """The token that was being applied is applied, with everything that belongs to it. ValueError if there was none."""
    if state.applying is None:
        raise ValueError("no token is being applied")
    return replace(state, applying=None, applied=state.applying, done=state.applying.step)


def _emptied(state: FeedState) -> FeedState:
    return replace(state, holding=None, groups=_nothing(), held=_nothing())


def _seal_fault(state: FeedState, token: Token, seal: Seal) -> str:
    """Why this seal cannot be applied here, or nothing."""
    if seal.state is not SealState.READY:
        return f"the seal of {token} is {seal.state}, not READY"
    if seal.token != token:
        return f"the seal is of token {seal.token}, not {token}"
    if seal.world != state.name.world or seal.world_size != state.world_size:
        return (
            f"the seal is for {seal.world_size} ranks of world {seal.world}, "
            f"this is one of {state.world_size} of {state.name.world}"
        )
    if token.step != state.done + 1:
        return f"step {token.step} cannot come before step {state.done + 1} was applied"
    return ""


def _lacking(group: HeldGroup | None, seal: Seal, number: int, sample: int) -> str:
    """What of a sample is not as the seal says, or nothing."""
    sealed = seal.groups[number]
    if group is None or sample not in group.samples:
        return f"sample {sample} is missing"
    if group.ref != sealed.ref:
        return f"sample {sample} came for prompt {group.ref} and not"
    if group.samples[sample].masked != (sample in sealed.masked):
        return (
            f"sample {sample} came {'masked' if group.samples[sample].masked else 'unmasked'}, which the seal denies,"
        )
    found = (len(group.prompt_ids), len(group.samples[sample].token_ids))
    stated = (sealed.prompt_tokens, sealed.response_tokens[sample])
    if found != stated:
        return f"sample {sample} has {found[0]} + {found[1]} tokens and not {stated[0]} + {stated[1]}"
    told, said = group.samples[sample].told, sealed.response_tokens[sample] - sealed.own_tokens[sample]
    if told != said:
        return f"sample {sample} has {told} observed tokens and not {said}"
    return ""
