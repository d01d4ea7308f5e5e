"""Who calls, and what they may: the role table of every RPC, and the caller of the call that is being served.

There are three roles of people, each with all that the one before may: a *viewer* reads, a *submitter* begins, changes and ends
jobs, an *admin* does both in every namespace, and what concerns the cluster. Viewers and submitters have the namespaces that
their token names: what another namespace has is not there for them, as if it did not exist. A *node* is another daemon; loads of engines
and train ranks are served to nodes only, and no token makes a node.

The table names each RPC of each service with the least role and whether it changes anything (what does is written to the audit
log). An RPC without a row is refused to everybody. Which caller it is follows from the call's token or client certificate
(`controllers.service.gate`); where nothing is configured to tell callers apart, which is allowed on loopback only, everybody is
an admin without a name.

Does not look at jobs: services ask `may_see` with the namespace of what they are about to tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from gcore.store.keys import DEFAULT_NAMESPACE


class Role(IntEnum):
    """The greater has all that the smaller may."""

    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3
    NODE = 4

    @property
    def word(self) -> str:
        """As people write it."""
        return self.name.lower()


USER_ROLES: Mapping[str, Role] = MappingProxyType(
    {role.word: role for role in (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)}
)
"""What a token or a person's certificate may say."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is. `namespaces` None: all. `name` empty: nobody is told apart."""

    name: str
    role: Role
    namespaces: frozenset[str] | None = None

    def may_see(self, namespace: str) -> bool:
        """Whether what is in `namespace` is there for this caller."""
        return self.namespaces is None or namespace in self.namespaces

    @property
    def home(self) -> str:
        """The namespace in which the caller's jobs are, and names are looked up, if none is named."""
        if self.may_see(DEFAULT_NAMESPACE):
            return DEFAULT_NAMESPACE
        return min(self.namespaces or (DEFAULT_NAMESPACE,))


NOBODY_IS_TOLD_APART = Caller("", Role.ADMIN)
_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY_IS_TOLD_APART)


def caller() -> Caller:
    """Whose call is being served in this task."""
    return _caller.get()


def may_see(namespace: str) -> bool:
    """Whether what is in `namespace` is there for whoever calls."""
    return caller().may_see(namespace)


def serve_for(one: Caller) -> None:
    """What this task does from now on, it does for this caller."""
    _caller.set(one)


@contextlib.contextmanager
def acting_for(one: Caller) -> Iterator[None]:
    """The same within a block."""
    token = _caller.set(one)
    try:
        yield
    finally:
        _caller.reset(token)


@dataclass(frozen=True, slots=True)
class Row:
    """What the table says of an RPC."""

    least: Role
    changes: bool = False
    """Whether it changes anything: then it is written to the audit log each time."""


def _reads(least: Role = Role.VIEWER) -> Row:
    return Row(least)


def _changes(least: Role = Role.SUBMITTER) -> Row:
    return Row(least, changes=True)


TABLE: Mapping[str, Row] = MappingProxyType(
    {
        "/gcore.api.v1.Jobs/CreateJob": _changes(),
        "/gcore.api.v1.Jobs/GetJob": _reads(),
        "/gcore.api.v1.Jobs/ListJobs": _reads(),
        "/gcore.api.v1.Jobs/WatchJob": _reads(),
        "/gcore.api.v1.Jobs/StreamLogs": _reads(),
        "/gcore.api.v1.Jobs/StreamMetrics": _reads(),
        "/gcore.api.v1.Jobs/UpdateJob": _changes(),
        "/gcore.api.v1.Jobs/PauseJob": _changes(),
        "/gcore.api.v1.Jobs/ResumeJob": _changes(),
        "/gcore.api.v1.Jobs/CancelJob": _changes(),
        "/gcore.api.v1.Jobs/DeleteJob": _changes(),
        "/gcore.api.v1.Jobs/RunEval": _changes(),
        "/gcore.api.v1.Jobs/ListShards": _reads(),
        "/gcore.api.v1.Jobs/AuditJob": _reads(),
        "/gcore.api.v1.Jobs/GetSamples": _reads(),
        "/gcore.api.v1.Jobs/GetBooks": _reads(),
        "/gcore.api.v1.Jobs/ListCheckpoints": _reads(),
        "/gcore.api.v1.Jobs/GetPlacement": _reads(),
        "/gcore.api.v1.Jobs/PinPlacement": _changes(),
        "/gcore.api.v1.Jobs/ListNodes": _reads(),
        "/gcore.api.v1.Jobs/DrainNode": _changes(Role.ADMIN),
        "/gcore.api.v1.Jobs/GetUsage": _reads(),
        "/gcore.api.v1.Jobs/GetQuotas": _reads(),
        "/gcore.api.v1.Jobs/SetQuota": _changes(Role.ADMIN),
        "/gcore.api.v1.Placement/Loads": _reads(Role.NODE),
        "/gcore.api.v1.Files/List": _reads(Role.SUBMITTER),
        "/gcore.api.v1.Files/Read": _reads(Role.SUBMITTER),
        "/gcore.api.v1.TrainRank/Feed": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Apply": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Accumulate": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Release": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Restore": _changes(Role.NODE),
        "/gcore.api.v1.TrainRank/Watch": _reads(Role.NODE),
        "/gcore.api.v1.Access/WhoAmI": _reads(),
        "/gcore.api.v1.Access/CreateToken": _changes(Role.ADMIN),
        "/gcore.api.v1.Access/ListTokens": _reads(Role.ADMIN),
        "/gcore.api.v1.Access/RevokeToken": _changes(Role.ADMIN),
    }
)
TOOLS: Mapping[str, Row] = MappingProxyType(
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _reads()}
)
"""What is no service of gcore's, and is there only where the node's configuration lets it be."""
OPEN = "/grpc.health.v1.Health/"
"""Answers everybody."""


def refusal(one: Caller, method: str) -> str | None:
    """Why `one` may not call an RPC, or None."""
    row = TABLE.get(method) or TOOLS.get(method)
    if row is None:
        return f"{method[:200]} is served to nobody: it is not in the role table"
    if one != NOBODY_IS_TOLD_APART and one.role < row.least:
        verb = method.rpartition("/")[2]
        return f"{verb} needs the role {row.least.word}, and {one.name or 'the caller'} is a {one.role.word}"
    return None
