"""The page of the API that is made from the protos lists every call, every message and every reason of a refusal."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from controllers.api.edge import access as token_book  # noqa: F401 - their kinds of errors are looked for
from gcore.api.v1 import access_pb2
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError

ROOT = Path(__file__).parents[3]


def made() -> str:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "protos" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page: str = module.page()
    return page


def test_every_call_message_and_field_is_on_the_page() -> None:
    page = made()
    sections = {part.partition("\n")[0]: part for part in page.split("\n### ")}
    services = pb.DESCRIPTOR.services_by_name["Jobs"], access_pb2.DESCRIPTOR.services_by_name["Access"]
    for method in (one for service in services for one in service.methods):
        told = sections[method.name].split("\n\n")
        assert told[1].strip(), f"{method.name} says nothing of itself"
        assert f"`{method.input_type.name}`" in sections[method.name]
    messages = {**pb.DESCRIPTOR.message_types_by_name, **access_pb2.DESCRIPTOR.message_types_by_name}
    for name, message in messages.items():
        for field in message.fields:
            assert f"| `{field.name}` |" in sections[name], f"{name}.{field.name}"
    for name, enum in pb.DESCRIPTOR.enum_types_by_name.items():
        for value in enum.values:
            assert f"| `{value.name}` | {value.number} |" in sections[name]


def test_the_reasons_are_on_the_page() -> None:
    page = made()
    for reason in ("JOB_NOT_FOUND", "JOB_HAS_ENDED", "BAD_SPEC", "TOO_MANY_STREAMS", "STORE_UNAVAILABLE", "DEFECT"):
        assert f"`{reason}`" in page
    kinds = [GcoreError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        reason = vars(kind).get("reason", "DEFECT")
        assert f"`{reason}`" in page, f"{kind.__name__} of {kind.__module__}"
