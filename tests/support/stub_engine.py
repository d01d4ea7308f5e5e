"""A stub engine with the routes that a controller uses, as a process that can be stopped: `python stub_engine.py WAYS...`.

It makes one token a sample. WAYS: `mute` accepts requests for responses and never answers them, but answers all others;
`dead` accepts every request and never answers any.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stopping import stop_process


@dataclass(frozen=True)
class Stub:
    """A started one."""

    address: str
    process: subprocess.Popen[str]

    def stop(self) -> None:
        """SIGSTOP, in effect."""
        stop_process(self.process.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def stub_engine(*ways: str) -> Iterator[Stub]:
    """One that serves version 0.0."""
    process = subprocess.Popen([sys.executable, __file__, *ways], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Stub(process.stdout.readline().strip(), process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Server(ThreadingHTTPServer):
    """Serves until it is killed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, ways: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ways = ways
        self.version = "0.0"


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        """The status routes."""
        self._answer({"weight_version": self.server.version} if self.path != "/metrics" else "")

    def do_POST(self) -> None:
        """The control routes."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/generate":
            if "mute" in self.server.ways:
                threading.Event().wait()
            self._answer([self._sample() for _ in body["input_ids"]])
        elif self.path == "/update_weights_from_disk":
            self.server.version = body["weight_version"]
            self._answer({"success": True})
        else:
            self._answer({})

    def _sample(self) -> dict[str, Any]:
        meta = {
            "output_token_logprobs": [[-1.0, 1, None]],
            "finish_reason": {"type": "stop"},
            "weight_version": self.server.version,
        }
        return {"text": "1", "output_ids": [1], "meta_info": meta}

    def _answer(self, body: Any) -> None:
        if "dead" in self.server.ways:
            threading.Event().wait()
        data = json.dumps(body).encode() if body != "" else b""
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


if __name__ == "__main__":
    served = Server(sys.argv[1:])
    print(f"127.0.0.1:{served.server_port}", flush=True)
    served.serve_forever()
