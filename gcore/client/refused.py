"""What a refused call means to whoever made it: gcore's errors, with what the API told programs in `GcoreError.refusal`."""

from __future__ import annotations

import grpc

from gcore.errors import GcoreError, NotAllowed, UsageError
from gcore.rpc_status import told

NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
WRONG_REQUEST = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
NOT_ALLOWED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
FINAL = WRONG_REQUEST | NOT_ALLOWED
"""Another controller would say the same."""
NOTHING_THERE = "nothing listens there"
HANDSHAKES = {
    "certificate has expired": "its certificate has expired (`gcore certs renew`)",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the authority that is trusted here (`ca` of the context, GCORE_CA)",
    "Hostname Verification": "its certificate is not for the host that was asked (`gcore certs issue --host`)",
    "WRONG_VERSION_NUMBER": "what listens there speaks no TLS",
    "Socket closed": "what listens there ends each connection: it wants TLS, or a certificate of its authority that is good",
}
"""What becomes of connections, as gRPC tells it, and what it means."""


def why(error: grpc.aio.AioRpcError) -> str:
    """One line, without gRPC's inner life."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    details = " ".join((error.details() or error.code().name).split())
    if "failed to connect" in details or "Connection refused" in details:
        return next((said for sign, said in HANDSHAKES.items() if sign in details), NOTHING_THERE)
    return details.rstrip(".")


def explain(error: grpc.aio.AioRpcError, address: str, what: str) -> GcoreError:
    """What the controller's refusal means here. Its details are a sentence for people already."""
    found = _kind(error, address, what)
    found.refusal = told(error)
    return found


def _kind(error: grpc.aio.AioRpcError, address: str, what: str) -> GcoreError:
    if error.code() in WRONG_REQUEST:
        return UsageError(why(error))
    if error.code() in NOT_ALLOWED:
        return NotAllowed(why(error))
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UsageError(
            f"what answers does not know how to {what}", where=address, fix="Name the address of a gcore controller"
        )
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return GcoreError(f"cannot {what}: {why(error)}", where=address)
    return GcoreError(
        f"the controller could not {what}: {why(error)}", where=address, fix="Its log says more (HOME/logs)"
    )
