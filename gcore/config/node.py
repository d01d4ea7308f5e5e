"""A daemon's configuration: the YAML (or JSON) file of `gcore-controller --config FILE`.

`gcore up` writes it on a laptop; a deployment writes it on a cluster. The model is frozen, rejects unknown keys, and resolves
relative paths against the file's folder. The file contains no secrets, only the names of files with passwords and keys, and
nothing about jobs. A daemon that listens beyond loopback needs certificates and otherwise does not start
(`listening_problem`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from gcore.config.base import Section, explain_errors
from gcore.errors import UsageError
from gcore.store.reference import StoreRef
from gcore.store.types import LeaseTimes
from gcore.system.daemon import LogFormat
from gcore.system.network import is_loopback, join_host_port
from gcore.system.slots import slots_problem


class ApiConfig(Section):
    """Limits of the API. They apply to each daemon separately."""

    reflection: bool = Field(False, description="Enable gRPC server reflection for tools such as grpcurl")
    streams: Annotated[int, Field(ge=1, le=100_000)] = Field(
        512,
        description="Maximum number of concurrent streams (events, logs, metrics, samples, slot accounting). Further streams are rejected",
    )
    calls: Annotated[int, Field(ge=16, le=100_000)] = Field(
        4096,
        description="Maximum number of concurrent calls and streams of users; one user gets at most half. Further calls are rejected",
    )


class KeepPolicy(Section):
    """Retention of one kind of file. The newest `newest` files are kept. Of the others, files older than `days` are deleted, and the oldest
    while the total exceeds `total_gib`; all of them if neither is set. With nothing set, everything is kept."""

    newest: NonNegativeInt | None = None
    days: PositiveFloat | None = None
    total_gib: PositiveFloat | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is ever deleted."""
        return (self.newest, self.days, self.total_gib) == (None, None, None)


class GarbageSection(Section):
    """Garbage collection. It never touches files of an unfinished job."""

    every_s: Annotated[float, Field(ge=60.0)] = 3600.0
    """Seconds between two garbage collections by one daemon."""
    runs: KeepPolicy = KeepPolicy()
    """Run folders of ended jobs under `run_root`: checkpoints, samples, logs. Default: keep everything."""
    caches: KeepPolicy = KeepPolicy()
    """Copies and indices of data under `home`, which gcore rebuilds when needed. Does not include the hubs' own caches."""
    logs: KeepPolicy = KeepPolicy(days=30.0)
    """Logs of ended supervisors under `home`."""


AUTO, OFF = "auto", "off"

LEAST_MEMORY_GIB = 0.05
"""Below this limit a supervisor cannot start."""


class JobLimits(Section):
    """Limits of each job on this node; None: no limit. They cover all processes of a job on the node together: engines, ranks,
    rewards, tools. `disk_gib` applies to the job's run folder, wherever it is."""

    memory_gib: Annotated[float, Field(ge=LEAST_MEMORY_GIB)] | None = None
    """memory.max of the cgroup. Above it, the kernel kills the job's largest process."""
    cpus: Annotated[float, Field(ge=0.01)] | None = None
    """cpu.max of the cgroup, in cores."""
    pids: PositiveInt | None = None
    """pids.max of the cgroup: processes and threads."""
    disk_gib: PositiveFloat | None = None
    """Size of the run folder. At 90 % gcore stops writing samples; at 100 % it pauses the job and records an event."""
    cgroup: str = AUTO
    """Parent of the jobs' cgroups: auto (next to the daemon's own, if systemd delegates it), off, or the path of a cgroup v2 folder
    that the daemon may manage."""

    @field_validator("cgroup")
    @classmethod
    def _check_cgroup(cls, cgroup: str) -> str:
        if cgroup not in (AUTO, OFF) and not cgroup.startswith("/"):
            raise ValueError(f"it should be {AUTO}, {OFF}, or the absolute path of a cgroup v2 folder")
        return cgroup

    @property
    def of_groups(self) -> bool:
        """Whether any limit needs a cgroup."""
        return self.cgroup != OFF and (self.memory_gib, self.cpus, self.pids) != (None, None, None)


Port = Annotated[int, Field(ge=0, le=65535)]
File = Annotated[str, Field(min_length=1)]


class TlsSection(Section):
    """TLS files (PEM), as written by `gcore certs issue NODE`. With this section, the node serves only over TLS and authenticates
    callers. Files are read again when they change."""

    ca: File
    """The authority that signs the certificates of nodes and users."""
    cert: File
    key: File
    """The private key of this node, readable only by the daemon's user."""
    engines_key: File | None = None
    """The cluster's engine key, from which each engine's key is derived; the same on all nodes. None: engines require no key, which is
    rejected beyond loopback."""
    peer_port: Port = 0
    """Port for other nodes and for users with certificates; 0: a free port. `listen_port` is for users with tokens."""


class AuthSection(Section):
    """Authentication, in addition to `tls`. Every call except health needs a token or a certificate."""

    admin_token_file: File | None = None
    """File with a token that always has the role admin, used to create the first other tokens. Only its owner may read it."""
    journal: File | None = None
    """Audit log of calls; None: HOME/logs/calls.jsonl."""
    journal_mib: PositiveInt = 16
    """Size at which the audit log is rotated."""
    journal_kept: Annotated[int, Field(ge=0, le=1000)] = 4
    """Number of rotated audit logs to keep."""


Names = tuple[Annotated[str, Field(min_length=1, max_length=256)], ...]


class AllowSection(Section):
    """Allowlist of what specs may name on this cluster. None: everything installed (for `roots`, `secrets`, `remote_code` and
    `engine_args`, see each). Must be equal on all nodes."""

    flows: Names | None = None
    filters: Names | None = None
    rewards: Names | None = None
    verdicts: Names | None = None
    curricula: Names | None = None
    policies: Names | None = None
    """Placement policies."""
    environments: Names | None = None
    tools: Names | None = None
    agents: Names | None = None
    trackers: Names | None = None
    advantages: Names | None = None
    losses: Names | None = None
    engine_args: bool | None = None
    """Whether specs may pass arguments to SGLang and vLLM, which can make them run code; None: only without authentication."""
    roots: tuple[File, ...] | None = None
    """Folders that must contain every path of a spec: models, data, storage.root. None: without authentication, any path that the
    daemon's user can read; otherwise none. Always excludes the daemon's own files (`controllers.api.submission.allowlist`)."""
    hubs: bool = True
    """Whether models may come from a hub."""
    remote_code: bool | None = None
    """Whether gcore may run code from a model's folder; None: only without authentication."""
    secrets: Names | None = None
    """Secrets that specs may name, such as env:JUDGE_KEY or file:/etc/gcore/secrets/*; None: without authentication any environment
    variable, otherwise none."""

    @field_validator("roots")
    @classmethod
    def _check_roots(cls, roots: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for root in roots or ():
            if not root.startswith("/"):
                raise ValueError(f"{root!r} should be an absolute path, beginning with /")
        return roots

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for one in secrets or ():
            if not one.startswith(("env:", "file:/")):
                raise ValueError(f"{one!r} should be env:NAME or file:/PATH")
        return secrets


def listening_problem(hosts: dict[str, str], tls: TlsSection | None) -> str | None:
    """Return why a daemon must not listen on `hosts` (host by configuration key); None if it may.

    Beyond loopback, it needs TLS and a key for its engines.
    """
    reached = [(key, host) for key, host in hosts.items() if not is_loopback(host)]
    if not reached:
        return None
    key, host = reached[0]
    if tls is None:
        return (
            f"{key} {host} is reachable from other machines, but tls is not set, so callers are not authenticated. Create certificates "
            "with `gcore certs init` and `gcore certs issue` and name them in tls (docs/operate/security.md), or listen on 127.0.0.1"
        )
    if tls.engines_key is None:
        return (
            f"{key} {host} is reachable from other machines, but its engines require no key. Set tls.engines_key to the engines.key "
            "from `gcore certs issue`"
        )
    return None


Host = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9:._%-]+$")]

EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
"""Hosts that are valid for listening but not as an address for clients."""

BEGIN = (
    "It starts like this: node: NAME, home: FOLDER, etcd: {endpoints: [HOST:PORT]}, slots: [cuda:0], run_root: FOLDER. "
    "docs/operate/configuration.md describes every key"
)

MAX_BYTES = 1 << 18
"""Maximum size of the file. Enough for a node with 4,096 slots."""


class NodeConfig(Section):
    """Configuration of one controller daemon. Times are in seconds; port 0 means any free port."""

    schema_version: Literal[1] = 1
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    """Name of the node, unique in the cluster and stable across restarts."""
    home: Annotated[str, Field(min_length=1)]
    """Folder of this daemon on its machine: launch documents, logs, caches."""
    listen_host: Host = "127.0.0.1"
    listen_port: Port = 0
    """Port of the job API, the peer API and the health service."""
    advertise: str | None = None
    """HOST or HOST:PORT at which others reach this daemon; None: where it listens. Required if it listens on every address."""
    worker_host: Host | None = None
    """Address of this machine at which its engines and train ranks listen and at which other nodes reach them; None:
    `listen_host`, or the host in `advertise` if `listen_host` is every address."""
    metrics_host: Host | None = None
    """Address of /metrics; None: `listen_host`."""
    metrics_port: Port = 0
    etcd: StoreRef
    """endpoints (host:port, or https://host:port), tls (files ca, cert, key), user (name, password_file)."""
    tls: TlsSection | None = None
    auth: AuthSection | None = None
    allow: AllowSection = AllowSection()
    train_interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._,:=^-]{1,64}$")] | None = None
    """Network interface for gradient exchange between train ranks (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME). Must be a private
    network, because this traffic is not encrypted. None: the interface of `worker_host`."""
    slots: Annotated[tuple[str, ...], Field(min_length=1)]
    """Slots of this node that gcore may use: cuda:0 (a GPU), cpu:0-3 (a set of cores), cpu:0 (one core, any).
    `gcore.system.slots` documents the grammar."""
    host_memory_gib: PositiveFloat | None = None
    """Host memory that the node may use, for planning; None: all of it."""
    run_root: Annotated[str, Field(min_length=1)]
    """Parent folder of the run folders. Every node must see it."""
    sglang_python: str | None = None
    """Python interpreter with SGLang, for jobs with `rollout.engine: sglang`; None: the node runs no such job."""
    vllm_python: str | None = None
    """Python interpreter with vLLM, for jobs with `rollout.engine: vllm`; None: the node runs no such job."""
    lease_ttl_s: Annotated[PositiveInt, Field(le=3600)] = 5
    """Lease TTL: after this long without a renewal, peers consider the daemon gone."""
    lease_tick_s: PositiveFloat | None = None
    """Interval between lease renewals; None: a third of the TTL. `lease_times` checks the four values together at start."""
    lease_call_s: PositiveFloat | None = None
    """Timeout of one renewal; None: a fifth of the TTL."""
    lease_margin_s: NonNegativeFloat | None = None
    """Allowance for delays of the daemon process; None: a tenth of the TTL."""
    orphan_grace_s: NonNegativeFloat = 60.0
    """How long workers keep running without their daemon."""
    memory_dir: str = "/dev/shm"
    """Folder on an in-memory file system of this machine, for in-memory replicas of train state (`gcore.models.replicas`)."""
    blob_gib: PositiveFloat = 16.0
    """Maximum size of this node's store of pictures and other large arrays (`gcore.media`), in `home`."""
    api: ApiConfig = ApiConfig()
    """Limits of the job API."""
    limits: JobLimits = JobLimits()
    """Limits of each job on this node: memory_gib, cpus, pids, disk_gib."""
    gc: GarbageSection = GarbageSection()
    """Retention of files that are no longer needed."""
    log_format: LogFormat = "text"
    """Log format of the daemon and its workers: text, or JSON with controller, job and step (`gcore.system.daemon`)."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """OpenTelemetry collector that receives each step as a trace, such as http://collector:4318; None: the environment's
    OTEL_EXPORTER_OTLP_ENDPOINT, or no collector. Needs gcore[otel]."""
    local_cluster: bool = False
    """Whether the node belongs to `gcore up`. Then the daemon restarts its peers and etcd when they die."""

    @property
    def blob_bytes(self) -> int:
        """Maximum size of the store of pictures and other large arrays, in bytes."""
        return int(self.blob_gib * (1 << 30))

    @model_validator(mode="before")
    @classmethod
    def _read_old_endpoints(cls, tree: Any) -> Any:
        """Accept `etcd_endpoints`, which local clusters of an earlier version wrote."""
        if isinstance(tree, dict) and "etcd_endpoints" in tree and "etcd" not in tree:
            tree = dict(tree)
            tree["etcd"] = {"endpoints": tree.pop("etcd_endpoints")}
        return tree

    @field_validator("slots")
    @classmethod
    def _check_slots(cls, slots: tuple[str, ...]) -> tuple[str, ...]:
        if problem := slots_problem(slots):
            raise ValueError(problem)
        return slots

    @field_validator("advertise")
    @classmethod
    def _check_advertise(cls, advertise: str | None) -> str | None:
        if advertise is not None:
            host, port = _host_and_port(advertise)
            if not host or port == 0 or host in EVERY_ADDRESS:
                raise ValueError("it should be HOST or HOST:PORT at which other nodes reach this one")
        return advertise

    @model_validator(mode="after")
    def _check_listen_host(self) -> Self:
        if self.listen_host in EVERY_ADDRESS and self.advertise is None:
            raise ValueError(
                f"listen_host {self.listen_host} is every address of the machine, so others do not know which address to use; "
                "set advertise"
            )
        return self

    @model_validator(mode="after")
    def _check_authentication(self) -> Self:
        hosts = {
            "listen_host": self.listen_host,
            "worker_host": self.workers_listen_on,
            "metrics_host": self.metrics_listen_on,
        }
        if problem := listening_problem(hosts, self.tls):
            raise ValueError(problem)
        if self.auth is not None and self.tls is None:
            raise ValueError(
                "auth needs tls: certificates authenticate other nodes, and tokens must be encrypted; set tls"
            )
        return self

    @property
    def tells_apart(self) -> bool:
        """Whether callers are authenticated. If not, every caller is an admin."""
        return self.tls is not None or self.auth is not None

    @property
    def collector(self) -> str | None:
        """Address of the OpenTelemetry collector: `otlp_endpoint`, else OTEL_EXPORTER_OTLP_ENDPOINT; None if neither is set."""
        return self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None

    def advertised(self, port: int) -> str:
        """Return HOST:PORT at which others reach the daemon, which listens on `port`."""
        named = None if self.advertise is None else _host_and_port(self.advertise)[1]
        return join_host_port(self.advertised_host, named or port)

    @property
    def advertised_host(self) -> str:
        """The host at which others reach the daemon."""
        return self.listen_host if self.advertise is None else _host_and_port(self.advertise)[0]

    @property
    def workers_listen_on(self) -> str:
        """The host at which engines and train ranks of this node listen, and at which other nodes reach them."""
        if self.worker_host is not None:
            return self.worker_host
        if self.listen_host in EVERY_ADDRESS and self.advertise is not None:
            return _host_and_port(self.advertise)[0]
        return self.listen_host

    @property
    def metrics_listen_on(self) -> str:
        """The host that serves /metrics."""
        return self.metrics_host or self.listen_host

    @property
    def lease_times(self) -> LeaseTimes:
        """Timing of the daemon's lease. `LeaseTimes.check` checks it."""
        return LeaseTimes.of(
            self.lease_ttl_s, tick_s=self.lease_tick_s, call_s=self.lease_call_s, margin_s=self.lease_margin_s
        )

    @classmethod
    def load(cls, path: Path) -> NodeConfig:
        """Read the daemon configuration at `path` and make its paths absolute.

        Raises UsageError, also if the lease times leave no margin for a slow response of etcd.
        """
        tree = _tree(path)
        if not isinstance(tree, dict):
            raise UsageError("the daemon configuration is not a mapping of keys", where=str(path), fix=BEGIN)
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            problems = "; ".join(list(explain_errors(error, cls))[:8])
            raise UsageError(
                f"the daemon configuration is not valid: {problems}",
                where=str(path),
                fix="Correct it; docs/operate/configuration.md describes every key",
            ) from error
        config.lease_times.check(str(path))
        return config._with_whole_paths(path)

    def _with_whole_paths(self, file: Path) -> NodeConfig:
        """Make paths absolute, because workers run in other folders than the daemon. Raises UsageError."""
        base = file.absolute().parent

        def whole(path: str | None) -> str | None:
            if path is None:
                return None
            try:
                if "\0" in path:
                    raise ValueError("it contains a NUL")
                return str(base / Path(path).expanduser())
            except (ValueError, RuntimeError) as error:  # RuntimeError: ~name with an unknown user
                why = f"the daemon configuration is not valid: {path[:80]!r} is not a valid path ({error})"
                raise UsageError(why, where=str(file), fix="Write an absolute path") from error

        etcd = self.etcd
        if etcd.tls is not None:
            files = {name: whole(path) for name, path in etcd.tls}
            etcd = etcd.model_copy(update={"tls": etcd.tls.model_copy(update=files)})
        if etcd.user is not None:
            password = {"password_file": whole(etcd.user.password_file)}
            etcd = etcd.model_copy(update={"user": etcd.user.model_copy(update=password)})
        tls, auth = self.tls, self.auth
        if tls is not None:
            named = {name: whole(getattr(tls, name)) for name in ("ca", "cert", "key", "engines_key")}
            tls = tls.model_copy(update=named)
        if auth is not None:
            auth = auth.model_copy(
                update={name: whole(getattr(auth, name)) for name in ("admin_token_file", "journal")}
            )
        folders = {name: whole(getattr(self, name)) for name in ("home", "run_root", "memory_dir")}
        return self.model_copy(update={**folders, "etcd": etcd, "tls": tls, "auth": auth})


def _tree(path: Path) -> Any:
    """Parse the configuration file at `path`, which is JSON or YAML. Raises UsageError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"the file has more than {MAX_BYTES} bytes, which no daemon configuration needs",
                where=str(path),
                fix="Name the YAML file of this daemon",
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"cannot read the daemon configuration ({why})", where=str(path), fix="Name an existing YAML file"
        ) from error
    if text.lstrip().startswith("{"):  # JSON, as `gcore up` writes it; YAML 1.1 would read 1e-05 in it as a word
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass  # it may be YAML in braces, whose parser also reports errors better
    from gcore.config.load import (
        YamlNotPlain,
        read_plain,
    )  # imported late: a laptop's daemon has JSON and needs no YAML

    try:
        return read_plain(text)
    except YamlNotPlain as error:
        raise UsageError(
            f"not valid YAML: {error.problem}", where=f"{path}{error.place}", fix="Correct or quote it"
        ) from error


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Split `host`, `host:port`, `v6` or `[v6]:port`; an empty host if the text is none of these."""
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", None
    return ("", None) if parts.path or parts.query or parts.fragment or parts.username else (host, port)
