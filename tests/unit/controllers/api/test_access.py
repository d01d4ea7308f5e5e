"""The role table: the permitted callers of every RPC of every service."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from google.protobuf.descriptor import FileDescriptor

import gcore.api.v1
from controllers.api.edge.access import (
    NOBODY_IS_TOLD_APART,
    TABLE,
    USER_ROLES,
    Caller,
    Role,
    access_refusal,
    acting_as,
    current_caller,
    may_see,
)

READ = {"GetJob", "ListJobs", "WatchJob", "StreamLogs", "StreamMetrics", "ListShards", "AuditJob", "GetSamples"}
READ |= {"GetBooks", "ListCheckpoints", "GetPlacement", "ListNodes", "GetUsage", "GetQuotas"}
CHANGE = {"CreateJob", "UpdateJob", "PauseJob", "ResumeJob", "CancelJob", "DeleteJob", "RunEval", "PinPlacement"}
EXPECTED = {f"/gcore.api.v1.Jobs/{verb}": Role.VIEWER for verb in READ}
EXPECTED |= {f"/gcore.api.v1.Jobs/{verb}": Role.SUBMITTER for verb in CHANGE}
EXPECTED |= {f"/gcore.api.v1.Jobs/{verb}": Role.ADMIN for verb in ("DrainNode", "SetQuota")}
EXPECTED |= {"/gcore.api.v1.Access/WhoAmI": Role.VIEWER}
EXPECTED |= {f"/gcore.api.v1.Access/{verb}": Role.ADMIN for verb in ("CreateToken", "ListTokens", "RevokeToken")}
EXPECTED |= {f"/gcore.api.v1.Files/{verb}": Role.SUBMITTER for verb in ("List", "Read")}
NODES_ONLY = ("/gcore.api.v1.Placement/", "/gcore.api.v1.TrainRank/")


def every_rpc() -> list[str]:
    """The full name of each method of each service in each generated module."""
    found = []
    for module in pkgutil.iter_modules(gcore.api.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor: FileDescriptor = importlib.import_module(f"gcore.api.v1.{module.name}").DESCRIPTOR
            services: Any = descriptor.services_by_name.values()
            found += [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    return sorted(found)


def test_every_rpc_has_a_row_in_the_role_table_and_no_row_is_of_anything_else() -> None:
    assert every_rpc() == sorted(TABLE)


@pytest.mark.parametrize("method", every_rpc())
def test_each_verb_is_allowed_from_its_role_on_and_refused_below(method: str) -> None:
    least = Role.NODE if method.startswith(NODES_ONLY) else EXPECTED[method]
    for role in Role:
        why = access_refusal(Caller("somebody", role), method)
        assert (why is None) == (role >= least), (role, why)
        if why is not None:
            assert least.word in why
            assert "somebody" in why


@pytest.mark.parametrize("method", every_rpc())
def test_where_nobody_is_told_apart_everything_is_allowed(method: str) -> None:
    assert access_refusal(NOBODY_IS_TOLD_APART, method) is None


def test_rpc_missing_from_the_role_table_is_refused() -> None:
    assert "not in the role table" in str(access_refusal(NOBODY_IS_TOLD_APART, "/gcore.api.v1.Jobs/NewVerb"))


def test_no_person_can_have_the_role_of_a_node() -> None:
    assert sorted(USER_ROLES) == ["admin", "submitter", "viewer"]


def test_a_caller_sees_its_namespaces_only_and_names_are_looked_up_in_one_of_them() -> None:
    one = Caller("ada", Role.VIEWER, frozenset({"vision", "speech"}))
    assert one.may_see("vision")
    assert not one.may_see("default")
    assert one.home == "speech"
    assert Caller("bob", Role.VIEWER, frozenset({"default", "a"})).home == "default"
    assert Caller("root", Role.ADMIN).home == "default"


def test_the_caller_of_a_task_is_the_one_it_acts_for() -> None:
    assert current_caller() is NOBODY_IS_TOLD_APART
    with acting_as(Caller("ada", Role.VIEWER, frozenset({"vision"}))):
        assert current_caller().name == "ada"
        assert may_see("vision")
        assert not may_see("default")
    assert may_see("default")
