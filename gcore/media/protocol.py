"""What a blob store and its clients share: names of blobs, errors and their HTTP form, keys of jobs.

An error response is a JSON object `{"error": {"kind", "what", "where", "fix"}}`. `kind` is the name of the error's
class, so that a client raises the same error as the store. `STATUS` has the status code of each kind.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import re
from typing import Any, NamedTuple

from gcore.errors import DataError, GcoreError, NotAllowed

PIECE_BYTES = 1 << 20
"""Blobs are read, hashed, written and sent in pieces of this size."""

TRANSFERS = "transfers"
"""Holder of the reservation that transfers from other nodes use up, such as those of blobs for a train rank."""

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Blob(NamedTuple):
    """The name of an immutable file, and its size."""

    sha256: str
    """SHA-256 of the bytes: 64 lower-case hex digits."""
    size: int
    """Size in bytes."""


class BlobError(GcoreError):
    """A blob store cannot do what was requested."""


class BlobRequestRefused(BlobError):
    """A request to a blob store is not valid."""


class BlobMissing(BlobError):
    """The store does not have the blob."""


class BlobDamaged(BlobMissing):
    """The bytes of a stored blob have changed. The store has removed it."""


class BlobMismatch(BlobError):
    """Received bytes do not have the size or the SHA-256 that the request names. Nothing was stored."""


class StoreFull(BlobError):
    """The store has no room. Pinned blobs, blobs in their grace time and reservations fill it."""


class BlobTooLarge(StoreFull):
    """The blob is larger than the whole store."""


class StoreFailed(BlobError):
    """The disk of the store failed. No incomplete blob is left."""


class StoreDiskFull(StoreFailed):
    """The disk of the store is full, although the store has not reached its bound."""


class StoreUnreachable(BlobError):
    """A blob store did not answer, or the connection broke."""


STATUS: dict[type[GcoreError], int] = {
    NotAllowed: 401,
    BlobRequestRefused: 400,
    DataError: 400,
    BlobMissing: 404,
    BlobDamaged: 404,
    BlobMismatch: 422,
    BlobTooLarge: 413,
    StoreFull: 507,
    StoreDiskFull: 507,
    StoreFailed: 500,
    StoreUnreachable: 503,
}
"""HTTP status code of each error."""

_KINDS = {kind.__name__: kind for kind in STATUS}
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL = _NO_SPACE | {errno.EFBIG}


def encode_error(error: GcoreError) -> dict[str, Any]:
    """Return the JSON object of an error. The kind of an error that `STATUS` does not have is StoreFailed."""
    known = DataError if isinstance(error, DataError) else type(error)
    kind = known.__name__ if known in STATUS else StoreFailed.__name__
    return {"error": {"kind": kind, "what": error.what, "where": error.where, "fix": error.fix}}


def decode_error(value: object, where: str) -> GcoreError:
    """Return the error of a JSON object that `encode_error` made. `where`: the store's address, for other objects and for
    errors of the store; an error of a picture names its file instead."""
    fields = value.get("error") if isinstance(value, dict) else None
    if not isinstance(fields, dict) or fields.get("kind") not in _KINDS or not isinstance(fields.get("what"), str):
        return StoreUnreachable(f"the answer is not one of a blob store ({str(value)[:80]!r})", where=where)
    kind, place, fix = _KINDS[fields["kind"]], fields.get("where"), fields.get("fix")
    if isinstance(place, str):
        where = place if kind is DataError else f"{where}: {place}"
    error = kind(fields["what"], where=where, fix=fix if isinstance(fix, str) else None)
    return error


def is_disk_full(error: OSError) -> bool:
    """Whether an operation failed because the disk or its quota is full, so that it may succeed once files are deleted."""
    return error.errno in _NO_SPACE


def disk_error(what: str, error: OSError) -> StoreFailed:
    """Return the StoreFailed, or StoreDiskFull, for an error of the disk. `what`: what failed."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreDiskFull(f"{what} ({reason})", fix="Free space on the disk of the store, or lower its bound")
    return StoreFailed(f"{what} ({reason})", fix="Check the disk and the folder of the store")


def check_job(job: str) -> str:
    """Return `job` if it is a job UID that can name a folder. Raises BlobRequestRefused."""
    if not _JOB.fullmatch(job):
        raise BlobRequestRefused(
            f"{job[:80]!r} is not a job UID", fix="Use letters, digits and ._- inside, at most 128 characters"
        )
    return job


def check_sha256(sha256: str) -> str:
    """Return `sha256` if it is one. Raises BlobRequestRefused."""
    if not _SHA256.fullmatch(sha256):
        raise BlobRequestRefused(f"{sha256[:80]!r} is not a SHA-256", fix="Send 64 lower-case hex digits")
    return sha256


def blob_path(sha256: str) -> str:
    """The path of a blob's file in the folder of its job."""
    return f"{sha256[:2]}/{sha256}"


def job_key(cluster_secret: bytes, job: str) -> str:
    """Derive the key that a blob store requires for the blobs of `job`: 64 hex digits of an HMAC-SHA256."""
    return hmac.new(cluster_secret, b"gcore blobs " + job.encode(), hashlib.sha256).hexdigest()


def key_matches(authorization: str | None, key: str) -> bool:
    """Return whether an `Authorization` header has the bearer token `key`. Compares in constant time."""
    scheme, _, given = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
