"""Who may call which route, as SGLang decides it. Pure.

Without keys everybody may call everything. `api_key` guards all routes. `admin_api_key` guards those that change the engine
or what runs on it; where both are set, those take the admin key only. Health, readiness and metrics are always open, for
probes that know no key. A key comes as `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health", "/ready", "/metrics")
"""Paths that begin so need no key."""
ADMIN = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/update_weights_from_ipc",
        "/update_weight_version",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/get_weights_by_name",
    }
)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that are asked for; None: none is."""

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)

    def allow(self, path: str, authorization: str | None) -> bool:
        """Whether a request to `path` with this header may pass."""
        if path.startswith(OPEN):
            return True
        wanted = (self.admin_api_key or self.api_key) if path in ADMIN else self.api_key
        if not wanted:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), wanted.encode())


class Guard:
    """An ASGI application behind the keys."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and not self._keys.allow(scope["path"], Headers(scope=scope).get("authorization")):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)
