"""Messages of the gRPC service `TrainRank`: validation, and conversion from and to the types of
`gcore.train.rank.feed`.

Only this module defines how tokens, worlds and groups are encoded, for the rank and for senders. A payload must have
the size and SHA-256 in its header, every sample must have its stated digest, and the digests of a group's samples must
give the group's own. Later the group's digest is compared with the seal (the record that fixes the step's groups).
Numbers that are not finite are refused here, before they can reach a gradient.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import cast, get_args

import numpy as np
from google.protobuf.message import DecodeError

from gcore.api.v1 import train_pb2 as pb
from gcore.errors import GcoreError
from gcore.ledger.balance import parts_sha256
from gcore.schema import SCHEMA_VERSION
from gcore.train.checkpoint.run_files import WriteProgress, WrittenCheckpoint
from gcore.train.rank.feed import FeedState, Fetching, SampleListing, TrainGroup, TrainSample, WorldName
from gcore.types import (
    DenoisingTrajectory,
    Group,
    Medium,
    MediumKind,
    PromptRef,
    Range,
    Sample,
    Token,
    Version,
    group_digest,
    media_bytes,
    picture_digest,
    range_problem,
)

CHUNK_BYTES = 1 << 20

LARGEST_PAYLOAD = (1 << 31) - 1
"""Maximum size of a protobuf message."""


class FeedDamaged(GcoreError):
    """A payload does not match its header or digests; the sender must send it again."""


def read_world(world: pb.WorldId) -> WorldName:
    """Decode the world that a caller addresses."""
    return WorldName(world.job_uid, world.world, world.lineage)


def read_token(token: pb.StepToken) -> Token:
    """Decode a step's fencing token (lineage, step, attempt)."""
    return Token(token.lineage, token.step, token.attempt)


def write_world(name: WorldName) -> pb.WorldId:
    """Inverse of `read_world`."""
    return pb.WorldId(job_uid=name.job_uid, world=name.world, lineage=name.lineage)


def write_token(token: Token) -> pb.StepToken:
    """Inverse of `read_token`."""
    return pb.StepToken(lineage=token.lineage, step=token.step, attempt=token.attempt)


def write_sample_listing(held: SampleListing) -> list[pb.HeldGroup]:
    """Encode which samples a rank holds: sample indexes by group digest, sorted."""
    return [pb.HeldGroup(digest=digest, samples=sorted(samples)) for digest, samples in sorted(held.items())]


def read_sample_listing(held: Iterable[pb.HeldGroup]) -> dict[str, frozenset[int]]:
    """Inverse of `write_sample_listing`."""
    return {group.digest: frozenset(group.samples) for group in held}


def write_fetching(fetching: Mapping[str, Fetching]) -> list[pb.FetchingGroup]:
    """Encode which received samples lack blobs, by group digest, sorted."""
    return [
        pb.FetchingGroup(
            digest=digest,
            samples=sorted(one.samples),
            total=one.total,
            fetched=one.fetched,
            unavailable=[bytes.fromhex(sha256) for sha256 in sorted(one.unavailable)],
        )
        for digest, one in sorted(fetching.items())
    ]


def read_fetching(fetching: Iterable[pb.FetchingGroup]) -> dict[str, Fetching]:
    """Inverse of `write_fetching`."""
    return {
        one.digest: Fetching(
            frozenset(one.samples), one.total, one.fetched, frozenset(blob.hex() for blob in one.unavailable)
        )
        for one in fetching
    }


def write_state(state: FeedState) -> pb.RankState:
    """Encode the part of a rank's state that is in `FeedState`: its world, held samples, and applied or begun work.

    `RankStatus.message` adds the rest.
    """
    message = pb.RankState(
        schema_version=SCHEMA_VERSION,
        world=write_world(state.name),
        rank=state.rank,
        world_size=state.world_size,
        held=write_sample_listing(state.held),
        fetching=write_fetching(state.fetching),
    )
    if state.holding is not None:
        message.holding.CopyFrom(write_token(state.holding))
    if state.applied is not None:
        message.applied.CopyFrom(write_token(state.applied))
    if state.begun:
        message.streaming.CopyFrom(write_token(Token(state.name.lineage, state.done + 1, 0)))
        message.begun, message.begun_sha256 = len(state.begun), parts_sha256(state.begun)
    return message


def write_saved_checkpoint(saved: WrittenCheckpoint) -> pb.SavedCheckpoint:
    """Encode which checkpoint is complete on disk."""
    return pb.SavedCheckpoint(
        lineage=saved.version.lineage, step=saved.version.step, file=saved.file, sha256=saved.sha256
    )


def read_saved_checkpoint(message: pb.SavedCheckpoint) -> WrittenCheckpoint:
    """Inverse of `write_saved_checkpoint`."""
    return WrittenCheckpoint(Version(message.lineage, message.step), message.file, message.sha256)


def write_checkpoint_progress(writing: WriteProgress) -> pb.CheckpointWrite:
    """Encode the progress of the newest checkpoint write."""
    return pb.CheckpointWrite(
        lineage=writing.version.lineage,
        step=writing.version.step,
        total=writing.total,
        written=writing.written,
        error=writing.error,
        over=writing.over,
    )


def read_checkpoint_progress(message: pb.CheckpointWrite) -> WriteProgress:
    """Inverse of `write_checkpoint_progress`."""
    return WriteProgress(
        version=Version(message.lineage, message.step),
        total=message.total,
        written=message.written,
        error=message.error,
        over=message.over,
    )


def write_payload(groups: Iterable[tuple[Group, frozenset[int]]], holders: Collection[str] = ()) -> bytes:
    """Encode groups for a feed, each with only the samples whose indexes are given; inverse of `read_payload`.

    `holders`: the nodes whose blob stores have their media.
    """
    return pb.FeedPayload(groups=[_part(group, samples, holders) for group, samples in groups]).SerializeToString()


def read_payload(header: pb.FeedHeader, data: bytes) -> Mapping[str, TrainGroup]:
    """Decode and verify the groups of a feed, by digest.

    `data`: all chunks of the feed, joined. Raises FeedDamaged if size, SHA-256, a digest or a number is wrong.
    """
    if len(data) != header.total_bytes or hashlib.sha256(data).digest() != header.sha256:
        raise FeedDamaged(
            f"the payload of {len(data)} bytes does not match its header ({header.total_bytes} bytes, or its SHA-256)",
            where=header.sender,
        )
    try:
        payload = pb.FeedPayload.FromString(data)
    except DecodeError as error:
        raise FeedDamaged(f"the payload is not a FeedPayload ({error})", where=header.sender) from error
    groups: dict[str, TrainGroup] = {}
    for part in payload.groups:
        group = _group(part, header.sender)
        groups[group.digest] = groups[group.digest].joined(group) if group.digest in groups else group
    return groups


def sample_digest(
    token_ids: bytes,
    logprobs: bytes,
    reward: float,
    *,
    masked: bool,
    observed: bytes = b"",
    media: tuple[Medium, ...] = (),
) -> bytes:
    """Compute `gcore.types.Sample.digest` of a text from its encoded bytes, without decoding them."""
    h = hashlib.sha256(struct.pack("<I", len(token_ids) // 4))
    h.update(token_ids)
    h.update(logprobs)
    h.update(struct.pack("<f?", reward, masked))
    h.update(observed)
    h.update(media_bytes(media))
    return h.digest()


def _part(group: Group, samples: frozenset[int], holders: Collection[str]) -> pb.GroupPart:
    return pb.GroupPart(
        ref=pb.PromptRef(data_epoch=group.ref.data_epoch, shard=group.ref.shard, seq=group.ref.seq),
        digest=group.digest(),
        prompt_ids=np.asarray(group.prompt_ids, dtype="<i4").tobytes(),
        sample_digests=[sample.digest() for sample in group.samples],
        samples=[_sample_part(index, group.samples[index]) for index in sorted(samples)],
        temperature=group.temperature,
        baseline=group.baseline,
        media=[_medium(medium) for medium in group.media],
        holders=sorted(holders) if group.all_media else [],
    )


def _sample_part(index: int, sample: Sample) -> pb.SamplePart:
    output = sample.output
    part = pb.SamplePart(
        index=index,
        token_ids=np.asarray(sample.token_ids, dtype="<i4").tobytes(),
        logprobs=np.asarray(sample.logprobs, dtype="<f4").tobytes(),
        reward=sample.reward,
        finish_reason=sample.finish_reason,
        masked=sample.masked,
        observed=np.asarray(sample.observed, dtype="<i4").tobytes(),
        media=[_medium(medium) for medium in sample.media],
    )
    if isinstance(output, DenoisingTrajectory):
        part.steps = np.asarray(output.steps, dtype="<i4").tobytes()
        part.sigmas = np.asarray(output.sigmas, dtype="<f4").tobytes()
    return part


def _medium(medium: Medium) -> pb.Medium:
    return pb.Medium(
        kind=medium.kind,
        sha256=bytes.fromhex(medium.sha256),
        size=medium.size,
        shape=medium.shape,
        dtype=medium.dtype,
    )


def _media(media: Iterable[pb.Medium], where: str) -> tuple[Medium, ...]:
    """Decode media. Raises FeedDamaged."""
    found = []
    for number, one in enumerate(media):
        if one.kind not in get_args(MediumKind) or len(one.sha256) != hashlib.sha256().digest_size or not one.size:
            raise FeedDamaged(
                f"medium {number} has kind {one.kind[:40]!r}, a hash of {len(one.sha256)} bytes and {one.size} bytes; it "
                "needs a known kind, a SHA-256 and a size",
                where=where,
            )
        kind = cast(MediumKind, one.kind)
        found.append(Medium(kind, one.sha256.hex(), one.size, tuple(one.shape), one.dtype))
    return tuple(found)


def _group(part: pb.GroupPart, sender: str) -> TrainGroup:
    ref = PromptRef(part.ref.data_epoch, part.ref.shard, part.ref.seq)
    where = f"group {part.digest} of prompt {ref} from {sender}"
    if not part.prompt_ids or len(part.prompt_ids) % 4:
        raise FeedDamaged(f"the prompt has {len(part.prompt_ids)} bytes; it needs at least one int32", where=where)
    prompt_ids = np.frombuffer(part.prompt_ids, dtype="<i4").astype(np.int32)
    if not (math.isfinite(part.temperature) and part.temperature > 0):
        raise FeedDamaged(f"the temperature is {part.temperature}; it must be above 0", where=where)
    baseline = part.baseline if part.HasField("baseline") else None
    if baseline is not None and not math.isfinite(baseline):
        raise FeedDamaged(
            f"the reward baseline of the group, from the flow, is {baseline}; it must be finite", where=where
        )
    digests, media = list(part.sample_digests), _media(part.media, where)
    if group_digest(ref, tuple(prompt_ids.tolist()), digests, part.temperature, baseline, media) != part.digest:
        raise FeedDamaged("the digest does not match the prompt and the samples' digests", where=where)
    samples = {}
    for sample in part.samples:
        if sample.index >= len(part.sample_digests):
            raise FeedDamaged(
                f"sample {sample.index} does not exist; there are {len(part.sample_digests)}", where=where
            )
        samples[sample.index] = _sample(sample, part.sample_digests[sample.index], where)
    holders = frozenset(part.holders)
    return TrainGroup(ref, part.digest, prompt_ids, samples, part.temperature, baseline, media, holders)


def _sample(sample: pb.SamplePart, digest: bytes, where: str) -> TrainSample:
    if sample.sigmas:
        return _picture(sample, digest, where)
    if len(sample.token_ids) % 4 or len(sample.token_ids) != len(sample.logprobs):
        raise FeedDamaged(
            f"sample {sample.index} has {len(sample.token_ids)} bytes of token ids and {len(sample.logprobs)} bytes of "
            "log-probabilities; both must have 4 bytes for each token",
            where=where,
        )
    media = _media(sample.media, f"{where}, sample {sample.index}")
    own = sample_digest(
        sample.token_ids, sample.logprobs, sample.reward, masked=sample.masked, observed=sample.observed, media=media
    )
    if own != digest:
        raise FeedDamaged(f"sample {sample.index} does not match its digest", where=where)
    logprobs = np.frombuffer(sample.logprobs, dtype="<f4").astype(np.float32)
    if not (np.isfinite(logprobs).all() and math.isfinite(sample.reward)):
        raise FeedDamaged(f"sample {sample.index} has a log-probability or reward that is not finite", where=where)
    token_ids = np.frombuffer(sample.token_ids, dtype="<i4").astype(np.int32)
    observed = _observed(sample, len(token_ids), where)
    return TrainSample(token_ids, logprobs, sample.reward, sample.masked, observed, media)


def _picture(sample: pb.SamplePart, digest: bytes, where: str) -> TrainSample:
    """Decode a generated picture. Raises FeedDamaged."""
    sizes = len(sample.steps), len(sample.logprobs), len(sample.sigmas)
    if any(size % 4 for size in sizes) or sizes[1] not in (0, sizes[0]) or sample.token_ids or sample.observed:
        raise FeedDamaged(
            f"sample {sample.index} has {sizes[0]} bytes of steps, {sizes[1]} of log-probabilities and {sizes[2]} of noise "
            f"levels, and {len(sample.token_ids)} bytes of tokens; a picture has one number a step and no tokens",
            where=where,
        )
    media = _media(sample.media, f"{where}, sample {sample.index}")
    numbers = sample.steps, sample.logprobs, sample.sigmas
    if picture_digest(*numbers, sample.reward, masked=sample.masked, media=media) != digest:
        raise FeedDamaged(f"sample {sample.index} does not match its digest", where=where)
    steps = np.frombuffer(sample.steps, dtype="<i4").astype(np.int32)
    logprobs, sigmas = (np.frombuffer(one, dtype="<f4").astype(np.float32) for one in numbers[1:])
    if not (np.isfinite(logprobs).all() and np.isfinite(sigmas).all() and math.isfinite(sample.reward)):
        raise FeedDamaged(f"sample {sample.index} has a number that is not finite", where=where)
    if len(steps) and not (steps[0] >= 0 and (np.diff(steps) > 0).all() and steps[-1] < len(sigmas) - 1):
        raise FeedDamaged(
            f"sample {sample.index} has steps {steps.tolist()} of {len(sigmas) - 1}; they must ascend", where=where
        )
    none = np.zeros(0, np.int32)
    return TrainSample(none, logprobs, sample.reward, sample.masked, media=media, steps=steps, sigmas=sigmas)


def _observed(sample: pb.SamplePart, count: int, where: str) -> tuple[Range, ...]:
    """Decode the observed ranges (tokens that the policy did not generate) of a sample with `count` tokens.

    Raises FeedDamaged.
    """
    if len(sample.observed) % 8:
        raise FeedDamaged(f"sample {sample.index} has {len(sample.observed)} bytes of observed ranges", where=where)
    edges = np.frombuffer(sample.observed, dtype="<i4").tolist()
    ranges = tuple(zip(edges[::2], edges[1::2], strict=True))
    if why := range_problem(ranges, count):
        raise FeedDamaged(f"sample {sample.index}: {why}", where=where)
    return ranges
