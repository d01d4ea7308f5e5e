"""An OpenTelemetry collector for tests: a real HTTP server that keeps the received spans."""

from __future__ import annotations

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Use it as a context."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.spans: list[Any] = []
        self.services: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer._keep(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _keep(self, path: str, told: Any) -> None:
        self.paths.add(path)
        for one in told.resource_spans:
            self.services |= {a.value.string_value for a in one.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in one.scope_spans for span in scope.spans]

    @property
    def by_trace(self) -> dict[int, list[Any]]:
        """The spans of each trace."""
        found: dict[int, list[Any]] = defaultdict(list)
        for span in list(self.spans):
            found[int.from_bytes(span.trace_id, "big")].append(span)
        return dict(found)

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
