"""Debian's Chromium for tests, driven over the DevTools protocol through a pipe: nothing is downloaded, no port is opened."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0
OPTIONS = (
    "--headless=new",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser with one tab, for tests with the mark `needs("chromium")`. `folder`: for its profile."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 1600) -> None:
        own_in, self._to = os.pipe()
        self._from, own_out = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to start as root with its sandbox
        command = [
            "chromium",
            *OPTIONS,
            *sandbox,
            f"--user-data-dir={folder}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        # The protocol's ends are the browser's descriptors 3 and 4.
        words = ["bash", "-c", f'exec "$@" 3<&{own_in} 4>&{own_out}', "--", *command]
        self._process = subprocess.Popen(
            words, pass_fds=(own_in, own_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(own_in)
        os.close(own_out)
        self._rest = b""
        self._count = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        """What the tab told, by itself."""
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for part in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{part}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # it ends with its pipe
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser something."""
        self._count += 1
        asked: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, f"{method}: {told}"
                found: dict[str, Any] = told["result"]
                return found
            if "method" in told:
                self.events.append(told)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(end - time.monotonic(), 0))
            more = os.read(self._from, 1 << 20) if ready else b""
            assert more, "the browser says nothing"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, url: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript, in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until it is true; its value."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := self.value(expression):
                return found
            time.sleep(0.05)
        raise AssertionError(f"never: {expression}\n{self.value('document.body.innerText')}")

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, file: Path) -> None:
        """Of the whole page."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(told["data"]))

    def told(self, method: str) -> list[dict[str, Any]]:
        """What the tab told of one kind."""
        return [one["params"] for one in self.events if one["method"] == method]
