"""Memory by process of jobs with pictures: gcore's, and beside it verl's batch type through Ray on the same bytes.

Payloads are random bytes: 3 MB a group and 2 MB a sample with 64 groups of 8 samples, the same with a ninth of the bytes, and 16 MB a sample
with 8 groups of 8. Three more payloads are samples of policies that generate pictures, of which only gcore is measured.

**gcore**: real daemons, etcd, blob stores and train rank processes; engines and ranks are emulated. The bytes of a group are pictures of its
prompt; those of a sample are a blob that the emulated engine puts into its node's store (`response_blob_bytes`). The same job runs with as
many tokens of text in place of the pictures, and without blobs. Largest messages are measured in all daemons, engines and ranks, by wrapping
gRPC and the HTTP client.

Of generated pictures, the emulated engine makes the states of the trained steps, the picture and the embeddings, in the shapes of a pipeline like
SD3.5; the same job runs with pictures of an eighth of the side.

**verl** (`make verl-setup`): its data path through Ray with workers that compute nothing (`media_verl.py`), in the order of its v0 trainer
(`DataProto`), and as "verl v1" in that of its v1 trainer, the default since 0.9 (TransferQueue).

Each system may use 8 GiB: the anonymous memory of all its processes and the growth of /dev/shm, summed every 50 ms. At more, all its processes
are killed, and the result says what they held. This is no control group; page cache does not count.

A result keeps the cases of the earlier result that were not measured again, each with its date and commit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import tempfile
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import GCORE, LOG_TAIL, MB, ROOT, Benchmark, Result, own_home, write_spec
from gcore.engines.emulated.launch import LAW_FILE
from gcore.media.placeholders import PictureRule
from gcore.testing.pipelines import write_pipeline
from gcore.testing.vision_models import make_tiny_vision_model

VERL = ROOT / ".venv-verl" / "bin" / "python"
LIMIT_BYTES = 8 << 30
MARK = "GCORE_BENCHMARK_RUN"
"""Environment variable that all processes of a measured system inherit."""
SIZES_FOLDER = "GCORE_BENCHMARK_SIZES"
PICTURE_SHARE_MB = 1.3
"""More than the picture and the share of the embeddings of a generated sample: 0.8 MB, and 5 MB a group of 16."""
MOST_MORE_MB = 32.0
"""More than the message buffers of a controller, and far less than the pictures of one group (60 MB)."""
SAMPLE_S = 0.05
SCAN_S = 0.5
"""Seconds between two searches for new processes, and between two readings of the stores' counters."""
FIRST_STEP = "runs/*/weights/*-1"
"""The weights of the first step, in the daemons' home. They are written after the batch of the step has arrived."""
PATCH = 32
"""Side of a patch in pixels; four patches are one token, so that megabytes are few tokens."""
LAW = {
    "load_s": 0.0,
    "decode_s": 0.01,
    "decode_per_sequence_s": 0.0,
    "prefill_tokens_per_s": 1e6,
    "train_s": 1.0,
    "train_tokens_per_s": 1e6,
    "publish_s": 0.05,
    "sleep_s": 0.05,
    "wake_s": 0.05,
    "denoise_s": 0.01,
    "denoise_per_token_s": 0.0,
    "picture_s": 0.0,
}

RULE = """
from PIL import Image

def height(response, fields):
    with Image.open(response.picture) as picture:
        return picture.height / 512 + hash(picture.getpixel((0, 0))) % 2
"""
"""A reward that opens the picture, and differs within a group."""

MESSAGE_SIZES = f"""
import os, sys

words = getattr(sys, "orig_argv", [])
folder = os.environ.get("{SIZES_FOLDER}")
if folder and any(word.startswith(("controllers.daemon", "gcore.emulated")) for word in words):
    import json
    from urllib.parse import urlsplit
    import httpx
    from grpc.aio import _channel

    largest = {{}}

    def note(name, size):
        if size > largest.get(name, -1):
            largest[name] = size
            with open(f"{{folder}}/{{os.getpid()}}.json", "w") as file:
                json.dump(largest, file)

    def wrapped(make):
        def method(self, path, request_serializer=None, response_deserializer=None, *more, **named):
            name = path if isinstance(path, str) else path.decode()

            def serialize(message):
                data = request_serializer(message)
                note(f"gRPC {{name}}", len(data))
                return data

            def deserialize(data):
                note(f"gRPC {{name}}", len(data))
                return response_deserializer(data)

            return make(self, path, serialize, deserialize, *more, **named)

        return method

    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(_channel.Channel, kind, wrapped(getattr(_channel.Channel, kind)))

    read = httpx.Response.aread
    send = httpx.AsyncClient.send

    def of(request):
        return f"HTTP {{urlsplit(str(request.url)).path.rsplit('/', 1)[-1]}}"

    async def aread(self):
        data = await read(self)
        note(of(self.request), len(data))
        return data

    async def sent(self, request, **named):
        if "/blobs/" not in str(request.url):
            note(of(request), int(request.headers.get("content-length", 0)))
        return await send(self, request, **named)

    httpx.Response.aread, httpx.AsyncClient.send = aread, sent
"""
"""A Python process of a measured gcore begins with it."""


@dataclass(frozen=True)
class Payload:
    """Groups of a step, samples of a group, and bytes (10^6) of a group's prompt and of each sample."""

    groups: int
    samples: int
    group_mb: float
    sample_mb: float
    side: int
    """Height and width in pixels of the prompt's pictures, which have the bytes of the group; at least one."""

    @property
    def name(self) -> str:
        """As tables show it."""
        group = f"{self.group_mb:g} MB a group, " if self.group_mb else ""
        return f"{self.groups} x {self.samples}: {group}{self.sample_mb:g} MB a sample"

    @property
    def pictures(self) -> int:
        """Number of pictures of a prompt."""
        return max(1, round(self.group_mb * MB / (3 * self.side**2)))


PAYLOADS = {
    "64x8-ninth": Payload(64, 8, 0.33, 0.22, 192),
    "64x8": Payload(64, 8, 3, 2, 576),
    "8x8": Payload(8, 8, 0, 16, 64),
}
"""The first has as many blobs as the second, with a ninth of the bytes each. In the last a prompt has a picture of 12 kB, because
only jobs with pictures have blob stores."""


@dataclass(frozen=True)
class Generated:
    """A policy that generates pictures: groups of a step, samples of a group, what the states of a sample are, and the spec's flow and
    sampling."""

    groups: int
    samples: int
    states: int
    what: str
    flow: str
    diffusion: Mapping[str, Any]
    side: int = 512
    """Height and width in pixels."""

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.groups} x {self.samples}: generated pictures, {self.what}"

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sample."""
        return self.states * 4 * LATENT_CHANNELS * (self.side // LATENT_SCALE) ** 2


LATENT_CHANNELS, LATENT_SCALE = 16, 8
"""Channels of a latent, and pixels a side for each of its places, as SD3.5 has them."""
SMALL = 8
"""How many times the side of the pictures with which a job of generated pictures is compared."""

GENERATED = {
    "generated-all": Generated(64, 16, 11, "11 states", "flow_grpo", {"steps": 11}),
    "generated-window": Generated(64, 16, 5, "a window of 4 steps", "flow_grpo", {"steps": 11, "window": {"size": 4}}),
    "generated-last": Generated(64, 16, 1, "the finished state", "diffusion_nft", {"steps": 11}),
}
"""Ten of eleven steps can be trained."""


@dataclass
class ProcessMemory:
    """The largest memory of one process so far, in bytes. `rss`: as the kernel counts its peak."""

    kind: str
    rss: int = 0
    anonymous: int = 0
    shared: int = 0
    pss: int = 0
    """Shared pages divided among processes; sampled every `SCAN_S` seconds."""


@dataclass
class Exhausted:
    """A system that exceeded its limit: its memory by kind of process at that time, in bytes."""

    total: int
    after_s: float
    by_kind: dict[str, int]


@dataclass
class MemorySampler:
    """Samples the memory of all processes whose environment contains `MARK` with the value `mark`, in a thread.

    Kills them if they exceed `limit` bytes together.
    """

    mark: str
    limit: int = LIMIT_BYTES
    processes: dict[int, ProcessMemory] = field(default_factory=dict)
    total: int = 0
    """Largest sum of anonymous memory and /dev/shm."""
    shm: int = 0
    """Largest growth of /dev/shm."""
    exhausted: Exhausted | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._foreign: set[int] = set()
        self._began, self._shm_before = monotonic(), _shm_bytes()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        scanned = 0.0
        while not self._stop.wait(SAMPLE_S):
            due = monotonic() - scanned > SCAN_S
            if due:
                self._scan()
                scanned = monotonic()
            self._sample(with_pss=due)

    def _scan(self) -> None:
        pids = {int(one) for one in os.listdir("/proc") if one.isdigit()}
        self._foreign &= pids
        for pid in pids - self._foreign - {pid for pid in self.processes if pid in pids}:
            try:
                own = f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if own:
                self.processes[pid] = ProcessMemory(kind_of(words))
            elif words != [""]:  # not between fork and exec
                self._foreign.add(pid)

    def _sample(self, *, with_pss: bool) -> None:
        now: dict[int, int] = {}
        for pid, memory in list(self.processes.items()):
            try:
                fields = _status(Path(f"/proc/{pid}/status"))
                if "VmHWM" not in fields:  # a zombie
                    continue
                if with_pss:
                    memory.pss = max(memory.pss, _status(Path(f"/proc/{pid}/smaps_rollup"))["Pss"])
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                    if words != [""]:  # a process that ends has no words
                        memory.kind = kind_of(words)  # a process may rename itself
            except (OSError, KeyError):
                continue
            memory.rss = max(memory.rss, fields["VmHWM"])
            memory.anonymous = max(memory.anonymous, fields["RssAnon"])
            memory.shared = max(memory.shared, fields["RssShmem"])
            now[pid] = fields["RssAnon"]
        shm = max(0, _shm_bytes() - self._shm_before)
        total = sum(now.values()) + shm
        self.total, self.shm = max(self.total, total), max(self.shm, shm)
        if total > self.limit and self.exhausted is None:
            by_kind = {"/dev/shm": shm}
            for pid, size in now.items():
                kind = self.processes[pid].kind
                by_kind[kind] = by_kind.get(kind, 0) + size
            self.exhausted = Exhausted(total, monotonic() - self._began, by_kind)
            for pid in now:
                _kill(pid)

    def kinds(self) -> Result:
        """By kind of process: how many, and the largest of each figure in MB."""
        found: Result = {}
        for one in self.processes.values():
            row = found.setdefault(one.kind, {"processes": 0, "rss_mb": 0.0, "pss_mb": 0.0, "anonymous_mb": 0.0})
            row["processes"] += 1
            for name, size in (("rss_mb", one.rss), ("pss_mb", one.pss), ("anonymous_mb", one.anonymous)):
                row[name] = max(row[name], round(size / MB, 1))
        return dict(sorted(found.items()))

    def figures(self) -> Result:
        """What was sampled."""
        found: Result = {
            "most_mb": round(self.total / MB),
            "shm_mb": round(self.shm / MB),
            "kinds": self.kinds(),
            "out_of_memory": None,
        }
        if (one := self.exhausted) is not None:
            by_kind = {name: round(size / MB) for name, size in one.by_kind.items()}
            found["out_of_memory"] = {"mb": round(one.total / MB), "after_s": round(one.after_s, 1), "kinds": by_kind}
        return found


def kind_of(words: Sequence[str]) -> str:
    """The kind of a process, from its command line."""
    line = " ".join(words)
    for part, kind in (
        ("controllers.daemon", "controller"),
        ("gcore.media", "blob store"),
        ("gcore.emulated.host", "engines"),
        ("gcore.emulated.rank", "rank"),
        ("gcore.worker", "supervisor"),
        ("controllers.cli", "command line"),
        ("etcd", "etcd"),
        ("ray::AgentLoop", "rollout worker"),
        ("ray::SimpleStorage", "storage unit"),
        ("ray::TransferQueue", "queue controller"),
        ("ray::Actor", "train worker"),
        ("media_verl", "driver"),
        ("raylet", "raylet"),
        ("ray", "other Ray process"),
    ):
        if part in line:
            return kind
    return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0]).name


def _status(file: Path) -> dict[str, int]:
    """The fields of a file of /proc that have bytes."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def _shm_bytes() -> int:
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class StoreCounters(threading.Thread):
    """Reads the counters of a local cluster's blob stores until `stop` is called. `latest`: by node. `first`: those at the
    end of the first step; empty before.
    """

    def __init__(self, home: Path) -> None:
        super().__init__(daemon=True)
        self.latest: dict[str, dict[str, int]] = {}
        self.first: dict[str, dict[str, int]] = {}
        self._home = home
        self._ended = threading.Event()

    def run(self) -> None:
        """Read them every `SCAN_S` seconds."""
        while not self._ended.wait(SCAN_S):
            for file in (self._home / "blobs").glob("*.port"):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{file.read_text()}/health", timeout=5) as answer:
                        counters = json.loads(answer.read())
                except (OSError, ValueError):  # it does not run yet, or has ended
                    continue
                before = self.latest.setdefault(file.stem, {})
                for name in ("bytes_served", "bytes_fetched", "bytes_stored", "fetches"):
                    before[name] = max(before.get(name, 0), counters[name])
            if not self.first and any(self._home.glob(FIRST_STEP)):
                self.first = {node: dict(counters) for node, counters in self.latest.items()}

    def stop(self) -> dict[str, dict[str, int]]:
        """End, and return the latest counters."""
        self._ended.set()
        self.join()
        return self.latest


# gcore ----------------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """A vision-language model of which only the settings are used."""
    make_tiny_vision_model(folder)
    for name, path, settings in (
        ("config.json", "vision_config", {"patch_size": PATCH}),
        ("config.json", "text_config", {"max_position_embeddings": 1 << 16}),
        (
            "preprocessor_config.json",
            None,
            {"patch_size": PATCH, "size": {"shortest_edge": 4096, "longest_edge": 1 << 24}},
        ),
    ):
        tree = json.loads((folder / name).read_text())
        (tree if path is None else tree[path]).update(settings)
        (folder / name).write_text(json.dumps(tree))
    return folder


def write_data(folder: Path, payload: Payload, model: Path, steps: int) -> int:
    """Write `pictures.jsonl` with pictures of random pixels, and `text.jsonl` with prompts of as many tokens.

    Return the bytes of a step's pictures.
    """
    rule = PictureRule.load(model)
    tokens = payload.pictures * (rule.token_count(payload.side, payload.side) + 2)
    (folder / "pictures").mkdir(parents=True)
    random = np.random.default_rng(0)
    total, seen, text = 0, [], []
    for number in range(payload.groups * steps):
        names = [f"pictures/{number}-{place}.png" for place in range(payload.pictures)]
        for name in names:
            pixels = random.integers(0, 256, (payload.side, payload.side, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG", compress_level=0)
            total += (folder / name).write_bytes(file.getvalue())
        question = f"{number}?"
        seen.append({"prompt": "<image>" * len(names) + question, "images": names, "answer": "1"})
        text.append({"prompt": "a" * tokens + question, "answer": "1"})
    for name, entries in (("pictures", seen), ("text", text)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    return total // steps


def job_spec(folder: Path, payload: Payload, model: Path, steps: int, *, pictures: bool) -> dict[str, Any]:
    """The job with pictures, or with text in their place."""
    data: dict[str, Any] = {"path": str(folder / f"{'pictures' if pictures else 'text'}.jsonl"), "shards": 8}
    return {
        "name": "media-memory",
        "model": {"path": str(model)},
        "data": data | ({"images": "images"} if pictures else {}),
        "flow": {
            "name": "grpo",
            "steps": steps,
            "groups_per_step": payload.groups,
            "samples_per_prompt": payload.samples,
        },
        "rollout": {"max_new_tokens": 32, "batch_slots": 64},
        "reward": {"name": "exact"},
        "checkpoint": {"every": 1000},
    }


def make_pipeline(folder: Path) -> Path:
    """A pipeline of which only the settings are used."""
    write_pipeline(folder, "sd3", whole=True)
    side = {"sample_size": GENERATED["generated-all"].side // LATENT_SCALE, "pos_embed_max_size": 192}
    for part, settings in (
        ("transformer", side | {"in_channels": LATENT_CHANNELS, "joint_attention_dim": 4096}),
        ("vae", {"latent_channels": LATENT_CHANNELS, "block_out_channels": [8] * (LATENT_SCALE.bit_length())}),
    ):
        file = folder / part / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def generated_spec(folder: Path, payload: Generated, steps: int, *, large: bool) -> dict[str, Any]:
    """The job that generates pictures, or small ones in their place."""
    make_pipeline(folder / "pipeline")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"picture {number}"}) + "\n" for number in range(payload.groups * steps))
    )
    (folder / "rule.py").write_text(RULE)
    side = payload.side // (1 if large else SMALL)
    return {
        "name": "media-memory",
        "model": {"path": str(folder / "pipeline")},
        "data": {"path": str(folder / "train.jsonl"), "shards": 8},
        "flow": {
            "name": payload.flow,
            "steps": steps,
            "groups_per_step": payload.groups,
            "samples_per_prompt": payload.samples,
        },
        "rollout": {
            "engine": "diffusers",
            "batch_slots": 16,
            "diffusion": {**payload.diffusion, "height": side, "width": side},
        },
        "reward": {"file": f"{folder / 'rule.py'}:height"},
        "checkpoint": {"every": 1000},
    }


def measure_gcore(spec: Mapping[str, Any], controllers: int, limit_s: float, sample_bytes: int = 0) -> Result:
    """Run a job on a cluster of its own. `sample_bytes`: of the blob with each response.

    Raises SystemExit if it fails for another reason than its memory.
    """
    with own_home() as home:
        folder, mark = home.parent, uuid.uuid4().hex
        (folder / "law.json").write_text(json.dumps(LAW | {"response_blob_bytes": sample_bytes}))
        (folder / "sitecustomize.py").write_text(MESSAGE_SIZES)
        (folder / "sizes").mkdir()
        environment = {
            **os.environ,
            MARK: mark,
            LAW_FILE: str(folder / "law.json"),
            SIZES_FOLDER: str(folder / "sizes"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        }
        words = [str(write_spec(folder / "job.yaml", spec)), "--plain", "--controllers", str(controllers)]
        words += ["--slots", f"emulated:{controllers}", "--home", str(home)]
        counters, began = StoreCounters(home), monotonic()
        counters.start()
        with MemorySampler(mark) as sampler:
            code, log = _run([*GCORE, "run", *words], folder, environment, limit_s)
        stores, seconds = counters.stop(), monotonic() - began
        if sampler.exhausted is None and code:
            raise SystemExit(f"gcore run: ended with {code}\n{log}")
        summaries = [json.loads(file.read_text()) for file in home.glob("runs/*/summary.json")]
        audit = summaries[0]["audit"] if summaries else ""
        if sampler.exhausted is None and audit != "clean":
            raise SystemExit(f"gcore run: audit {audit!r}\n{log}")
        sizes = [json.loads(file.read_text()) for file in (folder / "sizes").glob("*.json")]
    messages = {
        name: max(one.get(name, 0) for one in sizes) for name in sorted({name for one in sizes for name in one})
    }
    return {
        "seconds": round(seconds, 1),
        "audit": audit,
        **sampler.figures(),
        "stores_mb": {
            node: {
                "made": round((one["bytes_stored"] - one["bytes_fetched"]) / MB, 1),
                "served": round(one["bytes_served"] / MB, 1),
                "served_later": round((one["bytes_served"] - counters.first[node]["bytes_served"]) / MB, 1),
                "fetched": round(one["bytes_fetched"] / MB, 1),
            }
            for node, one in sorted(stores.items())
            if node in counters.first
        },
        "messages_bytes": dict(sorted(messages.items(), key=lambda item: -item[1])[:8]),
    }


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Run a command; return its exit status and the end of its output."""
    log = folder / "run.log"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                check=False,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{command[0]}: not at its end after {limit_s} s\n{log.read_text()[-LOG_TAIL:]}") from None
    return done.returncode, log.read_text(errors="replace")[-LOG_TAIL:]


# verl -----------------------------------------------------------------------------------------------------------------

VERL_TRAINERS = {"verl": "v0", "verl v1": "v1"}
"""The trainer of verl whose data path is measured, by the name of the system in results."""


def measure_verl(
    payload: Payload, workers: int, steps: int, limit_s: float, *, pictures: bool, trainer: str = "v0"
) -> Result:
    """Move the batches of `steps` steps through Ray, as a trainer of verl does. Raises SystemExit if it fails for another reason than its memory."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = {
            "trainer": trainer,
            "groups": payload.groups,
            "samples": payload.samples,
            "group_bytes": int(payload.group_mb * MB) * pictures,
            "sample_bytes": int(payload.sample_mb * MB) * pictures,
            "workers": workers,
            "steps": steps,
            # The share that Ray takes for its object store, of a machine of this size.
            "object_store_bytes": int(0.3 * LIMIT_BYTES),
            "folder": str(folder),
        }
        command = [str(VERL), str(ROOT / "benchmarks" / "media_verl.py"), json.dumps(task)]
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        environment["RAY_AUTH_TOKEN"] = mark  # otherwise Ray writes a token into the user's home
        began = monotonic()
        with MemorySampler(mark) as sampler:
            code, log = _run(command, folder, environment, limit_s)
        seconds = monotonic() - began
        for pid in sampler.processes:  # what Ray left behind
            if _is_marked(pid, mark):
                _kill(pid)
        if sampler.exhausted is None and code:
            raise SystemExit(f"verl: ended with {code}\n{log}")
        stages = folder / "stages.json"
        phases = json.loads(stages.read_text()) if stages.is_file() else []
    return {"seconds": round(seconds, 1), **sampler.figures(), "stages": phases}


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


# The benchmark --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, result: Result) -> Result:
    """Every payload, number of nodes and system."""
    cases: list[Result] = []

    def add(system: str, payload: Payload | Generated, nodes: int, figures: Result, *, pictures: bool) -> None:
        case = {"system": system, "payload": payload.name, "nodes": nodes, "pictures": pictures}
        when = {"steps": arguments.steps, "date": result["date"], "commit": result["commit"]}
        cases.append(case | when | figures)
        print(json.dumps(cases[-1]), flush=True)

    for name in (name for name in arguments.payloads if name in GENERATED and "gcore" in arguments.systems):
        drawn = GENERATED[name]
        for nodes in arguments.nodes:
            for large in (True, False):
                with tempfile.TemporaryDirectory() as temporary:
                    spec = generated_spec(Path(temporary), drawn, arguments.steps, large=large)
                    add("gcore", drawn, nodes, measure_gcore(spec, nodes, arguments.limit), pictures=large)
    for name in (name for name in arguments.payloads if name in PAYLOADS):
        payload = PAYLOADS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if "gcore" in arguments.systems:
                model = make_model(folder / "model")
                write_data(folder / "data", payload, model, arguments.steps)
                for nodes in arguments.nodes:
                    for pictures in (True, False):
                        spec = job_spec(folder / "data", payload, model, arguments.steps, pictures=pictures)
                        sample_bytes = int(payload.sample_mb * MB) * pictures
                        figures = measure_gcore(spec, nodes, arguments.limit, sample_bytes)
                        add("gcore", payload, nodes, figures, pictures=pictures)
        for system in (system for system in VERL_TRAINERS if system in arguments.systems):
            for nodes in arguments.nodes:
                for pictures in (True, False):
                    trainer, limit = VERL_TRAINERS[system], arguments.limit
                    figures = measure_verl(payload, nodes, arguments.steps, limit, pictures=pictures, trainer=trainer)
                    add(system, payload, nodes, figures, pictures=pictures)
    if VERL_TRAINERS.keys() & set(arguments.systems):
        result["versions"] |= verl_versions()
    earlier = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"versions": {}, "cases": []}
    result["versions"] = earlier["versions"] | result["versions"]
    return result | {"limit_gib": LIMIT_BYTES >> 30, "cases": merge_cases(earlier["cases"], cases)}


def merge_cases(earlier: Sequence[Result], cases: Sequence[Result]) -> list[Result]:
    """Return `cases` and those of an earlier result that are not among them, in the order of tables."""

    def key(case: Result) -> tuple[int, str, int, bool]:
        names = [one.name for one in PAYLOADS.values()] + [one.name for one in GENERATED.values()]
        payload = names.index(case["payload"])
        return payload, case["system"], case["nodes"], not case["pictures"]

    found = {key(case): case for case in (*earlier, *cases)}
    return [found[one] for one in sorted(found)]


def verl_versions() -> dict[str, str]:
    """Of the packages in verl's own environment."""
    code = "import json; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in ('verl', 'TransferQueue', 'ray', 'tensordict', 'torch')}))"
    done = subprocess.run([str(VERL), "-c", code], check=True, capture_output=True, text=True)
    return {f"{name} (verl)" if name == "torch" else name: one for name, one in json.loads(done.stdout).items()}


def wrong(result: Result) -> str:
    """What the design promises of gcore and a result does not show; empty if it shows all."""
    found = []
    for case in (case for case in result["cases"] if case["system"] == "gcore"):
        what = f"{case['payload']}, {case['nodes']} nodes"
        if case["out_of_memory"]:
            found.append(f"{what}: out of memory")
        if max(case["messages_bytes"].values(), default=0) > 1 << 20:
            found.append(f"{what}: a message of more than 1 MiB")
    held: dict[str, dict[int, float]] = {}
    for case in result["cases"]:
        stores = case.get("stores_mb", {}).values()
        if case["system"] == "gcore" and case["pictures"] and stores:
            held.setdefault(case["payload"], {})[case["nodes"]] = max(one["made"] + one["fetched"] for one in stores)
    for payload, by_nodes in held.items():
        for fewer, more in pairwise(sorted(by_nodes)):
            if by_nodes[more] >= by_nodes[fewer]:
                found.append(f"{payload}: the busiest store of {more} nodes holds as many bytes as that of {fewer}")
    return "; ".join([*found, *_wrong_of_generated(result)])


def _wrong_of_generated(result: Result) -> Iterator[str]:
    """Faults in a result of generated pictures: stores with other bytes than computed, or a controller that grows with the pictures."""
    drawn = {one.name: one for one in GENERATED.values()}
    cases = {(case["payload"], case["nodes"], case["pictures"]): case for case in result["cases"]}
    for (name, nodes, large), case in cases.items():
        if name not in drawn or not large or case["out_of_memory"]:
            continue
        made = sum(one["made"] for one in case["stores_mb"].values())
        states = drawn[name].state_bytes * drawn[name].groups * drawn[name].samples * case["steps"] / MB
        if not states < made < states + PICTURE_SHARE_MB * drawn[name].groups * drawn[name].samples * case["steps"]:
            yield f"{name}, {nodes} nodes: {made:,.0f} MB were made, and the states have {states:,.0f} MB"
        small = cases.get((name, nodes, False))
        if small is not None:
            more = case["kinds"]["controller"]["anonymous_mb"] - small["kinds"]["controller"]["anonymous_mb"]
            if more > MOST_MORE_MB:
                yield f"{name}, {nodes} nodes: the largest controller has {more:.0f} MB more than with small pictures"


def options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own."""
    parser.add_argument("--payloads", nargs="+", choices=[*PAYLOADS, *GENERATED], default=[*PAYLOADS, *GENERATED])
    parser.add_argument("--systems", nargs="+", choices=("gcore", *VERL_TRAINERS), default=["gcore", *VERL_TRAINERS])
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4], help="controllers of gcore, workers of verl")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1200.0, metavar="SECONDS", help="longest time of one run")


BENCHMARKS = [
    Benchmark("media-memory", "media_memory", measure, ("grpcio",), options=options, verdict=wrong),
]
