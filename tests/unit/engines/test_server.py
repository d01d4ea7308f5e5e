"""The socket that an engine listens on."""

from __future__ import annotations

import socket

from gcore.engines.torch.server import _listen


def test_an_answers_body_does_not_wait_for_the_receipt_of_its_head() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
