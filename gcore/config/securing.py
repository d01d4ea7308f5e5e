"""The sections of a daemon's configuration that say who may do what: certificates, tokens, and what specs may name.

Where a daemon listens beyond loopback it has certificates, or it does not start: `problem_of_listening`. Reads no file.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, PositiveInt, field_validator

from gcore.config.base import Section

Port = Annotated[int, Field(ge=0, le=65535)]
File = Annotated[str, Field(min_length=1)]


class TlsSection(Section):
    """Files (PEM), as `gcore certs issue NODE` makes them. With them everything that the node serves is served over TLS, and
    callers are told apart. Read anew when they change."""

    ca: File
    """Who signs the certificates of nodes and users."""
    cert: File
    key: File
    """This node's, readable by the daemon's user alone."""
    engines_key: File | None = None
    """The cluster's key of engines, from which each engine's follows; the same on all nodes. None: engines ask for no key, which is
    refused beyond loopback."""
    peer_port: Port = 0
    """Where other nodes, and users with a certificate, call; 0: a free one. `listen_port` is for those with tokens."""


class AuthSection(Section):
    """Who calls, beside `tls`, with which every call but health's shows a token or a certificate."""

    admin_token_file: File | None = None
    """A file with a token that is always an admin's: with it the first others are made. Its owner alone may read it."""
    journal: File | None = None
    """Where is kept who did what; None: HOME/logs/calls.jsonl."""
    journal_mib: PositiveInt = 16
    """The size at which that file is turned over."""
    journal_kept: Annotated[int, Field(ge=0, le=1000)] = 4
    """Old ones that stay."""


Names = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class AllowSection(Section):
    """What specs may name on this cluster. None: whatever is installed (of `roots`, `secrets`, `remote_code` and `engine_args`: see there). All
    nodes say the same."""

    flows: Names | None = None
    filters: Names | None = None
    rewards: Names | None = None
    verdicts: Names | None = None
    curricula: Names | None = None
    policies: Names | None = None
    """Of placement."""
    environments: Names | None = None
    tools: Names | None = None
    agents: Names | None = None
    trackers: Names | None = None
    advantages: Names | None = None
    losses: Names | None = None
    engine_args: bool | None = None
    """Whether specs may hand arguments to SGLang's server, which can have it run code; None: only where nobody is told apart."""
    roots: tuple[File, ...] | None = None
    """The folders in which every path of a spec lies: models, data, storage.root. None: any that the daemon's user can read where
    nobody is told apart, else none. What is the daemon's own is never among it (`controllers.service.grounds`)."""
    hubs: bool = True
    """Whether models may come from a hub."""
    remote_code: bool | None = None
    """Whether a model's folder may bring code that is run; None: only where nobody is told apart."""
    secrets: Names | None = None
    """The secrets that specs may name, such as env:JUDGE_KEY or file:/etc/gcore/secrets/*; None: any environment variable where
    nobody is told apart, else none."""

    @field_validator("roots")
    @classmethod
    def _are_whole(cls, roots: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for root in roots or ():
            if not root.startswith("/"):
                raise ValueError(f"{root!r} should be a whole path, beginning with /")
        return roots

    @field_validator("secrets")
    @classmethod
    def _are_references(cls, secrets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for one in secrets or ():
            if not one.startswith(("env:", "file:/")):
                raise ValueError(f"{one!r} should be env:NAME or file:/PATH")
        return secrets


def is_loopback(host: str) -> bool:
    """Whether nothing beyond this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def problem_of_listening(hosts: dict[str, str], tls: TlsSection | None) -> str | None:
    """What is wrong with listening there; None: nothing. `hosts`: by the key that says each."""
    reached = [(key, host) for key, host in hosts.items() if not is_loopback(host)]
    if not reached:
        return None
    key, host = reached[0]
    if tls is None:
        return (
            f"{key} {host} is reached from other machines, and nobody is told apart there: make certificates with "
            "`gcore certs init` and `gcore certs issue`, and name them in tls (docs/security.md); or listen on 127.0.0.1"
        )
    if tls.engines_key is None:
        return (
            f"{key} {host} is reached from other machines, and the engines there ask for no key: name the engines.key of "
            "`gcore certs issue` in tls.engines_key"
        )
    return None
