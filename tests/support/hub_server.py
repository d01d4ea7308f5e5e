"""A model hub on loopback for tests, with the parts of the Hugging Face and ModelScope APIs that their clients need.

It serves folders of files under names and commits. It can require a token, break off a file in the middle, and answer slowly.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


def commit_of(files: dict[str, bytes]) -> str:
    """Forty hex digits that name this content."""
    digest = hashlib.sha1()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()


@dataclass
class Repo:
    """`revisions`: branches and commits, each with its files."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    token: str = ""


@dataclass
class FakeHub:
    """What the server serves, and what it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    break_after: dict[str, list[int]] = field(default_factory=dict)
    """By file: after how many bytes the next transfers break off, one number a transfer."""
    stall: bool = False
    """Take requests and never answer."""
    held: threading.Event | None = None
    """Weights come only once this is set: what a slow line looks like."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by the first request."""
    page: bytes | None = None
    """The answer to every question about a model, instead of a real one."""
    other_commit: str | None = None
    """The commit that weights are said to be of, in place of their own."""
    ranges: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, files: dict[str, bytes], *, branch: str = "main", gated: bool = False) -> str:
        """Serve `files` as `name`, on `branch` and by the commit; the commit."""
        commit = commit_of(files)
        repo = self.repos.setdefault(name, Repo({}))
        repo.revisions |= {branch: files, commit: files}
        repo.gated = gated
        return commit


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """A hub on a free port."""
    hub = FakeHub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._json({}, 404)

    def _answer(self, *, with_body: bool) -> None:
        hub, url = self.served, urlsplit(self.path)
        hub.requests.append(f"{self.command} {self.path}")
        hub.asked.set()
        hub.tokens.append(self.headers.get("Authorization"))
        if hub.stall:
            self.close_connection = True
            self.rfile.read()  # until who asked is gone
            return
        parts = url.path.strip("/").split("/")
        if hub.page is not None and parts[:1] == ["api"]:
            self._send(hub.page, 200, {"Content-Type": "text/html"})
            return
        query = parse_qs(url.query)
        if parts[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(parts[3:5]), parts[5:], query)
        elif parts == ["api", "models"]:
            owner, words = query.get("author", [""])[0], query.get("search", [""])[0].lower()
            found = [name for name in hub.repos if name.startswith(owner) and words in name.lower()]
            self._json([{"id": name, "modelId": name} for name in found])
        elif parts[:2] == ["api", "models"]:
            self._huggingface_api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body=with_body)
        else:
            self._json({"error": "no such route"}, 404)

    def _refused(self, name: str) -> bool:
        repo = self.served.repos.get(name)
        if repo is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return True
        wanted = f"Bearer {repo.token}" if repo.token else None
        if repo.gated and (wanted is None or self.headers.get("Authorization") != wanted):
            self._json({"error": "Access to this model is restricted"}, 401, {"X-Error-Code": "GatedRepo"})
            return True
        return False

    def _huggingface_api(self, name: str, rest: list[str]) -> None:
        if self._refused(name):
            return
        repo = self.served.repos[name]
        if rest[:1] == ["refs"]:
            branches = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": commit_of(f)} for b, f in repo.revisions.items()
            ]
            self._json({"branches": branches, "tags": [], "converts": []})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        files = repo.revisions.get(revision)
        if files is None:
            self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            self._json([{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()])
        else:
            siblings = [{"rfilename": n, "size": len(d), "blobId": _oid(d)} for n, d in files.items()]
            self._json({"id": name, "modelId": name, "sha": commit_of(files), "siblings": siblings, "tags": []})

    def _resolve(self, name: str, revision: str, file: str, *, with_body: bool) -> None:
        if self._refused(name):
            return
        files = self.served.repos[name].revisions.get(revision)
        if files is None or file not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            self._json({"error": code}, 404, {"X-Error-Code": code})
            return
        commit = commit_of(files)
        if self.served.other_commit is not None and file.endswith(".safetensors"):
            commit = self.served.other_commit
        headers = {"ETag": f'"{_oid(files[file])}"', "X-Repo-Commit": commit}
        self._bytes(file, files[file], headers, with_body=with_body)

    def _modelscope(self, name: str, rest: list[str], query: dict[str, list[str]]) -> None:
        repo = self.served.repos.get(name)
        files = repo.revisions.get(query.get("Revision", ["master"])[0]) if repo else None
        if repo is not None and not rest:
            self._json({"Code": 200, "Data": {"Path": name.split("/")[0], "Name": name.split("/")[1]}})
        elif files is None:
            self._json({"Code": 404, "Message": "not found", "Success": False}, 404)
        elif rest == ["repo", "files"]:
            stamp = {"Revision": commit_of(files), "CommittedDate": 1_700_000_000}
            entries = [
                {"Path": n, "Name": n, "Type": "blob", "Size": len(d), "Sha256": hashlib.sha256(d).hexdigest(), **stamp}
                for n, d in files.items()
            ]
            self._json({"Code": 200, "Success": True, "Data": {"Files": entries}})
        elif rest == ["repo"]:
            file = query["FilePath"][0]
            self._bytes(file, files[file], {"ETag": _oid(files[file])}, with_body=True)
        else:
            self._json({"Code": 404, "Message": "no such route"}, 404)

    def _bytes(self, file: str, data: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        start = 0
        if (wanted := self.headers.get("Range")) is not None:
            self.served.ranges.append(f"{file} {wanted}")
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        body = data[start:]
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        if self.served.held is not None and file.endswith(".safetensors"):
            self.served.held.wait(timeout=300)
        breaks = self.served.break_after.get(file)
        if breaks:
            self.wfile.write(body[: breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)

    def _json(self, tree: object, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(tree).encode(), code, {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, body: bytes, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
