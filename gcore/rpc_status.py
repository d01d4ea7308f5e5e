"""What a refused call says beside its code and its sentence: a `google.rpc.Status` in the trailing metadata, with an `ErrorInfo` whose
reason is a constant for programs, and a `BadRequest` that names the fields that are wrong.

Written by whoever serves, read by whoever calls. Metadata have 8 KiB in all, beyond which gRPC throws the whole answer away, the
code too; in them the sentence takes three bytes for each that is not ASCII, and the details four for three. So both are cut here. Which error has which code and reason is `controllers.service.statuses`' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "gcore"
KEY = "grpc-status-details-bin"
MOST_SAID = 3500
"""Bytes of a refusal's sentence, as it goes over the wire."""
MOST_DETAILS = 2700
"""Bytes of the details."""
MOST_AGAIN = 500
"""Of these, of the sentence, which is in there once more."""
MOST_VIOLATIONS = 16
MOST_OF_A_FIELD, MOST_OF_A_VIOLATION = 80, 300
"""Bytes of what is wrong with a field. The sentence has the rest."""
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of the request, or of the spec in it (`spec.flow.steps`), and what is wrong with it."""

    field: str
    what: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call was refused."""

    code: grpc.StatusCode
    sentence: str
    reason: str = UNKNOWN
    violations: tuple[Violation, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of the ErrorInfo: what a program may want to know, such as the job's uid."""


def cut(text: str, most: int) -> str:
    """The text, of `most` bytes of UTF-8 at most."""
    data = text.encode(errors="replace")
    return text if len(data) <= most else data[: most - 4].decode(errors="ignore") + " ..."


def sendable(text: str) -> str:
    """A sentence that may be sent as the details of a status: not too long, as the wire has it."""
    total = 0
    for place, character in enumerate(text):
        data = character.encode(errors="replace")
        total += 1 if 0x20 <= data[0] < 0x7F and data != b"%" else 3 * len(data)
        if total > MOST_SAID - 4:
            return text[:place] + " ..." if len(text) > place + 4 else text
    return text


def trailing(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """The metadata that say it."""
    info = error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN)
    for name, value in list(refusal.metadata.items())[:8]:
        info.metadata[cut(name, 64)] = cut(value, MOST_OF_A_VIOLATION)
    status = status_pb2.Status(code=refusal.code.value[0], message=cut(refusal.sentence, MOST_AGAIN))
    status.details.add().Pack(info)
    wrong = error_details_pb2.BadRequest()
    for one in refusal.violations[:MOST_VIOLATIONS]:
        field, what = cut(one.field, MOST_OF_A_FIELD), cut(one.what, MOST_OF_A_VIOLATION)
        wrong.field_violations.add(field=field, description=what)
        if status.ByteSize() + wrong.ByteSize() > MOST_DETAILS:
            del wrong.field_violations[-1]
            break
    if wrong.field_violations:
        status.details.add().Pack(wrong)
    return ((KEY, status.SerializeToString()),)


def told(error: grpc.RpcError) -> Refusal:
    """What a refused call was told. One that was refused by another program, or on the way, has no reason of gcore's."""
    code, sentence = error.code(), error.details() or ""
    plain = Refusal(code, sentence)
    data = _of(error)
    if data is None:
        return plain
    reason, violations, metadata = UNKNOWN, [], {}
    try:
        for detail in status_pb2.Status.FromString(data).details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                wrong = error_details_pb2.BadRequest.FromString(detail.value)
                violations = [Violation(one.field, one.description) for one in wrong.field_violations]
    except DecodeError:
        return plain
    return Refusal(code, sentence, reason, tuple(violations), metadata)


def _of(error: grpc.RpcError) -> bytes | None:
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    return next((value for key, value in metadata if key == KEY and isinstance(value, bytes)), None)
