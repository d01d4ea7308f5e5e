"""State machine of a rank: which samples it holds, and what it may train.

Pure: an event and a state give a new state and an answer. A step goes through these events: controllers feed samples
under a token (lineage, step, attempt); a seal fixes which groups the step trains on and which ranks hold them; the seal
is READY when every rank holds its share; Apply starts training. The rules:

- A caller that names another job, world or lineage is refused: a discarded world must neither receive samples nor
  train, and controllers of another world must not use this one.
- Steps are applied in sequence: only the step after the last applied one can receive samples. The highest attempt of
  that step is kept. Feeds of lower attempts are dropped without an error, because their sender is only late. Feeds of
  the same attempt accumulate; repeated samples are ignored.
- Apply needs the READY seal of this world for exactly the token whose samples the rank holds, and every sample of this
  rank's share with the digest and lengths in the seal. Samples beyond the share are ignored.
- From Apply until its end nothing else changes the state. A token is applied once; a repeated request does nothing. If
  it fails, the process ends.
- A streamed step is sealed and made READY in parts. READY parts are begun (their gradients computed) in order, each
  once, and Apply begins the remaining ones. A READY part never changes, so the attempt that reports it does not matter;
  a seal that contradicts a begun part is refused. Held samples of such a step are kept from attempt to attempt, because
  most are sealed again and their digests identify them.
- A sample with media (pictures or other large arrays, `gcore.types.Medium`) is held when the blobs of its prompt and of
  itself are verified and in the folder of this world. Before, it is *fetching*: it was received, is not fed again, and
  cannot be trained. Verified blobs stay from attempt to attempt; they are dropped when the step is trained.

Messages were validated before (`gcore.train.rank.messages`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gcore.ledger.balance import SampleSlot, StepLayout, balance_samples, part_digests, part_layout, seal_up_to
from gcore.ledger.records.chain import Seal, SealState
from gcore.types import Medium, PromptRef, Range, Token

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WorldName:
    """Identifies a rank's world (one set of training processes): its job, its own name, and its lineage (training
    branch).
    """

    job_uid: str
    world: str
    lineage: int

    def __str__(self) -> str:
        return f"world {self.world}, lineage {self.lineage}, of job {self.job_uid}"


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """A sample for training: token ids [n] int32, the engine's log-probabilities [n] float32, the reward.

    `masked`: its tokens are masked in the loss; its reward still counts for the group.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reward: float
    masked: bool = False
    observed: tuple[Range, ...] = ()
    """Ranges of tokens that the policy did not generate (tool or environment output). They are not trained and not
    counted.
    """
    media: tuple[Medium, ...] = ()
    """Pictures of the response, or arrays of a diffusion sample."""
    steps: NDArray[np.int32] | None = None
    """Trained denoising steps [n] int32 of a generated picture, whose log-probabilities `logprobs` has. None: it is a
    text."""
    sigmas: NDArray[np.float32] | None = None
    """All noise levels [m] float32 of its schedule; None: it is a text."""

    @property
    def length(self) -> int:
        """Number of trained positions: tokens, observed ones included, or denoising steps."""
        return len(self.token_ids) if self.steps is None else len(self.steps)

    @property
    def observed_count(self) -> int:
        """Number of tokens that the policy did not generate."""
        return sum(end - start for start, end in self.observed)


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """Samples of one prompt (a group) that this rank has received, by their index in the group.

    `digest`: of the complete group. `prompt_ids` [n] int32. `temperature`: with which the samples were generated.
    `baseline`: reward to subtract, if the flow computed one (ReMax).
    """

    ref: PromptRef
    digest: str
    prompt_ids: NDArray[np.int32]
    samples: Mapping[int, TrainSample]
    temperature: float = 1.0
    baseline: float | None = None
    media: tuple[Medium, ...] = ()
    """The prompt's pictures."""
    holders: frozenset[str] = frozenset()
    """Nodes whose blob stores have the media of the prompt and of the samples."""

    def joined(self, other: TrainGroup) -> TrainGroup:
        """A group with the samples of both. The caller checks that the digests are equal, so both are parts of the same
        group.
        """
        return replace(self, samples={**self.samples, **other.samples}, holders=self.holders | other.holders)

    def media_of(self, samples: Collection[int]) -> Mapping[str, Medium]:
        """The media of the prompt and of these samples, by SHA-256; empty without samples."""
        of_samples = (medium for index in sorted(samples) for medium in self.samples[index].media)
        return {medium.sha256: medium for medium in (*(self.media if samples else ()), *of_samples)}

    def complete(self, blobs: Collection[str]) -> frozenset[int]:
        """The samples all of whose media, and those of the prompt, are among `blobs` (SHA-256)."""
        if not all(medium.sha256 in blobs for medium in self.media):
            return frozenset()
        return frozenset(
            index for index, sample in self.samples.items() if all(medium.sha256 in blobs for medium in sample.media)
        )


SampleListing = Mapping[str, frozenset[int]]
"""Which samples are held: sample indexes by group digest."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Received samples of a group that are not held, because blobs are missing. `total` and `fetched`: bytes of all
    their blobs, and of those that are there. `unavailable`: SHA-256 of blobs that no holder's store has.
    """

    samples: frozenset[int]
    total: int
    fetched: int
    unavailable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WantedBlob:
    """A blob that a rank lacks, and the nodes whose stores should have it."""

    medium: Medium
    holders: frozenset[str]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step for one rank to train: the seal, the layout (which samples each rank trains), and this rank's groups by
    digest.

    `begun`: number of parts of a streamed step that were begun before; their groups are not in `groups`.
    """

    seal: Seal
    layout: StepLayout
    rank: int
    groups: Mapping[str, TrainGroup]
    begun: int = 0


@dataclass(frozen=True, slots=True)
class StepPartInput:
    """Part `number` of a streamed step, counted from 0. `work`: a step whose layout has only that part."""

    number: int
    work: StepInput


def remaining_parts(work: StepInput) -> Iterator[StepPartInput]:
    """The parts of a streamed step that this rank has not begun, in order."""
    for number in range(work.begun, len(work.seal.parts)):
        yield _part(work.seal, number, work.rank, work.groups)


def finish_step(state: FeedState) -> FeedState:
    """The state after the step was trained. Raises ValueError if no token is being applied."""
    if state.applying is None:
        raise ValueError("no token is being applied")
    return replace(
        state,
        applying=None,
        applied=state.applying,
        done=state.applying.step,
        begun=(),
        blobs=frozenset(),
        unavailable=frozenset(),
    )


def add_blobs(state: FeedState, blobs: Collection[str]) -> FeedState:
    """The state after these blobs (SHA-256) were verified and put into the world's folder."""
    known = state.blobs | frozenset(blobs)
    held = dict(state.held)
    for digest, group in state.groups.items():
        if complete := group.complete(known):
            held[digest] = complete
    return replace(state, blobs=known, unavailable=state.unavailable - known, held=held)


def miss_blobs(state: FeedState, blobs: Collection[str]) -> FeedState:
    """The state after no holder's store had these blobs (SHA-256). A later feed that names them makes the rank ask
    again."""
    return replace(state, unavailable=state.unavailable | (frozenset(blobs) & state.wanted.keys()))


@dataclass(frozen=True, slots=True)
class FeedState:
    """State of a rank in the protocol.

    `done`: the last applied step. `holding`: the token whose samples the rank holds. `held`: which samples these are;
    it stays after `groups`, the samples themselves, were passed on for training. `applying`: the token that is being
    trained. `applied`: the last that was.
    """

    name: WorldName
    rank: int
    world_size: int
    done: int
    holding: Token | None = None
    held: SampleListing = field(default_factory=_nothing)
    groups: Mapping[str, TrainGroup] = field(default_factory=_nothing, repr=False)
    applying: Token | None = None
    applied: Token | None = None
    sequence_parallel: int = 1
    """Number of consecutive ranks that compute each sample together."""
    streams: bool = False
    """Whether the job's steps may be sealed and trained in parts (`train.stream`)."""
    begun: tuple[tuple[str, ...], ...] = ()
    """The begun parts of the step after `done`: for each part, the digests of all its groups."""
    blobs: frozenset[str] = frozenset()
    """SHA-256 of the verified blobs in the folder of this world."""
    unavailable: frozenset[str] = frozenset()
    """SHA-256 of missing blobs that no holder's store had when they were asked."""

    @property
    def fetching(self) -> Mapping[str, Fetching]:
        """The received samples whose blobs are missing, by group digest."""
        found = {}
        for digest, group in self.groups.items():
            lacking = group.samples.keys() - self.held.get(digest, frozenset())
            if lacking:
                media = group.media_of(lacking)
                total = sum(medium.size for medium in media.values())
                fetched = sum(medium.size for sha256, medium in media.items() if sha256 in self.blobs)
                found[digest] = Fetching(frozenset(lacking), total, fetched, self.unavailable & media.keys())
        return found

    @property
    def wanted(self) -> Mapping[str, WantedBlob]:
        """The blobs that received samples lack, by SHA-256."""
        found: dict[str, WantedBlob] = {}
        for group in self.groups.values():
            for sha256, medium in group.media_of(group.samples.keys()).items():
                if sha256 not in self.blobs:
                    others = found[sha256].holders if sha256 in found else frozenset()
                    found[sha256] = WantedBlob(medium, group.holders | others)
        return found


@dataclass(frozen=True, slots=True)
class FeedTaken:
    """The feed was accepted, or dropped because its attempt or step is past; `state.held` lists what the rank holds
    now.
    """

    state: FeedState


@dataclass(frozen=True, slots=True)
class Begin:
    """Answer to Apply: train `work` now."""

    state: FeedState
    work: StepInput


@dataclass(frozen=True, slots=True)
class BeginParts:
    """Answer to Accumulate: add the gradients of these parts, in this order."""

    state: FeedState
    parts: tuple[StepPartInput, ...]


@dataclass(frozen=True, slots=True)
class AlreadyApplied:
    """The step is being trained or was trained, or the parts were begun; there is nothing to do."""


@dataclass(frozen=True, slots=True)
class RankRefusal:
    """The request is refused; `reason` says why."""

    reason: str


def check_caller(state: FeedState, name: WorldName, token: Token | None = None) -> RankRefusal | None:
    """Check that the caller addresses this world, and a token of its lineage if `token` is given. None if so."""
    if name != state.name:
        return RankRefusal(f"this is rank {state.rank} of {state.name}, not of {name}")
    if token is not None and token.lineage != state.name.lineage:
        return RankRefusal(f"token {token} is not of lineage {state.name.lineage}")
    return None


def feed_samples(
    state: FeedState, name: WorldName, token: Token, groups: Mapping[str, TrainGroup]
) -> FeedTaken | RankRefusal:
    """Add received samples for `token` to the held ones. `groups`: by digest.

    Samples of a step or attempt that is past are dropped without an error; a later step than the next is refused.
    """
    refused = check_caller(state, name, token)
    if refused is not None:
        return refused
    if token.step > state.done + 1:
        return RankRefusal(f"step {token.step} cannot be fed before step {state.done + 1} is applied")
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
    held = {digest: samples for digest, samples in state.held.items() if digest in over}
    for digest, group in merged.items():
        complete = group.complete(state.blobs)
        if complete or not group.samples:
            held[digest] = complete
    asked = {sha256 for group in groups.values() for sha256 in group.media_of(group.samples.keys())}
    return FeedTaken(replace(state, holding=token, groups=merged, held=held, unavailable=state.unavailable - asked))


def accumulate_parts(
    state: FeedState, name: WorldName, token: Token, seal: Seal
) -> BeginParts | AlreadyApplied | RankRefusal:
    """Begin the parts of `seal` that are READY and not begun yet. `seal`: the seal that is stored for `token`."""
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
    """Begin to train the step of `token`. `seal`: the seal that is stored for it; it must be READY."""
    refused = check_caller(state, name, token)
    if refused is not None:
        return refused
    if token in (state.applying, state.applied):
        return AlreadyApplied()
    if token.step <= state.done:
        return RankRefusal(f"step {token.step} was already applied with another token than {token}")
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
    """Why this rank cannot train this seal (wrong token, world or step); empty if it can."""
    if seal.token != token:
        return f"the seal is of token {seal.token}, not {token}"
    if seal.world != state.name.world or seal.world_size != state.world_size:
        return (
            f"the seal is for {seal.world_size} ranks of world {seal.world}, "
            f"but this rank is one of {state.world_size} of world {state.name.world}"
        )
    if seal.sequence_parallel != state.sequence_parallel:
        return (
            f"the seal is for sequence groups of {seal.sequence_parallel} ranks, "
            f"but those of this world have {state.sequence_parallel}"
        )
    if token.step != state.done + 1:
        return f"step {token.step} cannot be applied before step {state.done + 1}"
    return ""


def _parts_fault(state: FeedState, seal: Seal, parts: int) -> str:
    """Why the parts of `seal` contradict the parts that this rank has begun; empty if they do not.

    `parts`: how many parts of the seal must be READY.
    """
    if _ready_parts(seal) < parts:
        return f"{seal.ready_parts} parts of the seal of {seal.token} are READY, not {parts}"
    stated = part_digests(seal, parts)
    common = min(len(stated), len(state.begun))
    if stated[:common] != state.begun[:common]:
        return f"the parts of step {seal.step} that this rank has begun differ from the seal of {seal.token}"
    if seal.state is SealState.READY and len(state.begun) > len(stated):
        return f"this rank has begun {len(state.begun)} parts of step {seal.step}, but the seal of {seal.token} has {len(stated)}"
    return ""


def _ready_parts(seal: Seal) -> int:
    """Number of consecutive READY parts of a seal, from the first."""
    return seal.ready_parts


def _held_of(state: FeedState, token: Token) -> Mapping[str, TrainGroup]:
    """The held groups that may be trained under `token`, by digest."""
    if state.streams and state.holding is not None and state.holding.step == token.step:
        return state.groups
    return state.groups if state.holding == token else _nothing()


def _share_lacking(state: FeedState, held: Mapping[str, TrainGroup], seal: Seal, chunks: range) -> str:
    """Which sample of this rank's share is missing or contradicts the seal; empty if none. `chunks`: mini-batches or
    parts.
    """
    layout = balance_samples(seal)
    for chunk in chunks:
        slot: SampleSlot
        for slot in layout.share(chunk, state.rank):
            group = seal.groups[slot.group]
            lacking = _lacking(held.get(group.digest), seal, slot.group, slot.sample, state.blobs)
            if lacking:
                return f"{lacking}: prompt {group.ref}, group {group.digest}, in this rank's share of {seal.token}"
    return ""


def _part(seal: Seal, number: int, rank: int, held: Mapping[str, TrainGroup]) -> StepPartInput:
    layout = part_layout(seal, number)
    used = {seal.groups[slot.group].digest for slot in layout.of_rank(rank)}
    return StepPartInput(
        number, StepInput(seal_up_to(seal, number + 1), layout, rank, {digest: held[digest] for digest in used})
    )


def _lacking(group: TrainGroup | None, seal: Seal, number: int, sample: int, blobs: Collection[str]) -> str:
    """Why sample `sample` of the seal's group `number` is missing or contradicts the seal; empty if it does not.

    `blobs`: SHA-256 of the blobs in this world's folder.
    """
    sealed = seal.groups[number]
    if group is None or sample not in group.samples:
        return f"sample {sample} is missing"
    if missing := group.media_of((sample,)).keys() - blobs:
        return f"blob {min(missing)} of sample {sample} is missing"
    if group.ref != sealed.ref:
        return f"sample {sample} was sent for prompt {group.ref}"
    if group.samples[sample].masked != (sample in sealed.masked):
        return f"sample {sample} is {'masked' if group.samples[sample].masked else 'unmasked'}, unlike in the seal"
    found = (len(group.prompt_ids), group.samples[sample].length)
    stated = (sealed.prompt_tokens, sealed.response_tokens[sample])
    if found != stated:
        return f"sample {sample} has {found[0]} + {found[1]} tokens instead of {stated[0]} + {stated[1]}"
    observed, expected = (
        group.samples[sample].observed_count,
        sealed.response_tokens[sample] - sealed.own_tokens[sample],
    )
    if observed != expected:
        return f"sample {sample} has {observed} observed tokens instead of {expected}"
    return ""
