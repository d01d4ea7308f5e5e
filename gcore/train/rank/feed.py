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
- Of a streamed step the READY parts are begun one after the other as they are told of, each once, and Apply begins what is
  left of them. A READY part never changes, so which attempt tells of it is of no matter; a slot that says otherwise is
  refused. What is held of such a step goes on from attempt to attempt: most of it is sealed again, and its digest says
  what it is.

What came over the wire is checked before it gets here (`gcore.train.rank.messages`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gcore.ledger.balance import SampleSlot, StepLayout, balance_samples, part_digests, part_layout, seal_up_to
from gcore.ledger.records.chain import Seal, SealState
from gcore.types import PromptRef, Range, Token

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WorldName:
    """Whose rank is meant."""

    job_uid: str
    world: str
    lineage: int

    def __str__(self) -> str:
        return f"world {self.world}, lineage {self.lineage}, of job {self.job_uid}"


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
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
class TrainGroup:
    """The samples of a group that were fed, by index.

    `prompt_ids` [n] int32; `temperature` is what it was sampled at, `baseline` what its rewards are held against, if the
    flow found one.
    """

    ref: PromptRef
    digest: str
    prompt_ids: NDArray[np.int32]
    samples: Mapping[int, TrainSample]
    temperature: float = 1.0
    baseline: float | None = None

    def joined(self, other: TrainGroup) -> TrainGroup:
        """With the samples of both; they are parts of the same group, since the digests are equal."""
        return replace(self, samples={**self.samples, **other.samples})


SampleListing = Mapping[str, frozenset[int]]
"""Group digest to sample indexes."""


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step to train on: its seal and layout, and this rank's groups by digest.

    `begun`: so many of its parts were begun before, and their groups are not among these.
    """

    seal: Seal
    layout: StepLayout
    rank: int
    groups: Mapping[str, TrainGroup]
    begun: int = 0


@dataclass(frozen=True, slots=True)
class StepPartInput:
    """Part `number` of a streamed step, from 0: a step of that part alone, with the slot cut down to it."""

    number: int
    work: StepInput


def remaining_parts(work: StepInput) -> Iterator[StepPartInput]:
    """The parts of a streamed step that were not begun before."""
    for number in range(work.begun, len(work.seal.parts)):
        yield _part(work.seal, number, work.rank, work.groups)


def finish_step(state: FeedState) -> FeedState:
    """The token that was being applied is applied, with everything that belongs to it. ValueError if there was none."""
    if state.applying is None:
        raise ValueError("no token is being applied")
    return replace(state, applying=None, applied=state.applying, done=state.applying.step, begun=())


@dataclass(frozen=True, slots=True)
class FeedState:
    """`done`: the last step this rank has weights of. `groups` are dropped once applied; `held`, their list, stays."""

    name: WorldName
    rank: int
    world_size: int
    done: int
    holding: Token | None = None
    held: SampleListing = field(default_factory=_nothing)
    groups: Mapping[str, TrainGroup] = field(default_factory=_nothing, repr=False)
    applying: Token | None = None
    applied: Token | None = None
    streams: bool = False
    """Whether its job's steps may come in parts."""
    begun: tuple[tuple[str, ...], ...] = ()
    """The parts of the step after `done` that were begun: the digests of all their groups."""


@dataclass(frozen=True, slots=True)
class FeedTaken:
    """A feed was taken, or dropped because its attempt or step is past. Either way this is what is held."""

    state: FeedState


@dataclass(frozen=True, slots=True)
class Begin:
    """Train on this now."""

    state: FeedState
    work: StepInput


@dataclass(frozen=True, slots=True)
class BeginParts:
    """Add these parts to the step's gradients, in this order."""

    state: FeedState
    parts: tuple[StepPartInput, ...]


@dataclass(frozen=True, slots=True)
class AlreadyApplied:
    """Being applied, or applied already: nothing to do."""


@dataclass(frozen=True, slots=True)
class RankRefusal:
    """Not with this rank, and why."""

    reason: str


def check_caller(state: FeedState, name: WorldName, token: Token | None = None) -> RankRefusal | None:
    """Whether the caller means this world; and, with `token`, whether that can be a token of it."""
    if name != state.name:
        return RankRefusal(f"this is rank {state.rank} of {state.name}, not of {name}")
    if token is not None and token.lineage != state.name.lineage:
        return RankRefusal(f"token {token} is not of lineage {state.name.lineage}")
    return None


def feed_samples(
    state: FeedState, name: WorldName, token: Token, groups: Mapping[str, TrainGroup]
) -> FeedTaken | RankRefusal:
    """Samples came for `token`."""
    refused = check_caller(state, name, token)
    if refused is not None:
        return refused
    if token.step > state.done + 1:
        return RankRefusal(f"step {token.step} cannot come before step {state.done + 1} was applied")
    if token.step <= state.done or state.applying is not None:
        return FeedTaken(state)
    if state.holding is not None and state.holding.step == token.step:
        if token < state.holding:
            return FeedTaken(state)
        if token > state.holding and not state.streams:
            state = _emptied(state)
    else:
        state = _emptied(state)
    merged = dict(state.groups)
    over = {digest for part in state.begun for digest in part}
    for digest, group in groups.items():
        if digest not in over:
            merged[digest] = merged[digest].joined(group) if digest in merged else group
    listed = {digest: samples for digest, samples in state.held.items() if digest in over}
    held = listed | {digest: frozenset(group.samples) for digest, group in merged.items()}
    return FeedTaken(replace(state, holding=token, groups=merged, held=held))


def accumulate_parts(
    state: FeedState, name: WorldName, token: Token, seal: Seal
) -> BeginParts | AlreadyApplied | RankRefusal:
    """The READY parts of `seal`, which is what the store says of `token`, shall be added to their step's gradients."""
    refused = check_caller(state, name, token)
    if refused is not None:
        return refused
    if token.step <= state.done or state.applying is not None:
        return AlreadyApplied()
    ready = _ready_parts(seal)
    wrong = _seal_fault(state, token, seal) or _parts_fault(state, seal, ready)
    if wrong:
        return RankRefusal(wrong)
    if ready <= len(state.begun):
        return AlreadyApplied()
    held = _held_of(state, token)
    lacking = _share_lacking(state, held, seal, range(len(state.begun), ready))
    if lacking:
        return RankRefusal(lacking)
    parts = tuple(_part(seal, number, state.rank, held) for number in range(len(state.begun), ready))
    begun = part_digests(seal, ready)
    over = {digest for part in begun for digest in part}
    left = {digest: group for digest, group in held.items() if digest not in over}
    return BeginParts(replace(state, begun=begun, groups=left), parts)


def apply_step(state: FeedState, name: WorldName, token: Token, seal: Seal) -> Begin | AlreadyApplied | RankRefusal:
    """`token` shall be trained on; `seal` is what the store says of it."""
    refused = check_caller(state, name, token)
    if refused is not None:
        return refused
    if token in (state.applying, state.applied):
        return AlreadyApplied()
    if token.step <= state.done:
        return RankRefusal(f"step {token.step} was applied already, with another token than {token}")
    if state.applying is not None:
        return RankRefusal(f"token {state.applying} is being applied, not {token}")
    if seal.state is not SealState.READY:
        return RankRefusal(f"the seal of {token} is {seal.state}, not READY")
    wrong = _seal_fault(state, token, seal) or _parts_fault(state, seal, len(seal.parts))
    if wrong:
        return RankRefusal(wrong)
    if state.holding is not None and state.holding > token:
        return RankRefusal(f"token {state.holding} is held, which is newer than {token}")
    layout, held = balance_samples(seal), _held_of(state, token)
    left = range(len(state.begun), layout.mini_batches)
    lacking = _share_lacking(state, held, seal, left)
    if lacking:
        return RankRefusal(lacking)
    used = {seal.groups[slot.group].digest for chunk in left for slot in layout.share(chunk, state.rank)}
    work = StepInput(seal, layout, state.rank, {digest: held[digest] for digest in used}, len(state.begun))
    return Begin(replace(state, holding=token, applying=token, groups=_nothing()), work)


def _emptied(state: FeedState) -> FeedState:
    return replace(state, holding=None, groups=_nothing(), held=_nothing())


def _seal_fault(state: FeedState, token: Token, seal: Seal) -> str:
    """Why nothing of this seal can be trained here, or nothing."""
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


def _parts_fault(state: FeedState, seal: Seal, parts: int) -> str:
    """Whether the first `parts` parts of `seal`, which are READY, are not those that were begun here, as far as they go."""
    if _ready_parts(seal) < parts:
        return f"{seal.ready_parts} parts of the seal of {seal.token} are READY, not {parts}"
    stated = part_digests(seal, parts)
    common = min(len(stated), len(state.begun))
    if stated[:common] != state.begun[:common]:
        return f"other parts of step {seal.step} were begun here than the seal of {seal.token} holds"
    if seal.state is SealState.READY and len(state.begun) > len(stated):
        return (
            f"{len(state.begun)} parts of step {seal.step} were begun here, the seal of {seal.token} has {len(stated)}"
        )
    return ""


def _ready_parts(seal: Seal) -> int:
    """So many parts of a seal, from the first, may be computed on."""
    return seal.ready_parts


def _held_of(state: FeedState, token: Token) -> Mapping[str, TrainGroup]:
    """What is held that may be trained under `token`."""
    if state.streams and state.holding is not None and state.holding.step == token.step:
        return state.groups
    return state.groups if state.holding == token else _nothing()


def _share_lacking(state: FeedState, held: Mapping[str, TrainGroup], seal: Seal, chunks: range) -> str:
    """What of this rank's share of some mini-batches, or parts, is not there as the seal says, or nothing."""
    layout = balance_samples(seal)
    for chunk in chunks:
        slot: SampleSlot
        for slot in layout.share(chunk, state.rank):
            group = seal.groups[slot.group]
            lacking = _lacking(held.get(group.digest), seal, slot.group, slot.sample)
            if lacking:
                return (
                    f"{lacking} of prompt {group.ref}, group {group.digest}, which is this rank's share of {seal.token}"
                )
    return ""


def _part(seal: Seal, number: int, rank: int, held: Mapping[str, TrainGroup]) -> StepPartInput:
    layout = part_layout(seal, number)
    used = {seal.groups[slot.group].digest for slot in layout.of_rank(rank)}
    return StepPartInput(
        number, StepInput(seal_up_to(seal, number + 1), layout, rank, {digest: held[digest] for digest in used})
    )


def _lacking(group: TrainGroup | None, seal: Seal, number: int, sample: int) -> str:
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
