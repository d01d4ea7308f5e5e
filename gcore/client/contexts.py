"""The choice of the cluster, and contexts: named clusters in `~/.config/gcore/config.yaml`, with their addresses,
certificate authority and the user's credentials.

```yaml
current: lab
contexts:
  lab:
    addresses: [gpu-1.lab:7500, gpu-2.lab:7500]
    ca: lab-ca.pem                 # certificate authority of the cluster
    token_file: lab.token          # or `token`, in a file with mode 0600; or `cert` and `key`
```

Environment variables override the file: GCORE_CONTEXT (context), GCORE_ADDRESS (addresses), GCORE_TOKEN (token), GCORE_CA (authority),
GCORE_CONFIG (path of the file). A client sends the current context's credentials only to that context's own addresses, unless the user names
the context. So a mistyped address does not receive another cluster's token. This module makes no network calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from gcore.api.tls import PLAIN, Connector, TlsMaterial
from gcore.config.base import Section, explain_errors
from gcore.config.local_cluster import FILE_NAME, LocalClusterState, read_owner_key
from gcore.errors import Unreachable, UsageError, did_you_mean, explain_os_errors
from gcore.system.files import replace_file

CONTEXT, ADDRESS, TOKEN, CA, CONFIG = "GCORE_CONTEXT", "GCORE_ADDRESS", "GCORE_TOKEN", "GCORE_CA", "GCORE_CONFIG"
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
MAX_BYTES = 1 << 18


class Context(Section):
    """One cluster: its addresses and the user's credentials."""

    addresses: Annotated[tuple[str, ...], Field(min_length=1)]
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token: str | None = Field(None, repr=False)
    token_file: str | None = None


class Contexts(Section):
    """The contexts file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)
    current: str | None = None
    contexts: dict[str, Context] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Addresses of a cluster, and how to connect. `addresses` is empty if neither the caller nor a context gives any.

    `connector`: opens channels with the certificates and the token of the context.
    """

    addresses: tuple[str, ...]
    connector: Connector = field(repr=False, default=PLAIN)
    owner_key: str = field(repr=False, default="")
    """Secret of a local cluster, which proves that the caller owns it (`gcore.config.local_cluster`); else empty."""


def contexts_file(env: Mapping[str, str]) -> Path:
    """Return the path of the contexts file: GCORE_CONFIG, or `gcore/config.yaml` in the user's configuration folder."""
    if said := env.get(CONFIG):
        return Path(said)
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or Path.home()) / ".config")
    return Path(base) / "gcore" / "config.yaml"


def load_contexts(file: Path) -> Contexts:
    """Read the contexts file; no contexts if it does not exist. Raises UsageError if it is invalid, or if others may
    read a token in it."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
            mode = os.fstat(opened.fileno()).st_mode
        text = raw.decode() if len(raw) <= MAX_BYTES else None
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"cannot read the contexts file ({why})", where=str(file), fix="Correct or remove it"
        ) from error
    if text is None:
        raise UsageError(
            f"the contexts file has more than {MAX_BYTES} bytes", where=str(file), fix="Remove unused contexts"
        )
    from gcore.config.load import YamlNotPlain, read_plain

    try:
        found = Contexts.model_validate(read_plain(text) or {})
    except YamlNotPlain as error:
        raise UsageError(f"not valid YAML: {error.problem}", where=f"{file}{error.place}", fix="Correct it") from error
    except ValidationError as error:
        raise UsageError(
            "; ".join(list(explain_errors(error, Contexts))[:4]), where=str(file), fix="Correct it"
        ) from error
    if mode & 0o077 and any(one.token for one in found.contexts.values()):
        raise UsageError(
            "other users may read the file and the token in it",
            where=str(file),
            fix=f"Run chmod 600 {file}, or use token_file",
        )
    return found


def save_contexts(file: Path, contexts: Contexts) -> None:
    """Write the contexts file with mode 0600. Raises UsageError."""
    import yaml

    tree = contexts.model_dump(mode="json", exclude_none=True)
    with explain_os_errors(
        "cannot write the contexts file", UsageError, where=file, fix="Set GCORE_CONFIG to a writable path"
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, yaml.safe_dump(tree, sort_keys=False).encode(), mode=0o600)


def find_cluster(address: str | Sequence[str] | None, home: Path) -> ClusterAddress:
    """Choose the first of these that exists: the controllers at `address`, the context that GCORE_CONTEXT names, the
    local cluster in `home`, the current context.

    Raises UsageError, and Unreachable if no cluster runs in `home` and no context is set.
    """
    if address is not None:
        return choose_cluster(os.environ, parse_addresses(address))
    local = LocalClusterState.load(home)
    found = choose_cluster(os.environ, local=local is not None)
    if found.addresses:
        return found
    return replace(find_local_cluster(home), connector=found.connector)


def find_local_cluster(home: Path) -> ClusterAddress:
    """The local cluster in `home`, whatever contexts and environment variables name. Raises Unreachable if none runs."""
    local = LocalClusterState.load(home)
    if local is None:
        kept = (
            " (a cluster that `gcore run` started stops with it; its jobs are kept, and `gcore samples`, `checkpoints`, "
            "`export` and `audit` read them without a cluster)"
            if (home / "runs").is_dir()
            else ""
        )
        raise Unreachable(
            "no local cluster is running",
            where=str((home / FILE_NAME).absolute()),
            fix=f"Start one with `gcore up`{kept}, or give a controller's address with --address host:port",
        )
    return ClusterAddress(local.addresses, owner_key=read_owner_key(home))


def parse_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Check addresses (host:port; in a string separated by commas) and return them without blanks. Raises UsageError."""
    return tuple(_checked(one.strip()) for one in (given.split(",") if isinstance(given, str) else given))


def _checked(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is not host:port", where="--address", fix="For example: --address 10.0.0.7:7700")
    return address


def choose_cluster(
    env: Mapping[str, str], addresses: tuple[str, ...] = (), *, local: bool = False, known: Contexts | None = None
) -> ClusterAddress:
    """Choose addresses and credentials from the context and environment variables.

    `addresses`: given by the user; empty: use those of the context. `local`: whether a local cluster is running, which
    has precedence over the current context, but not over a context that the user names. `known`: the contexts, if
    already read. Raises UsageError.
    """
    file = contexts_file(env)
    asked = env.get(CONTEXT) or None
    known = known or load_contexts(file)
    name = asked or known.current
    chosen = None if name is None else find_context(known, name, file)
    if chosen is not None and asked is None and (local or (addresses and not set(addresses) <= set(chosen.addresses))):
        chosen = None
    at = addresses or (chosen.addresses if chosen is not None else ())
    token, ca = env.get(TOKEN, ""), env.get(CA) or None
    if chosen is None and not token and ca is None:
        return ClusterAddress(at)
    return ClusterAddress(at, _connector(chosen, token, ca, file.parent))


def find_context(known: Contexts, name: str, file: Path) -> Context:
    """Return the context with this name. Raises UsageError."""
    if name not in known.contexts:
        hint = did_you_mean(name, set(known.contexts))
        raise UsageError(
            f"there is no context {name[:80]!r}{hint}",
            where=str(file),
            fix="List the contexts with `gcore context list`",
        )
    return known.contexts[name]


def _connector(chosen: Context | None, token: str, ca: str | None, base: Path) -> Connector:
    """Create the connector from a context and from `token` and `ca` of the environment, which have precedence. `base`:
    folder of relative paths."""

    def whole(path: str | None) -> Path | None:
        return None if path is None else base / Path(path).expanduser()

    authority = Path(ca) if ca is not None else whole(chosen.ca) if chosen is not None else None
    cert, key = (None, None) if chosen is None else (whole(chosen.cert), whole(chosen.key))
    if not token and chosen is not None:
        token = chosen.token or (
            "" if chosen.token_file is None else _token(base / Path(chosen.token_file).expanduser())
        )
    if authority is None:
        if cert is not None:
            raise UsageError("the context has a certificate but no certificate authority", where="ca", fix="Set ca")
        return Connector(token=token.strip())
    return Connector(TlsMaterial(authority, cert, key), token=token.strip())


def _token(file: Path) -> str:
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError("other users may read the token", where=str(file), fix=f"Run chmod 600 {file}")
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the token ({why})", where=str(file), fix="Correct token_file") from error
