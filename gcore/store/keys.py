"""The keys of all records in the store. No other module contains key names.

A function or attribute returns the key, or the common prefix of keys, of what its docstring names.
"""

from __future__ import annotations

ROOT = "/gcore/"
NODES = ROOT + "nodes/"
WORKERS = ROOT + "workers/"
JOBS = ROOT + "jobs/"
NAMES = ROOT + "names/"
REQUESTS = ROOT + "requests/"
ACTIVE = ROOT + "active/"
SCHEMAS = ROOT + "schema/"
TOKENS = ROOT + "tokens/"

BLOB_SECRET = ROOT + "blobs/secret"
"""Key of the secret from which the keys of blob stores are derived (`gcore.media`), as bytes, without a lease."""

WRITTEN = SCHEMAS + "written"
"""The newest schema version ever written to this store, as digits, without a lease."""

READS = SCHEMAS + "reads/"

SHARES = ROOT + "shares"
"""Key of the record of which slots each job has (`gcore.ledger.records.cluster.Shares`)."""

POOL = ROOT + "pool/"
DRAINED = POOL + "drained/"
SICK = POOL + "sick/"

QUOTAS = POOL + "quotas"
"""Key of the record of each namespace's maximum number of slots."""

DEFAULT_NAMESPACE = "default"

USAGE = ROOT + "usage/"
"""Prefix of the records of slot-seconds that jobs used; kept after the jobs' end (`gcore.ledger.usage`)."""

USAGE_SWEPT = ROOT + "usage-swept"
"""Key of the day (days since the epoch, as digits) up to which old usage records were deleted."""

LAST_DAY = 999_999
"""The largest day number that fits into a usage key."""


def prefix_end(prefix: str) -> str:
    """Return the first key after all keys with a prefix that ends with a slash."""
    return f"{prefix.removesuffix('/')}0"


def usage_of(node_name: str) -> str:
    """Prefix of a node's usage records."""
    return f"{USAGE}{node_name}/"


def usage_of_day(node_name: str, day: int) -> str:
    """Prefix of a node's usage records on one day (days since the epoch). Zero-padded, so that keys sort by day."""
    return f"{usage_of(node_name)}{min(day, LAST_DAY):06d}/"


def usage(node_name: str, day: int, uid: str) -> str:
    """Usage record of a node by job `uid` on one day."""
    return usage_of_day(node_name, day) + uid


def node(name: str) -> str:
    """A daemon's registration, under its lease."""
    return f"{NODES}{name}"


def readable_version(node_name: str) -> str:
    """The newest schema version that a node's daemon reads, as digits, under its lease."""
    return f"{READS}{node_name}"


def worker(instance: str) -> str:
    """A worker's registration, under its own lease."""
    return f"{WORKERS}{instance}"


def drained_node(node_name: str) -> str:
    """Mark of a drained node: who drained it, and when. Exists while the node is drained."""
    return f"{DRAINED}{node_name}"


def sick_slots(node_name: str) -> str:
    """Unusable slots of a node with reasons, under its daemon's lease."""
    return f"{SICK}{node_name}"


def name(job_name: str, namespace: str = DEFAULT_NAMESPACE) -> str:
    """Key whose value is the uid of the newest job with this name in the namespace."""
    return f"{NAMES}{full_name(job_name, namespace)}"


def full_name(job_name: str, namespace: str) -> str:
    """The job's display name: `NAME` in the namespace `default`, otherwise `NAMESPACE/NAME`. Also part of its name's
    key.
    """
    return job_name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{job_name}"


def token(token_id: str) -> str:
    """Record of a user's API token."""
    return f"{TOKENS}{token_id}"


def request(request_id: str) -> str:
    """Key whose value is the uid of the job that this request created, so that a repeated request finds the job."""
    return f"{REQUESTS}{request_id}"


class JobKeys:
    """The keys of one job."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.prefix = f"{JOBS}{uid}/"
        self.active = f"{ACTIVE}{uid}"
        """The job's claim on slots. Exists until the job has ended; daemons watch these keys to find running jobs."""
        self.job = f"{self.prefix}job"
        self.state = f"{self.prefix}state"
        self.head = f"{self.prefix}head"
        self.assign = f"{self.prefix}assign"
        self.checkpoints = f"{self.prefix}ckpts"
        self.plan = f"{self.prefix}plan"
        self.log_prefix = f"{self.prefix}log/"
        self.seal_prefix = f"{self.prefix}seal/"
        self.member_prefix = f"{self.prefix}member/"
        self.offer_prefix = f"{self.prefix}offer/"
        self.eval_prefix = f"{self.prefix}eval/"
        self.eval_part_prefix = f"{self.prefix}evalpart/"
        self.fetch_prefix = f"{self.prefix}fetch/"
        self.world_prefix = f"{self.prefix}world/"
        self.epoch_prefix = f"{self.prefix}epoch/"
        self.trouble_prefix = f"{self.prefix}trouble/"
        self.part_prefix = f"{self.prefix}part/"
        self.agreed_prefix = f"{self.prefix}agreed/"
        self.fault_prefix = f"{self.prefix}fault/"
        self.storage_prefix = f"{self.prefix}storage/"
        self.copies_prefix = f"{self.prefix}copies/"
        self.folder_prefix = f"{self.prefix}folder/"
        self.spent_prefix = f"{self.prefix}spent/"
        self.books_prefix = f"{self.prefix}placement/books/"
        self.leader = f"{self.prefix}placement/leader"
        """The controller that plans the placement, under its lease."""
        self.asked = f"{self.prefix}evalask"
        """The newest evaluation that a user requested."""
        self.pin = f"{self.prefix}placement/pin"
        """The part of the placement that a user pinned."""
        self.moves = f"{self.prefix}placement/moves"
        """The newest placement changes with reasons and results."""

    def part(self, incarnation: str) -> str:
        """Values that a controller contributes to collective operations of a step, under its lease."""
        return f"{self.part_prefix}{incarnation}"

    def agreed(self, version: object, name: str) -> str:
        """Result of the collective operation `name` in the step that begins at `version`; written once."""
        return f"{self.agreed_prefix}{version}/{name}"

    def log(self, seq: int) -> str:
        """A log entry. Zero-padded, so that keys sort numerically."""
        return f"{self.log_prefix}{seq:012d}"

    def seal(self, step: int) -> str:
        """Seal of an open step. Zero-padded, so that keys sort numerically."""
        return f"{self.seal_prefix}{step:012d}"

    def member(self, incarnation: str) -> str:
        """A controller's membership of the job, under its lease."""
        return f"{self.member_prefix}{incarnation}"

    def offer(self, incarnation: str) -> str:
        """A controller's offer (its finished groups), under its lease."""
        return f"{self.offer_prefix}{incarnation}"

    def evaluation(self, version: str) -> str:
        """The evaluation of one policy version; written once."""
        return f"{self.eval_prefix}{version}"

    def eval_part(self, version: str, number: int) -> str:
        """A part of the evaluation of one policy version; written once, deleted with the evaluation's record."""
        return f"{self.eval_part_prefix}{version}/{number:06d}"

    def fetch(self, node: str) -> str:
        """Progress of a node's model download, under its controller's lease."""
        return f"{self.fetch_prefix}{node}"

    def epoch(self, number: int) -> str:
        """The statistics with which a data epoch began; only for jobs with a curriculum."""
        return f"{self.epoch_prefix}{number:012d}"

    def copies(self, node: str) -> str:
        """In-memory replicas of train states on a node, under its controller's lease."""
        return f"{self.copies_prefix}{node}"

    def folder(self, node: str) -> str:
        """Files in a node's own copy of the run folder, under its controller's lease; only if nodes share no folder."""
        return f"{self.folder_prefix}{node}"

    def spent(self, node: str) -> str:
        """A node's use of external judges for the job; not under a lease, so that it outlives the controllers."""
        return f"{self.spent_prefix}{node}"

    def books(self, node: str) -> str:
        """Slot accounting of a node for the newest steps; for reports only, never for decisions."""
        return f"{self.books_prefix}{node}"

    def fault(self, name: str) -> str:
        """An error of a plug-in, for display; written once. `name` is derived from the error."""
        return f"{self.fault_prefix}{name}"

    def storage(self, node: str) -> str:
        """Nonce of a node's test file in the run folder, under its controller's lease. Other nodes look for the file."""
        return f"{self.storage_prefix}{node}"

    def trouble(self, topic: str) -> str:
        """The newest warning about a topic, for display; it does not stop the run."""
        return f"{self.trouble_prefix}{topic}"

    def world(self, world: str) -> str:
        """Prefix of the keys of one train world."""
        return f"{self.world_prefix}{world}/"

    def world_rank(self, world: str, rank: int) -> str:
        """The worker instance that runs this rank of a train world; written once."""
        return f"{self.world_prefix}{world}/rank/{rank:06d}"

    def rendezvous(self, world: str) -> str:
        """Address (host:port) at which rank 0 of a train world listens for the other ranks."""
        return f"{self.world_prefix}{world}/rendezvous"
