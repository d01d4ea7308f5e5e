"""A daemon's configuration: the file behind `gcore-controller --config FILE`, in YAML (and JSON is YAML).

The same document on a laptop (written by `gcore up`) and on a cluster (written by whoever deploys). Frozen; unknown keys
are errors; relative paths are relative to the file's folder. It holds no secret (passwords and keys are in files that it
names) and nothing about jobs. A daemon that listens beyond loopback has certificates, or it does not start
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

from gcore.config.base import Section
from gcore.errors import UsageError
from gcore.store.reference import StoreRef
from gcore.store.types import LeaseTimes
from gcore.system.daemon import LogFormat
from gcore.system.network import is_loopback, join_host_port
from gcore.system.slots import slots_problem


class ApiConfig(Section):
    """Bounds hold for each daemon by itself."""

    reflection: bool = Field(
        False, description="Whether the API tells its services and messages to tools such as grpcurl"
    )
    streams: Annotated[int, Field(ge=1, le=100_000)] = Field(
        512,
        description="Streams that are served at once, of events, logs, numbers, samples and books; who comes then is refused",
    )
    calls: Annotated[int, Field(ge=16, le=100_000)] = Field(
        4096,
        description="Calls and streams of people that are served at once, one person's no more than half; who comes then is refused",
    )


class KeepPolicy(Section):
    """What stays of one kind. The newest `newest` stay. Of the others those go that are older than `days`, and the oldest for as
    long as all together take more than `total_gib`; where neither is named, all of them. With nothing named at all, everything stays."""

    newest: NonNegativeInt | None = None
    days: PositiveFloat | None = None
    total_gib: PositiveFloat | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing ever goes."""
        return (self.newest, self.days, self.total_gib) == (None, None, None)


class GarbageSection(Section):
    """What of an unfinished job is never touched, whatever stands here."""

    every_s: Annotated[float, Field(ge=60.0)] = 3600.0
    """Between two rounds of a daemon."""
    runs: KeepPolicy = KeepPolicy()
    """Run folders of jobs that have ended, under `run_root`: checkpoints, samples, logs. Everything stays unless something is named."""
    caches: KeepPolicy = KeepPolicy()
    """Copies and indices of data, under `home`; they are made again when they are needed. A hub's cache is the hub's."""
    logs: KeepPolicy = KeepPolicy(days=30.0)
    """Logs of supervisors that have ended, under `home`."""


AUTO, OFF = "auto", "off"

LEAST_MEMORY_GIB = 0.05
"""Below it not even a supervisor starts."""


class JobLimits(Section):
    """Of each job on this node; None: no limit. All of a job's processes on the node count together: engines, ranks, rewards,
    tools. `disk_gib` is of its run folder, wherever that lies."""

    memory_gib: Annotated[float, Field(ge=LEAST_MEMORY_GIB)] | None = None
    """cgroup's memory.max: beyond it the kernel kills the job's process that has most."""
    cpus: Annotated[float, Field(ge=0.01)] | None = None
    """cgroup's cpu.max, in cores."""
    pids: PositiveInt | None = None
    """cgroup's pids.max: processes and threads."""
    disk_gib: PositiveFloat | None = None
    """Of a run's folder: at nine tenths of it no more samples are written, beyond it the job is paused, and an event says so."""
    cgroup: str = AUTO
    """Where the groups of jobs are made: auto (beside the daemon's own, where systemd delegates that), off, or a folder of cgroup v2
    that is the daemon's to fill."""

    @field_validator("cgroup")
    @classmethod
    def _is_a_place(cls, cgroup: str) -> str:
        if cgroup not in (AUTO, OFF) and not cgroup.startswith("/"):
            raise ValueError(f"it should be {AUTO}, {OFF}, or the whole path of a folder of cgroup v2")
        return cgroup

    @property
    def of_groups(self) -> bool:
        """Whether any of them is a control group's to keep."""
        return self.cgroup != OFF and (self.memory_gib, self.cpus, self.pids) != (None, None, None)


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
    nobody is told apart, else none. What is the daemon's own is never among it (`controllers.api.submission.allowlist`)."""
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


def listening_problem(hosts: dict[str, str], tls: TlsSection | None) -> str | None:
    """What is wrong with listening there; None: nothing. `hosts`: by the key that says each."""
    reached = [(key, host) for key, host in hosts.items() if not is_loopback(host)]
    if not reached:
        return None
    key, host = reached[0]
    if tls is None:
        return (
            f"{key} {host} is reached from other machines, and nobody is told apart there: make certificates with "
            "`gcore certs init` and `gcore certs issue`, and name them in tls (docs/operate/security.md); or listen on 127.0.0.1"
        )
    if tls.engines_key is None:
        return (
            f"{key} {host} is reached from other machines, and the engines there ask for no key: name the engines.key of "
            "`gcore certs issue` in tls.engines_key"
        )
    return None


Host = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9:._%-]+$")]

EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
"""Hosts to listen on at which nobody can be reached."""

BEGIN = (
    "It begins like this: node: NAME, home: FOLDER, etcd: {endpoints: [HOST:PORT]}, slots: [cuda:0], run_root: FOLDER; "
    "docs/operate/configuration.md has every key"
)

MAX_BYTES = 1 << 18
"""Of the file. A node of 4,096 slots fits."""


class NodeConfig(Section):
    """One controller daemon. Times in seconds; a port of 0 takes a free one."""

    schema_version: Literal[1] = 1
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    """The node's name, unique in the cluster; it stays the same when the daemon is started again."""
    home: Annotated[str, Field(min_length=1)]
    """The folder of this daemon on its machine: launch documents, logs, caches."""
    listen_host: Host = "127.0.0.1"
    listen_port: Port = 0
    """The job API, the peers' API and health."""
    advertise: str | None = None
    """HOST or HOST:PORT at which others reach this daemon; None: where it listens. Needed where it listens on every address."""
    worker_host: Host | None = None
    """The address of this machine at which its engines and train ranks listen and are reached by other nodes; None:
    `listen_host`, or `advertise`'s host where that is every address."""
    metrics_host: Host | None = None
    """Where /metrics is served; None: `listen_host`."""
    metrics_port: Port = 0
    etcd: StoreRef
    """endpoints (host:port, or https://host:port), tls (ca, cert, key: files), user (name, password_file)."""
    tls: TlsSection | None = None
    auth: AuthSection | None = None
    allow: AllowSection = AllowSection()
    train_interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._,:=^-]{1,64}$")] | None = None
    """The network interface over which train ranks exchange gradients (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME): a private
    network, for nothing guards that traffic. None: the one of `worker_host`."""
    slots: Annotated[tuple[str, ...], Field(min_length=1)]
    """The accelerators of this node that gcore may use: cuda:0 (a GPU), cpu:0-3 (a set of cores), cpu:0 (one core, whichever);
    `gcore.system.slots` has the whole grammar."""
    host_memory_gib: PositiveFloat | None = None
    """What of its host's memory the node may take, for planning; None: all of it."""
    run_root: Annotated[str, Field(min_length=1)]
    """Folder of the jobs' run folders, seen by every node."""
    sglang_python: str | None = None
    """The Python that has SGLang, for jobs with `rollout.engine: sglang`; None: the node runs no such job."""
    lease_ttl_s: Annotated[PositiveInt, Field(le=3600)] = 5
    """A daemon that is silent for so long has left, for its peers."""
    lease_tick_s: PositiveFloat | None = None
    """Between two renewals of its lease; None: a third of that. How the four tie is checked at start (`lease_times`)."""
    lease_call_s: PositiveFloat | None = None
    """Longest wait for the answer to a renewal; None: a fifth of the lease."""
    lease_margin_s: NonNegativeFloat | None = None
    """So long may the daemon be held up besides; None: a tenth of the lease."""
    orphan_grace_s: NonNegativeFloat = 60.0
    """So long do workers outlive a daemon that does not come back."""
    memory_dir: str = "/dev/shm"
    """A folder of a file system in this machine's memory, for copies of train ranks' state (`gcore.models.replicas`)."""
    api: ApiConfig = ApiConfig()
    """What the job API allows callers."""
    limits: JobLimits = JobLimits()
    """What each job may take of this node: memory_gib, cpus, pids, disk_gib."""
    gc: GarbageSection = GarbageSection()
    """What is deleted of what is not needed any more."""
    log_format: LogFormat = "text"
    """How this daemon and its workers write their logs: lines for people, or JSON with controller, job and step; `gcore.system.daemon`."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """An OpenTelemetry collector, such as http://collector:4318, that is sent each step as a trace; None: what
    OTEL_EXPORTER_OTLP_ENDPOINT says in the daemon's environment, or nobody. Needs gcore[otel]."""
    local_cluster: bool = False
    """Whether the node belongs to `gcore up`: then the daemon brings back its peers and etcd when they die."""

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_written_before(cls, tree: Any) -> Any:
        """The local clusters of an earlier version named the store's endpoints alone."""
        if isinstance(tree, dict) and "etcd_endpoints" in tree and "etcd" not in tree:
            tree = dict(tree)
            tree["etcd"] = {"endpoints": tree.pop("etcd_endpoints")}
        return tree

    @field_validator("slots")
    @classmethod
    def _are_slots(cls, slots: tuple[str, ...]) -> tuple[str, ...]:
        if problem := slots_problem(slots):
            raise ValueError(problem)
        return slots

    @field_validator("advertise")
    @classmethod
    def _is_an_address(cls, advertise: str | None) -> str | None:
        if advertise is not None:
            host, port = _host_and_port(advertise)
            if not host or port == 0 or host in EVERY_ADDRESS:
                raise ValueError("it should be HOST or HOST:PORT at which other nodes reach this one")
        return advertise

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.listen_host in EVERY_ADDRESS and self.advertise is None:
            raise ValueError(
                f"listen_host {self.listen_host} is every address of the machine, and none at which others reach it; "
                "name one in advertise"
            )
        return self

    @model_validator(mode="after")
    def _nobody_unknown_is_listened_to(self) -> Self:
        hosts = {
            "listen_host": self.listen_host,
            "worker_host": self.workers_listen_on,
            "metrics_host": self.metrics_listen_on,
        }
        if problem := listening_problem(hosts, self.tls):
            raise ValueError(problem)
        if self.auth is not None and self.tls is None:
            raise ValueError("auth needs tls: other nodes are known by their certificates, and tokens go over TLS")
        return self

    @property
    def tells_apart(self) -> bool:
        """Whether calls show whose they are; else everybody who reaches the daemon is an admin."""
        return self.tls is not None or self.auth is not None

    @property
    def collector(self) -> str | None:
        """Where traces are sent."""
        return self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None

    def advertised(self, port: int) -> str:
        """HOST:PORT at which others reach the daemon, which listens on `port`."""
        named = None if self.advertise is None else _host_and_port(self.advertise)[1]
        return join_host_port(self.advertised_host, named or port)

    @property
    def advertised_host(self) -> str:
        """The host at which others reach the daemon."""
        return self.listen_host if self.advertise is None else _host_and_port(self.advertise)[0]

    @property
    def workers_listen_on(self) -> str:
        """The host at which engines and ranks of this node listen, and are reached."""
        if self.worker_host is not None:
            return self.worker_host
        if self.listen_host in EVERY_ADDRESS and self.advertise is not None:
            return _host_and_port(self.advertise)[0]
        return self.listen_host

    @property
    def metrics_listen_on(self) -> str:
        """The host at which /metrics is served."""
        return self.metrics_host or self.listen_host

    @property
    def lease_times(self) -> LeaseTimes:
        """How the daemon keeps its lease; not checked."""
        return LeaseTimes.of(
            self.lease_ttl_s, tick_s=self.lease_tick_s, call_s=self.lease_call_s, margin_s=self.lease_margin_s
        )

    @classmethod
    def load(cls, path: Path) -> NodeConfig:
        """Read the file. Raises UsageError, also for times under which a lease would not outlive a slow answer."""
        tree = _tree(path)
        if not isinstance(tree, dict):
            raise UsageError("not a daemon's configuration: it is no mapping of keys", where=str(path), fix=BEGIN)
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            from gcore.config.base import explain_errors

            problems = "; ".join(list(explain_errors(error, cls))[:8])
            raise UsageError(
                f"not a daemon's configuration: {problems}",
                where=str(path),
                fix="Correct it; docs/operate/configuration.md has every key",
            ) from error
        config.lease_times.check(str(path))
        return config._with_whole_paths(path)

    def _with_whole_paths(self, file: Path) -> NodeConfig:
        """Workers stand elsewhere than the daemon: what is relative to the file's folder is made whole. Raises UsageError."""
        base = file.absolute().parent

        def whole(path: str | None) -> str | None:
            if path is None:
                return None
            try:
                if "\0" in path:
                    raise ValueError("it holds a NUL")
                return str(base / Path(path).expanduser())
            except (ValueError, RuntimeError) as error:  # RuntimeError: ~somebody whom this machine does not know
                why = f"not a daemon's configuration: {path[:80]!r} is no path ({error})"
                raise UsageError(why, where=str(file), fix="Write the whole path") from error

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
    """The document in the file. Raises UsageError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"the file has more than {MAX_BYTES} bytes", where=str(path), fix="Name a daemon's configuration"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"cannot read the daemon's configuration ({why})", where=str(path), fix="Name an existing YAML file"
        ) from error
    if text.lstrip().startswith("{"):  # what `gcore up` writes; YAML 1.1 would take 1e-05 in it for a word
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass  # YAML has braces too, and says better what is wrong
    from gcore.config.load import YamlNotPlain, read_plain  # after JSON: a laptop's daemon needs no YAML

    try:
        return read_plain(text)
    except YamlNotPlain as error:
        raise UsageError(
            f"not valid YAML: {error.problem}", where=f"{path}{error.place}", fix="Correct or quote it"
        ) from error


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Of `host`, `host:port`, `v6` and `[v6]:port`; an empty host where it is none of these, or more than that."""
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", None
    return ("", None) if parts.path or parts.query or parts.fragment or parts.username else (host, port)
