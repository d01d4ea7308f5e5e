"""Where everything stands in the store. The one place that spells keys."""

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

WRITTEN = SCHEMAS + "written"
"""The newest schema version that was ever written here, as digits, under no lease."""

READS = SCHEMAS + "reads/"

SHARES = ROOT + "shares"
"""Which slots each job has (`gcore.ledger.records.cluster`)."""

POOL = ROOT + "pool/"
DRAINED = POOL + "drained/"
SICK = POOL + "sick/"

QUOTAS = POOL + "quotas"
"""The most slots of each namespace."""

DEFAULT_NAMESPACE = "default"

USAGE = ROOT + "usage/"
"""What jobs have used; it outlives them (`gcore.ledger.usage`)."""

USAGE_SWEPT = ROOT + "usage-swept"
"""Up to which day since the epoch it was looked for what of it is to be forgotten, as digits."""

LAST_DAY = 999_999
"""The last that a key can name."""


def prefix_end(prefix: str) -> str:
    """Of a prefix that ends with a slash: what stands behind all keys that begin with it."""
    return f"{prefix.removesuffix('/')}0"


def usage_of(node_name: str) -> str:
    """Of one node, as a prefix."""
    return f"{USAGE}{node_name}/"


def usage_of_day(node_name: str, day: int) -> str:
    """Of one node on one day since the epoch, as a prefix. Days sort as numbers do."""
    return f"{usage_of(node_name)}{min(day, LAST_DAY):06d}/"


def usage(node_name: str, day: int, uid: str) -> str:
    """What a job used of a node on a day."""
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
    """There while nothing is to be placed on a node; who asked for it, and when."""
    return f"{DRAINED}{node_name}"


def sick_slots(node_name: str) -> str:
    """Which slots of a node cannot be used, and why, under its daemon's lease."""
    return f"{SICK}{node_name}"


def name(job_name: str, namespace: str = DEFAULT_NAMESPACE) -> str:
    """name -> uid of the newest job of that name in its namespace."""
    return f"{NAMES}{full_name(job_name, namespace)}"


def full_name(job_name: str, namespace: str) -> str:
    """As people write it: `NAME` in the namespace `default`, else `NAMESPACE/NAME`."""
    return job_name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{job_name}"


def token(token_id: str) -> str:
    """What is kept of a user's token."""
    return f"{TOKENS}{token_id}"


def request(request_id: str) -> str:
    """request id -> uid, so that a repeated request finds its job."""
    return f"{REQUESTS}{request_id}"


class JobKeys:
    """The keys of one job."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.prefix = f"{JOBS}{uid}/"
        self.active = f"{ACTIVE}{uid}"
        """There while the job has not ended: what daemons look for."""
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
        """The controller that plans, under its lease."""
        self.asked = f"{self.prefix}evalask"
        """Which step a person wants to have evaluated out of turn."""
        self.pin = f"{self.prefix}placement/pin"
        """What a person has fixed of the placement."""
        self.moves = f"{self.prefix}placement/moves"
        """The newest changes of the plan, with their reasons and what came of them."""

    def part(self, incarnation: str) -> str:
        """What a peer gives to the others in a step, under its lease."""
        return f"{self.part_prefix}{incarnation}"

    def agreed(self, version: object, name: str) -> str:
        """What the peers agreed on under a name in the step that begins with `version`; written once."""
        return f"{self.agreed_prefix}{version}/{name}"

    def log(self, seq: int) -> str:
        """A log entry. Zero-padded, so that keys sort as numbers do."""
        return f"{self.log_prefix}{seq:012d}"

    def seal(self, step: int) -> str:
        """The slot of an open step."""
        return f"{self.seal_prefix}{step:012d}"

    def member(self, incarnation: str) -> str:
        """A controller's membership of the job, under its lease."""
        return f"{self.member_prefix}{incarnation}"

    def offer(self, incarnation: str) -> str:
        """A controller's offer, under its lease."""
        return f"{self.offer_prefix}{incarnation}"

    def evaluation(self, version: str) -> str:
        """The evaluation of one policy version; written once."""
        return f"{self.eval_prefix}{version}"

    def eval_part(self, version: str, number: int) -> str:
        """A part of the evaluation of one policy version; written once, and gone with the evaluation's record."""
        return f"{self.eval_part_prefix}{version}/{number:06d}"

    def fetch(self, node: str) -> str:
        """How far a node is with fetching the model, under its controller's lease."""
        return f"{self.fetch_prefix}{node}"

    def epoch(self, number: int) -> str:
        """With which statistics a data epoch began; only of a job with a curriculum."""
        return f"{self.epoch_prefix}{number:012d}"

    def copies(self, node: str) -> str:
        """Which copies of train states lie in a node's memory, under its controller's lease."""
        return f"{self.copies_prefix}{node}"

    def folder(self, node: str) -> str:
        """What lies in a node's own folder of the run, under its controller's lease; only where nodes share none."""
        return f"{self.folder_prefix}{node}"

    def spent(self, node: str) -> str:
        """What a node has asked of judges that others serve; it outlives the node's controllers."""
        return f"{self.spent_prefix}{node}"

    def books(self, node: str) -> str:
        """What a node's slots did in the newest steps; told, never decided by."""
        return f"{self.books_prefix}{node}"

    def fault(self, name: str) -> str:
        """What was wrong with a plug-in; written once, for people. `name` is made of what was wrong."""
        return f"{self.fault_prefix}{name}"

    def storage(self, node: str) -> str:
        """What a node wrote into the run's folder for the others to see, under its controller's lease."""
        return f"{self.storage_prefix}{node}"

    def trouble(self, topic: str) -> str:
        """What last went wrong beside the run; read by events only."""
        return f"{self.trouble_prefix}{topic}"

    def world(self, world: str) -> str:
        """Everything of a world, as a prefix."""
        return f"{self.world_prefix}{world}/"

    def world_rank(self, world: str, rank: int) -> str:
        """Which worker instance took this rank of this world; written once, never deleted while the world matters."""
        return f"{self.world_prefix}{world}/rank/{rank:06d}"

    def rendezvous(self, world: str) -> str:
        """Where rank 0 of this world listens for the others (host:port)."""
        return f"{self.world_prefix}{world}/rendezvous"
