"""Messages on the wire round-trip exactly or are refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.api.v1 import train_pb2 as pb
from gcore.train.rank.messages import FeedDamaged, read_payload, sample_digest, write_payload
from gcore.types import DenoisingTrajectory, Group, Medium, PromptRef, Sample, TokenOutput, Version, VersionSpan

floats = st.floats(-50, 50, width=32)


media = st.lists(
    st.builds(
        Medium,
        st.sampled_from(["picture", "trajectory", "embeds", "decoded"]),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        st.integers(1, 2**40),
        st.lists(st.integers(0, 2**32), max_size=4).map(tuple),
        st.sampled_from(["uint8", "float32"]),
    ),
    max_size=3,
).map(tuple)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=12))
    logprobs = [draw(floats) for _ in ids]
    spans = (VersionSpan(Version(0, 0), 0, len(ids)),)
    output = TokenOutput(tuple(ids), tuple(logprobs), "", spans, media=draw(media))
    return Sample(output=output, finish_reason="stop", reward=draw(floats), masked=draw(st.booleans()))


@st.composite
def generated_pictures(draw: st.DrawFn) -> Sample:
    levels = sorted(draw(st.sets(st.floats(0, 1, width=32), min_size=2, max_size=6)), reverse=True)
    steps = sorted(draw(st.sets(st.integers(0, len(levels) - 2))))
    logprobs = tuple(draw(floats) for _ in steps)
    spans = (VersionSpan(Version(0, 0), 0, len(steps)),)
    output = DenoisingTrajectory(tuple(steps), tuple(levels), logprobs, spans, draw(st.integers(0, 9)), draw(media))
    return Sample(output=output, finish_reason="stop", reward=draw(floats), masked=draw(st.booleans()))


groups = st.builds(
    Group,
    st.builds(PromptRef, st.integers(0, 3), st.integers(0, 9), st.integers(0, 99)),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9).map(tuple),
    st.lists(samples(), min_size=1, max_size=4).map(tuple),
    temperature=st.floats(0.125, 8, width=32),
    baseline=st.none() | floats,
    media=media,
)


def named(media: tuple[Medium, ...]) -> list[pb.Medium]:
    return [
        pb.Medium(kind=m.kind, sha256=bytes.fromhex(m.sha256), size=m.size, shape=m.shape, dtype=m.dtype) for m in media
    ]


def part(group: Group) -> pb.GroupPart:
    return pb.GroupPart(
        media=named(group.media),
        ref=pb.PromptRef(data_epoch=group.ref.data_epoch, shard=group.ref.shard, seq=group.ref.seq),
        digest=group.digest(),
        prompt_ids=np.asarray(group.prompt_ids, dtype="<i4").tobytes(),
        sample_digests=[sample.digest() for sample in group.samples],
        temperature=group.temperature,
        baseline=group.baseline,
        samples=[
            pb.SamplePart(
                index=index,
                token_ids=np.asarray(sample.token_ids, dtype="<i4").tobytes(),
                logprobs=np.asarray(sample.logprobs, dtype="<f4").tobytes(),
                reward=sample.reward,
                masked=sample.masked,
                media=named(sample.media),
            )
            for index, sample in enumerate(group.samples)
        ],
    )


def read(*parts: pb.GroupPart) -> object:
    data = pb.FeedPayload(groups=parts).SerializeToString()
    return read_payload(pb.FeedHeader(total_bytes=len(data), sha256=hashlib.sha256(data).digest(), sender="s"), data)


@given(groups, st.data())
def test_a_feed_brings_the_samples_that_it_was_made_of_and_no_others(group: Group, data: st.DataObject) -> None:
    wanted = data.draw(st.frozensets(st.integers(0, len(group.samples) - 1)))
    payload = write_payload([(group, wanted)], ("b", "a"))
    header = pb.FeedHeader(total_bytes=len(payload), sha256=hashlib.sha256(payload).digest(), sender="s")
    (found,) = read_payload(header, payload).values()
    assert (found.ref, found.digest, found.temperature) == (group.ref, group.digest(), group.temperature)
    assert found.baseline == group.baseline
    assert tuple(found.prompt_ids.tolist()) == group.prompt_ids
    assert found.media == group.media
    assert found.holders == ({"a", "b"} if group.all_media else set())
    assert found.samples.keys() == wanted
    for index, held in found.samples.items():
        sent = group.samples[index]
        assert held.media == sent.media
        assert (tuple(held.token_ids.tolist()), held.masked) == (sent.token_ids, sent.masked)
        assert (held.logprobs.tolist(), held.reward) == (list(sent.logprobs), sent.reward)


@given(groups)
def test_a_group_arrives_as_it_was_sent(group: Group) -> None:
    found = read(part(group))
    assert isinstance(found, dict)
    held = found[group.digest()]
    assert held.ref == group.ref
    assert tuple(held.prompt_ids.tolist()) == group.prompt_ids
    for index, sample in enumerate(group.samples):
        assert tuple(held.samples[index].token_ids.tolist()) == sample.token_ids
        assert tuple(held.samples[index].logprobs.tolist()) == sample.logprobs
        assert held.samples[index].reward == sample.reward


@given(generated_pictures(), st.sampled_from(["steps", "logprobs", "sigmas", "reward", "media", "masked"]))
def test_a_generated_picture_arrives_as_it_was_sent_and_has_a_digest_of_all_that_is_trained(
    picture: Sample, field: str
) -> None:
    group = Group(PromptRef(0, 1, 2), (5,), (picture,))
    payload = write_payload([(group, frozenset({0}))], ("a",))
    header = pb.FeedHeader(total_bytes=len(payload), sha256=hashlib.sha256(payload).digest(), sender="s")
    held = read_payload(header, payload)[group.digest()].samples[0]
    output = picture.output
    assert isinstance(output, DenoisingTrajectory)
    assert held.steps is not None
    assert held.sigmas is not None
    assert (tuple(held.steps.tolist()), tuple(held.sigmas.tolist())) == (output.steps, output.sigmas)
    assert (tuple(held.logprobs.tolist()), held.media) == (output.logprobs, output.media)
    assert (held.reward, held.masked, len(held.token_ids)) == (picture.reward, picture.masked, 0)
    match field:
        case "reward":
            other = replace(picture, reward=picture.reward + 1)
        case "masked":
            other = replace(picture, masked=not picture.masked)
        case "media":
            more = (*output.media, Medium("decoded", "ab" * 32, 3, (1, 1, 3), "uint8"))
            other = replace(picture, output=output._replace(media=more))
        case _:
            numbers = (*getattr(output, field), 7)
            other = replace(picture, output=output._replace(**{field: numbers}))
    assert other.digest() != picture.digest()
    assert replace(picture, output=output._replace(seed=99)).digest() == picture.digest(), "seeds stay outside"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": (1, 0)}, "must ascend"),
        ({"steps": (0, 2)}, "must ascend"),
        ({"logprobs": (-1.0,)}, "one number a step"),
        ({"logprobs": (-1.0, float("nan"))}, "not finite"),
        ({"sigmas": (1.0, float("inf"), 0.0)}, "not finite"),
    ],
)
def test_a_generated_picture_whose_numbers_cannot_be_is_refused(changed: dict[str, object], message: str) -> None:
    spans = (VersionSpan(Version(0, 0), 0, 2),)
    output = DenoisingTrajectory((0, 1), (1.0, 0.5, 0.0), (-1.0, -2.0), spans, 1, ())._replace(**changed)
    group = Group(PromptRef(0, 1, 2), (5,), (Sample(output=output, finish_reason="stop"),))
    payload = write_payload([(group, frozenset({0}))])
    header = pb.FeedHeader(total_bytes=len(payload), sha256=hashlib.sha256(payload).digest(), sender="s")
    with pytest.raises(FeedDamaged, match=message):
        read_payload(header, payload)


def test_a_picture_has_no_fields_of_a_text() -> None:
    output = DenoisingTrajectory((0,), (1.0, 0.0), (-1.0,), (VersionSpan(Version(0, 0), 0, 1),), 1, ())
    picture = Sample(output=output, finish_reason="stop")
    assert (picture.length, picture.token_ids, picture.own_tokens, picture.observed, picture.text) == (1, (), 1, (), "")
    with pytest.raises(TypeError, match="a picture has no tokens"):
        _ = picture.token_output
    with pytest.raises(TypeError, match="no fields of a TokenOutput"):
        Sample(text="x", output=output, finish_reason="stop")


def test_another_baseline_is_another_group() -> None:
    assert len({replace(GROUP, baseline=value).digest() for value in (None, 0.0, 1.0)}) == 3


@given(samples())
def test_the_digest_of_bytes_is_the_digest_of_the_sample(sample: Sample) -> None:
    ids = np.asarray(sample.token_ids, dtype="<i4").tobytes()
    logprobs = np.asarray(sample.logprobs, dtype="<f4").tobytes()
    own = sample_digest(ids, logprobs, sample.reward, masked=sample.masked, media=sample.media)
    assert own == sample.digest()


GROUP = Group(
    PromptRef(0, 1, 2),
    (5, 6, 7),
    tuple(
        Sample((1, 2, n), (-0.5, -1.0, -2.0), "", "stop", (VersionSpan(Version(0, 0), 0, 3),), float(n))
        for n in range(2)
    ),
)


PICTURE = Medium("picture", "ab" * 32, 300, (16, 32, 3), "uint8")


def damaged(what: str) -> pb.GroupPart:
    message = part(GROUP)
    match what:
        case "digest":
            message.digest = "0" * 32
        case "prompt":
            message.prompt_ids = message.prompt_ids[:-4]
        case "no prompt":
            message.prompt_ids = b""
        case "baseline":
            message.baseline = 0.0
        case "ref":
            message.ref.seq += 1
        case "token":
            message.samples[0].token_ids = b"\x09" + message.samples[0].token_ids[1:]
        case "logprob":
            message.samples[1].logprobs = message.samples[0].logprobs[:-4] + b"\0\0\0\0"
        case "reward":
            message.samples[1].reward = 7.0
        case "swapped":
            message.samples[0].index, message.samples[1].index = 1, 0
        case "index":
            message.samples[1].index = 2
        case "lengths":
            message.samples[0].logprobs = message.samples[0].logprobs[:-4]
        case "another picture":
            message.media.extend(named((PICTURE,)))
        case "another picture of a sample":
            message.samples[0].media.extend(named((PICTURE,)))
        case "kind":
            message.media.extend(named((PICTURE._replace(kind="film"),)))  # type: ignore[arg-type]
            message.digest = replace(GROUP, media=(PICTURE._replace(kind="film"),)).digest()  # type: ignore[arg-type]
        case "hash":
            message.media.add(kind="picture", sha256=b"short", size=1, shape=[1], dtype="uint8")
        case "empty":
            message.media.extend(named((PICTURE._replace(size=0),)))
            message.digest = replace(GROUP, media=(PICTURE._replace(size=0),)).digest()
    return message


@pytest.mark.parametrize(
    "what",
    [
        *(
            "digest",
            "prompt",
            "no prompt",
            "baseline",
            "ref",
            "token",
            "logprob",
            "reward",
            "swapped",
            "index",
            "lengths",
        ),
        *("another picture", "another picture of a sample", "kind", "hash", "empty"),
    ],
)
def test_a_damaged_group_is_refused(what: str) -> None:
    with pytest.raises(FeedDamaged):
        read(damaged(what))


def test_numbers_that_are_not_finite_are_refused_though_their_digests_fit() -> None:
    bad = Sample((1,), (float("nan"),), "", "stop", (VersionSpan(Version(0, 0), 0, 1),), 0.0)
    with pytest.raises(FeedDamaged, match="finite"):
        read(part(Group(PromptRef(0, 0, 0), (1,), (bad,))))
    with pytest.raises(FeedDamaged, match="the reward baseline of the group, from the flow, is nan"):
        read(part(replace(GROUP, baseline=float("nan"))))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_payload_with_one_changed_byte_is_refused(at: int, flip: int) -> None:
    data = bytearray(pb.FeedPayload(groups=[part(GROUP)]).SerializeToString())
    header = pb.FeedHeader(total_bytes=len(data), sha256=hashlib.sha256(data).digest(), sender="s")
    data[at % len(data)] ^= flip
    with pytest.raises(FeedDamaged):
        read_payload(header, bytes(data))
