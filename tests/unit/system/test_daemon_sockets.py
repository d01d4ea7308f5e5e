"""The reason that an address cannot be bound, and whether a retry makes sense."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from gcore.errors import CannotListen, GcoreError, UsageError
from gcore.system.network import describe_listen_error, listen_error


def of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of(errno.EADDRNOTAVAIL), CannotListen),
        (of(errno.EADDRINUSE), CannotListen),
        (of(errno.ENETDOWN), CannotListen),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), CannotListen),
        (None, CannotListen),
        (of(errno.EACCES), UsageError),
        (of(errno.EAFNOSUPPORT), UsageError),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), UsageError),
    ],
    ids=str,
)
def test_transient_listen_errors_are_no_usage_errors(error: OSError | None, kind: type[GcoreError]) -> None:
    found = listen_error("cannot listen on 10.0.0.7:7500", error)
    assert type(found) is kind
    assert CannotListen.exit_code != UsageError.exit_code
    assert str(found).startswith("cannot listen on 10.0.0.7:7500 (")
    if error is not None:
        assert f"({error.strerror})" in str(found)


def test_the_system_is_asked_where_a_server_does_not_say_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = describe_listen_error("127.0.0.1", port)
    assert in_use is not None
    assert in_use.errno == errno.EADDRINUSE
    nobodys = describe_listen_error("192.0.2.1", 0)
    assert nobodys is not None
    assert nobodys.errno == errno.EADDRNOTAVAIL
    assert isinstance(describe_listen_error("no.host.invalid", 0), socket.gaierror)
    assert describe_listen_error("127.0.0.1", port) is None
