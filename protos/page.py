"""Writes docs/reference/api.md, the reference of the job API, from the protos and their comments (`make proto`). With --check: fails if the
committed page differs.

Parses only the part of the protobuf grammar that these protos use. Adds no text but the introductions of the parts.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
PROTOS = ROOT / "protos" / "gcore" / "api" / "v1"
SERVICES = {"Jobs": PROTOS / "jobs.proto", "Access": PROTOS / "access.proto"}
"""The services for users; nodes call further ones."""
BEGIN = """# The job API

The reference of `gcore.api.v1.Jobs` and `gcore.api.v1.Access`, generated from [jobs.proto](../../protos/gcore/api/v1/jobs.proto) and
[access.proto](../../protos/gcore/api/v1/access.proto) by `make proto`. Any controller answers for the whole cluster. [The command
line](cli.md) covers both services, [the Python clients](../use/python.md) cover `Jobs`.

- **Health**: `grpc.health.v1.Health` needs no authentication. **Reflection** is enabled by `api: {reflection: true}` in the node's configuration.
- **Authentication**: `authorization: Bearer TOKEN` or a client certificate ([security](../operate/security.md)).
- **Limits**: a request has at most 4 MiB, a response at most 64 MiB. A daemon serves at most `api.calls` concurrent calls and `api.streams`
  concurrent streams of users; with authentication, one user gets at most half of them. Nodes have separate limits, and unauthenticated health
  checks have a small one. A call counts until its client has received the response. The server must receive the request within 30 s. When
  the client's deadline expires, the server stops work on the call. A stream is sent only as fast as the client reads.
- **Resuming streams**: `WatchJob` resumes after a sequence number, `StreamMetrics` after a step of a lineage, `StreamLogs` after the positions of
  its lines (`places`, `after`), at any controller.
- **Page tokens** are valid only for the same request and the same caller.

## Errors

An error has a gRPC status, one sentence, and a `google.rpc.Status` in `grpc-status-details-bin` with an `ErrorInfo` (domain `gcore`). If fields
are wrong, a `BadRequest` names them; fields of a spec begin with `spec.`.

| status | reasons |
|---|---|
"""


def reasons() -> str:
    """The rows of the table of errors, from the code that raises them."""
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
    """The whole page."""
    parts, messages = [BEGIN + reasons()], list[str]()
    for name, file in SERVICES.items():
        calls, named = _service(name, file.read_text(encoding="utf-8"))
        parts += calls
        messages += named
    return "\n".join([*parts, "## Messages\n", *messages]).rstrip() + "\n"


def _service(service_name: str, text: str) -> tuple[list[str], list[str]]:
    """The calls of a service, and the messages of its file."""
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
        lines.append("No fields.")
    return "\n".join(lines) + "\n"


def _said(comment: str) -> str:
    words = " ".join(line.strip().removeprefix("//").strip() for line in comment.split("\n"))
    return " ".join(words.replace("//", " ").split()).replace("|", "\\|")


def main() -> None:
    """Write the page, or check that it is current."""
    made = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
            sys.exit("protos and docs/reference/api.md differ: run 'make proto' and commit the result")
        return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
