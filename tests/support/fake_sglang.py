"""A stand-in for the Python of SGLang's environment: run as `... -m sglang.launch_server OPTIONS`, it serves a few routes.

Options of its own select other behaviour, as a job would in `rollout.engine_args`. It leaves two
grandchildren behind, one in a session of its own, as SGLang does with its scheduler and its compilers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def install(folder: Path) -> Path:
    """An executable that can be named as SGLang's Python."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    python.chmod(0o755)
    return python


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-version")
    parser.add_argument("--fake-pids", help="file to write all pids to")
    parser.add_argument("--fake-die", action="store_true", help="end before serving")
    parser.add_argument("--fake-load-for-ever", action="store_true", help="never serve")
    parser.add_argument("--fake-silent", action="store_true", help="the scheduler answers nothing once it serves")
    parser.add_argument("--fake-version", help="what the weights are called in spite of --weight-version")
    parser.add_argument("--fake-busy", type=int, default=0, help="sequences that run")
    options, _ = parser.parse_known_args()
    print("TMPDIR", os.environ["TMPDIR"], flush=True)
    if options.fake_die:
        print("Traceback (most recent call last):\nRuntimeError: no memory for the cache", flush=True)
        print("nanobind: leaked 3 types", flush=True)
        sys.exit(3)
    grandchildren = [subprocess.Popen(["sleep", "600"], start_new_session=alone).pid for alone in (False, True)]
    version = [options.fake_version or options.weight_version]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bodies = {
                "/health": "",
                "/model_info": json.dumps({"weight_version": version[0]}),
                "/metrics": f"sglang:num_running_reqs {options.fake_busy}\nsglang:num_queue_reqs 0\n",
                "/server_info": "{}",
            }
            if self.path == "/server_info" and options.fake_silent:
                threading.Event().wait()
            self._answer(bodies.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/update_weight_version":
                version[0] = body["new_version"]
            self._answer("{}")

        def _answer(self, body: str | None) -> None:
            self.send_response(404 if body is None else 200)
            self.send_header("content-length", str(len(body or "")))
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_: object) -> None:
            return None

    if options.fake_pids:
        part = Path(options.fake_pids + ".part")
        part.write_text(" ".join(map(str, [os.getpid(), *grandchildren])))
        part.rename(options.fake_pids)
    if options.fake_load_for_ever:
        print("loading", flush=True)
        threading.Event().wait()
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
