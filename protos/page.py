"""Writes docs/reference/api.md, the reference of the job API, from the protos and their comments: `make proto`. With --check: fails if what is
committed differs.

Knows the little of protobuf's grammar that the protos here use. Says nothing of itself but what stands in front of the parts.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
PROTOS = ROOT / "protos" / "gcore" / "api" / "v1"
SERVICES = {"Jobs": PROTOS / "jobs.proto", "Access": PROTOS / "access.proto"}
"""What people call; nodes among themselves have more."""
BEGIN = """# The job API

The reference of `gcore.api.v1.Jobs` and `gcore.api.v1.Access`, made from [jobs.proto](../../protos/gcore/api/v1/jobs.proto) and
[access.proto](../../protos/gcore/api/v1/access.proto) by `make proto`. Any controller answers for the whole cluster. [The command
line](cli.md) has all of it, [the Python clients](../use/python.md) all of `Jobs`.

- **Health**: `grpc.health.v1.Health` answers everybody. **Reflection** answers where the node's configuration says `api: {reflection: true}`.
- **Who calls** is told by `authorization: Bearer TOKEN` or a client certificate ([security](../operate/security.md)).
- **Bounds**: a request has at most 4 MiB, an answer 64 MiB; a daemon serves at most `api.calls` calls and follows at most `api.streams` streams of
  people at once, no more than half of them one person's where people are told apart. Nodes have places of their own, strangers at health a few.
  A call has its place until its answer was taken. The request comes with the call, or within 30 s. A deadline that the caller sets ends
  what is done for it. A stream is sent as fast as it is read, and no faster.
- **Streams go on**: `WatchJob` behind a sequence number, `StreamMetrics` behind a step of a lineage, `StreamLogs` behind the places of its lines
  (`places`, `after`), from any controller.
- **Page tokens** belong to the request that they were given for, and to its caller.

## Errors

A refusal has a gRPC status, one sentence, and a `google.rpc.Status` in `grpc-status-details-bin` with an `ErrorInfo` (domain `gcore`) and, where
fields are wrong, a `BadRequest` that names them; those of a spec begin with `spec.`.

| status | reasons |
|---|---|
"""


def reasons() -> str:
    """The rows of the table of errors, from the code that makes them."""
    from controllers.api.edge import access as token_book
    from controllers.api.edge import access as tokens
    from controllers.api.edge import errors as refusals
    from controllers.api.edge.errors import CODES
    from gcore.api.rpc import UNSERVED

    rows: dict[str, set[str]] = {}
    for kind, code, reason in CODES:
        rows.setdefault(code.name, set()).add(reason)
        for one in (*vars(refusals).values(), *vars(token_book).values(), *vars(tokens).values()):
            if isinstance(one, type) and issubclass(one, kind) and "reason" in vars(one):
                found = next(c for k, c, _ in CODES if issubclass(one, k))
                rows.setdefault(found.name, set()).add(one.reason)
    rows["FAILED_PRECONDITION"].add(UNSERVED)
    rows["INTERNAL"] = {"DEFECT"}
    return "".join(f"| `{code}` | {', '.join(f'`{one}`' for one in sorted(found))} |\n" for code, found in rows.items())


def page() -> str:
    """All of it."""
    parts, messages = [BEGIN + reasons()], list[str]()
    for name, file in SERVICES.items():
        calls, named = _service(name, file.read_text(encoding="utf-8"))
        parts += calls
        messages += named
    return "\n".join([*parts, "## Messages\n", *messages]).rstrip() + "\n"


def _service(service_name: str, text: str) -> tuple[list[str], list[str]]:
    """Its calls, and the messages of its file."""
    service = re.search(rf"service {service_name} \{{(.*?)\n\}}", text, re.S)
    assert service is not None
    parts, messages = [f"\n## Calls of {service_name}\n"], list[str]()
    for comment, name, request, stream, answer in re.findall(
        r"((?:  //[^\n]*\n)+)?  rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);", service[1]
    ):
        answers = f"a stream of [`{answer}`](#{answer.lower()})" if stream else f"[`{answer}`](#{answer.lower()})"
        parts.append(f"### {name}\n\n{_said(comment)}\n\n[`{request}`](#{request.lower()}) → {answers}\n")
    for comment, kind, name, body in re.findall(
        r"((?:^//[^\n]*\n)*)^(message|enum) (\w+) \{(\}|.*?^\})", text[service.end() :], re.S | re.M
    ):
        messages.append(_message(kind, name, _said(comment), body))
    return parts, messages


def _message(kind: str, name: str, said: str, body: str) -> str:
    lines = [f"### {name}\n"]
    if said:
        lines.append(f"{said}\n")
    pattern = r"((?:[ ]*//[^\n]*\n)*)  ([\w<>, .]+?) ?(\w+) = (\d+);[ ]*((?://[^\n]*(?:\n[ ]{10,}//[^\n]*)*)?)"
    if kind == "enum":
        pattern = r"((?:[ ]*//[^\n]*\n)*)  ()(\w+) = (\d+);[ ]*((?://[^\n]*)?)"
    rows = [
        f"| `{field}` | {f'`{of.strip()}`' if of.strip() else number} | {_said(before + behind)} |"
        for before, of, field, number, behind in re.findall(pattern, body)
    ]
    if rows:
        lines += ["| | | |", "|---|---|---|", *rows]
    else:
        lines.append("Nothing.")
    return "\n".join(lines) + "\n"


def _said(comment: str) -> str:
    words = " ".join(line.strip().removeprefix("//").strip() for line in comment.split("\n"))
    return " ".join(words.replace("//", " ").split()).replace("|", "\\|")


def main() -> None:
    """Write it, or look whether it is written."""
    made = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
            sys.exit("protos and docs/reference/api.md differ: run 'make proto' and commit the result")
        return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
