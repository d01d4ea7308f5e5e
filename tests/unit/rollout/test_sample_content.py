"""Content of prompts and samples: one internal form, every constructor, and stable digests for text-only samples."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import struct

import pytest

from gcore.types import (
    Group,
    Medium,
    Prompt,
    PromptRef,
    Sample,
    TextPart,
    TokenOutput,
    Version,
    VersionSpan,
)

SPANS = (VersionSpan(Version(0, 1), 0, 2), VersionSpan(Version(0, 2), 2, 3))
OUTPUT = TokenOutput((1, 2, 3), (-0.5, -1.0, -0.25), "abc", SPANS)
PROMPT = Prompt(PromptRef(0, 0, 1), "6*7=", (1, 2), {"answer": "42"}, "sums")

# Made at commit 8340a61d, when a sample had no output of its own.
SAMPLES = (
    (
        Sample((1, 2, 3), (-0.5, -1.0, -0.25), "abc", "stop", SPANS, 1.0),
        "5a75be52233adc4129e33d4485fba8a341852019006aa269257eb141027147f1",
    ),
    (
        Sample((4,), (-0.125,), "d", "length", (VersionSpan(Version(1, 7), 0, 1),), -2.5, (("judge", -2.5),), True),
        "c1a54d59ebc7e84313a4f111099c0b616abc384a46479e3f6977163766c7f405",
    ),
    (
        Sample(
            (5, 6, 7, 8),
            (-0.5, 0.0, 0.0, -2.0),
            "efgh",
            "abort",
            (VersionSpan(Version(0, 2), 0, 4),),
            0.5,
            observed=((1, 3),),
            observed_text=((1, 3),),
        ),
        "dca43ae9627f3ad0f48c70e6c56d81988b60592d9d64a1af8f6ea9de43062d77",
    ),
    (
        Sample((), (), "", "stop", ()),
        "3e7077fd2f66d689e0cee6a7cf5b37bf2dca7c979af356d0a31cbc5c85605c7d",
    ),
)
GROUPS = (
    (
        Group(PromptRef(0, 3, 41), (9, 8, 7), tuple(sample for sample, _ in SAMPLES), "sums", 0.75, 0.25),
        "8578bff4a28e831977d0b33d5e50e391",
    ),
    (
        Group(PromptRef(2, 0, 1), (), tuple(sample for sample, _ in SAMPLES[:2])),
        "e922c070a5aaaf92906e125403cbb8bf",
    ),
)


@pytest.mark.parametrize(("sample", "digest"), SAMPLES)
def test_a_text_sample_has_the_digest_that_it_always_had(sample: Sample, digest: str) -> None:
    assert sample.digest().hex() == digest
    assert Sample(output=sample.output, finish_reason="stop", reward=sample.reward, masked=sample.masked).digest() == (
        sample.digest()
    )


@pytest.mark.parametrize(("group", "digest"), GROUPS)
def test_a_group_of_text_has_the_digest_that_it_always_had(group: Group, digest: str) -> None:
    assert group.digest() == digest


def test_a_sample_of_fields_is_the_sample_of_their_output() -> None:
    sample = Sample(OUTPUT.token_ids, OUTPUT.logprobs, OUTPUT.text, "stop", OUTPUT.spans, 1.0)
    assert sample == Sample(output=OUTPUT, finish_reason="stop", reward=1.0)
    assert sample.output == OUTPUT
    assert (sample.token_ids, sample.logprobs, sample.text, sample.spans) == OUTPUT[:4]
    assert hash(sample) == hash(Sample(output=OUTPUT, finish_reason="stop", reward=1.0))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (7,)},
        {"logprobs": (-3.0,)},
        {"text": "other"},
        {"spans": ()},
        {"observed": ((0, 1),)},
        {"observed_text": ((0, 1),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_of_the_output_is_replaced_as_one_of_the_sample(change: dict[str, object]) -> None:
    before = Sample(
        output=OUTPUT._replace(observed=((1, 2),)), finish_reason="stop", reward=2.0, masked=True, prompt_ids=(4,)
    )
    after = dataclasses.replace(before, **change)
    assert after.output == before.output._replace(**change)
    assert (after.reward, after.masked, after.prompt_ids) == (2.0, True, (4,))
    emptied = dataclasses.replace(before, observed=())
    assert emptied.observed == ()


def test_a_replaced_reward_leaves_the_output_itself() -> None:
    sample = Sample(output=OUTPUT, finish_reason="stop")
    assert dataclasses.replace(sample, reward=3.0).output is OUTPUT


def test_patterns_by_place_match_fields_in_the_order_of_the_arguments() -> None:
    match Sample(output=OUTPUT, finish_reason="stop", reward=3.0):
        case Sample(token_ids, _, text, reason, spans, reward):
            assert (token_ids, text, reason) == (OUTPUT.token_ids, OUTPUT.text, "stop")
            assert (spans, reward) == (OUTPUT.spans, 3.0)
        case _:
            pytest.fail("no match")
    match PROMPT:
        case Prompt(ref, text, token_ids):
            assert (ref, text, token_ids) == (PROMPT.ref, PROMPT.text, PROMPT.token_ids)
        case _:
            pytest.fail("no match")


def test_a_sample_or_prompt_without_content_is_refused() -> None:
    with pytest.raises(TypeError):
        Sample((1,), (0.0,), finish_reason="stop")
    with pytest.raises(TypeError):
        Sample(output=OUTPUT)
    with pytest.raises(TypeError):
        Prompt(PromptRef(0, 0, 1), token_ids=(1,), fields={})


def test_a_prompt_of_text_is_one_part() -> None:
    assert PROMPT.content == (TextPart("6*7="),)
    assert Prompt(PROMPT.ref, token_ids=(1, 2), fields=PROMPT.fields, source="sums", content=PROMPT.content) == PROMPT
    parts = dataclasses.replace(PROMPT, content=(TextPart("6*"), TextPart("7=")))
    assert parts.text == "6*7="
    assert dataclasses.replace(parts, source="other").content == parts.content
    assert dataclasses.replace(parts, text="1+1=").content == (TextPart("1+1="),)


@pytest.mark.parametrize(
    "value", [PROMPT, *(sample for sample, _ in SAMPLES), GROUPS[0][0]], ids=lambda one: type(one).__name__
)
def test_values_survive_pickling(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


RED = Medium("picture", "ab" * 32, 300, (16, 32, 3), "uint8")
BLUE = Medium("picture", "cd" * 32, 300, (16, 32, 3), "uint8")


def with_media(sample: Sample, *media: Medium) -> Sample:
    return dataclasses.replace(sample, output=sample.output._replace(media=media))


def test_the_media_of_a_sample_are_the_end_of_its_digest() -> None:
    sample = SAMPLES[2][0]
    text = struct.pack("<I4i4ff?", 4, 5, 6, 7, 8, -0.5, 0.0, 0.0, -2.0, 0.5, False) + struct.pack("<2i", 1, 3)
    medium = struct.pack("<I7s32sQ", 7, b"picture", bytes.fromhex("ab" * 32), 300)
    medium += struct.pack("<I3Q", 3, 16, 32, 3) + struct.pack("<I5s", 5, b"uint8")
    expected = hashlib.sha256(text + b"\xff\xff\xff\xffmedia" + struct.pack("<I", 1) + medium)
    assert with_media(sample, RED).digest() == expected.digest()


@pytest.mark.parametrize(
    "other",
    [
        RED._replace(kind="decoded"),
        RED._replace(sha256="ac" + "ab" * 31),
        RED._replace(size=301),
        RED._replace(shape=(32, 16, 3)),
        RED._replace(shape=(16, 32)),
        RED._replace(dtype="uint16"),
    ],
)
def test_each_field_of_a_medium_changes_the_digests(other: Medium) -> None:
    sample, group = SAMPLES[0][0], GROUPS[0][0]
    assert with_media(sample, other).digest() != with_media(sample, RED).digest()
    assert dataclasses.replace(group, media=(other,)).digest() != dataclasses.replace(group, media=(RED,)).digest()


def test_the_order_and_the_place_of_media_change_the_digest_of_a_group() -> None:
    group = GROUPS[1][0]
    of_sample = dataclasses.replace(group, samples=(with_media(group.samples[0], RED), group.samples[1]))
    of_next = dataclasses.replace(group, samples=(group.samples[0], with_media(group.samples[1], RED)))
    groups = [group, dataclasses.replace(group, media=(RED,)), of_sample, of_next]
    groups += [dataclasses.replace(group, media=(RED, BLUE)), dataclasses.replace(group, media=(BLUE, RED))]
    groups += [dataclasses.replace(group, media=(RED, RED))]
    assert len({one.digest() for one in groups}) == len(groups)
    assert dataclasses.replace(of_sample, media=(BLUE,)).all_media == (BLUE, RED)


def test_a_sample_keeps_its_media_when_fields_are_replaced() -> None:
    sample = with_media(SAMPLES[2][0], RED)
    assert Sample(output=sample.output, text="other", finish_reason="stop").media == (RED,)
    assert dataclasses.replace(sample, reward=2.0).media == (RED,)
    assert pickle.loads(pickle.dumps(sample)) == sample
