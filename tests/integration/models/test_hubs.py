"""Download models from a hub on loopback, which serves the hubs' API, with the hubs' own clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from hub_server import FakeHub, serve_hub

from controllers.job.preparation import fetch_model
from gcore.config.spec import ModelSpec
from gcore.models.diffusion.files import check_parts
from gcore.models.hubs import HubOffline, HubUnreachable, HuggingFace, ModelError, ModelScope
from gcore.models.resolve import ask_hub, resolve_model
from gcore.testing.pipelines import write_pipeline

WEIGHTS = os.urandom(300_000)
TINY: dict[str, bytes] = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": b"the same again under another name",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"words",
    "modeling_tiny.py": b"raise SystemExit",
    "onnx/model.onnx": b"another format",
}
NEEDED = sorted(name for name in TINY if name.endswith((".json", ".jinja")) or name == "model.safetensors")
CODE = {
    "config.json": json.dumps(
        {"model_type": "strange", "auto_map": {"AutoModelForCausalLM": "modeling_strange.Strange"}}
    ).encode(),
    "modeling_strange.py": b"class Strange: ...",
    "tokenizer.json": b"{}",
    "model.safetensors": b"123",
}


@pytest.fixture
def served() -> Iterator[FakeHub]:
    with serve_hub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between tries, and a client that keeps what came before a transfer broke off."""
    monkeypatch.setattr("gcore.models.resolve.LONGEST_PAUSE_S", 0)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def on(served: FakeHub, tmp_path: Path, **options: Any) -> HuggingFace:
    return HuggingFace(endpoint=served.url, cache=tmp_path / "cache", **options)


def child_commands() -> list[bytes]:
    """Of this process; threads and children may end while they are looked at."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_what_is_needed_is_fetched_and_it_is_what_the_hub_has(served: FakeHub, tmp_path: Path) -> None:
    commit = served.add("own/tiny", TINY)
    found = resolve_model("hf://own/tiny", hub=on(served, tmp_path))
    assert found.revision == commit
    assert found.remote_code == ()
    assert names(found.folder) == NEEDED
    assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_pipeline_is_fetched_with_all_parts_in_one_precision(served: FakeHub, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "sd3")
    files = {name: (folder / name).read_bytes() for name in names(folder)}
    half = "transformer/diffusion_pytorch_model.fp16.safetensors"
    commit = served.add(
        "own/pictures", files | {half: b"half", "sd3.safetensors": b"all in one", "README.md": b"words"}
    )
    hub = on(served, tmp_path)
    early = resolve_model("hf://own/pictures", hub=hub, weights=False).folder
    assert not list(early.rglob("*.safetensors"))
    check_parts(early, weights=False)
    found = resolve_model("hf://own/pictures", hub=hub).folder
    assert names(found) == sorted(files)
    check_parts(found)
    served.repos.clear()
    assert resolve_model("hf://own/pictures", hub=hub, revision=commit).folder == found, "the cache is complete"


def test_a_sharded_model_is_fetched_by_its_index(served: FakeHub, tmp_path: Path) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": os.urandom(50) for n in (1, 2)}
    index = {"weight_map": {f"t{n}": name for n, name in enumerate(shards)}}
    files = {k: v for k, v in TINY.items() if k != "model.safetensors"} | shards
    served.add("own/big", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    found = resolve_model("hf://own/big", hub=on(served, tmp_path))
    assert {n for n in names(found.folder) if n.endswith(".safetensors")} == set(shards)


def test_without_weights_only_small_files_come_and_the_rest_comes_later(served: FakeHub, tmp_path: Path) -> None:
    commit = served.add("own/tiny", TINY)
    hub = on(served, tmp_path)
    early = resolve_model("hf://own/tiny", hub=hub, weights=False)
    assert names(early.folder) == [name for name in NEEDED if name != "model.safetensors"]
    assert resolve_model("hf://own/tiny", hub=hub, revision=commit).folder == early.folder
    assert names(early.folder) == NEEDED


def test_a_job_s_commit_is_fetched_after_the_branch_has_moved_on(served: FakeHub, tmp_path: Path) -> None:
    old = served.add("own/tiny", TINY)
    new = served.add("own/tiny", TINY | {"model.safetensors": b"newer weights"})
    assert resolve_model("hf://own/tiny", hub=on(served, tmp_path)).revision == new
    pinned = resolve_model("hf://own/tiny", hub=on(served, tmp_path), revision=old)
    assert pinned.revision == old
    assert (pinned.folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_pinned_model_that_is_here_needs_no_hub(served: FakeHub, tmp_path: Path) -> None:
    commit = served.add("own/tiny", TINY)
    hub = on(served, tmp_path)
    first = resolve_model("hf://own/tiny", hub=hub)
    asked = len(served.requests)
    assert resolve_model(f"hf://own/tiny@{commit}", hub=hub) == first
    assert len(served.requests) == asked
    assert resolve_model("hf://own/tiny", hub=on(served, tmp_path, offline=True)) == first


def test_a_transfer_that_breaks_off_is_gone_on_with_where_it_stopped(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/tiny", TINY)
    served.break_after["model.safetensors"] = [100_000, 50_000]
    found = resolve_model("hf://own/tiny", hub=on(served, tmp_path))
    assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert served.ranges == ["model.safetensors bytes=100000-", "model.safetensors bytes=150000-"]


def test_a_transfer_that_always_breaks_off_ends_in_a_sentence_and_leaves_nothing_under_its_name(
    served: FakeHub, tmp_path: Path
) -> None:
    commit = served.add("own/tiny", TINY)
    served.break_after["model.safetensors"] = [0] * 100
    with pytest.raises(HubUnreachable, match="does not answer"):
        resolve_model("hf://own/tiny", hub=on(served, tmp_path))
    folder = tmp_path / "cache" / "models--own--tiny" / "snapshots" / commit
    assert "model.safetensors" not in names(folder)
    served.break_after.clear()
    assert names(resolve_model("hf://own/tiny", hub=on(served, tmp_path)).folder) == NEEDED


def test_progress_counts_what_is_needed_and_ends_with_all_of_it(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/tiny", TINY)
    seen: list[tuple[int, int]] = []
    resolve_model("hf://own/tiny", hub=on(served, tmp_path), progress=lambda d, t: seen.append((d, t)))
    total = sum(len(TINY[name]) for name in NEEDED)
    assert seen[-1] == (total, total)
    assert all(done <= total for done, _ in seen)


def test_asking_a_hub_lists_the_files_without_fetching_weights(served: FakeHub, tmp_path: Path) -> None:
    commit = served.add("own/tiny", TINY)
    answer = ask_hub("hf://own/tiny", hub=on(served, tmp_path))
    assert answer is not None
    assert answer.commit == commit
    assert sorted(file.name for file in answer.files) == NEEDED
    assert answer.total - answer.here == len(WEIGHTS)
    assert not any("safetensors" in request for request in served.requests)
    assert ask_hub(str(tmp_path)) is None


def test_a_gated_model_names_the_token_and_with_it_comes(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("own/tiny", TINY, gated=True)
    served.repos["own/tiny"].token = "hf_secret"
    with pytest.raises(ModelError, match="HF_TOKEN"):
        resolve_model("hf://own/tiny", hub=on(served, tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert names(resolve_model("hf://own/tiny", hub=on(served, tmp_path)).folder) == NEEDED


def test_a_mistyped_model_gets_the_nearest_name(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/tiny", TINY)
    with pytest.raises(ModelError, match=r"no such model.*did you mean 'own/tiny'\?"):
        resolve_model("hf://own/tinny", hub=on(served, tmp_path))


def test_a_mistyped_revision_gets_the_nearest_one(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/tiny", TINY)
    with pytest.raises(ModelError, match=r"no revision 'mian', did you mean 'main'\?"):
        resolve_model("hf://own/tiny@mian", hub=on(served, tmp_path))


def test_no_hub_at_all_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens: a connection is refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HubUnreachable) as caught:
            resolve_model("hf://own/tiny", hub=HuggingFace(endpoint=endpoint, cache=tmp_path))
    assert endpoint in str(caught.value)
    assert "HF_ENDPOINT" in str(caught.value)


@pytest.mark.parametrize(
    "page", ["<html>Sign in</html>", "null", "[]", '{"id": "own/t', '{"siblings": ["config.json"]}']
)
@pytest.mark.parametrize("scheme", ["hf", "ms"])
def test_invalid_hub_answer_is_reported_as_retryable(served: FakeHub, tmp_path: Path, scheme: str, page: str) -> None:
    served.add("own/tiny", TINY, branch="master")
    served.page = page.encode()
    hub = on(served, tmp_path) if scheme == "hf" else ModelScope(endpoint=served.url, cache=tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(f"{scheme}://own/tiny", hub=hub)
    # An object without files is an answer, of a model that has none.
    assert isinstance(caught.value, HubUnreachable) or "lists no config.json" in str(caught.value)
    assert caught.value.fix


def test_weights_of_another_commit_are_not_taken_for_those_of_the_job(served: FakeHub, tmp_path: Path) -> None:
    commit = served.add("own/tiny", TINY)
    served.other_commit = "a" * 40
    with pytest.raises(HubUnreachable, match=f"listed model.safetensors at commit {commit}"):
        resolve_model("hf://own/tiny", hub=on(served, tmp_path))


def test_weights_that_were_never_uploaded_are_missed_before_any_weight_moves(served: FakeHub, tmp_path: Path) -> None:
    index = {"weight_map": {f"t{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
    files = {k: v for k, v in TINY.items() if k != "model.safetensors"} | {
        "model-00001-of-00002.safetensors": b"here",
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    served.add("own/half", files)
    with pytest.raises(ModelError, match=r"does not list \(first model-00002-of-00002.safetensors, 1 in all"):
        resolve_model("hf://own/half", hub=on(served, tmp_path), weights=False)
    assert not any("model-0000" in request for request in served.requests)


def test_offline_says_that_the_environment_forbids_it(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/tiny", TINY)
    with pytest.raises(HubOffline, match="HF_HUB_OFFLINE"):
        resolve_model("hf://own/tiny", hub=on(served, tmp_path, offline=True))
    assert served.requests == []


def test_code_is_refused_before_any_weight_moves_and_fetched_only_if_trusted(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/strange", CODE)
    hub = on(served, tmp_path)
    with pytest.raises(ModelError, match=r"modeling_strange\.py.*trust_remote_code"):
        resolve_model("hf://own/strange", hub=hub)
    assert not any("safetensors" in r or "modeling" in r for r in served.requests)
    trusted = resolve_model("hf://own/strange", hub=hub, trust_remote_code=True)
    assert trusted.remote_code == ("modeling_strange.py",)
    assert (trusted.folder / "modeling_strange.py").is_file()


def test_a_hub_s_model_with_nothing_but_pickles_is_refused_before_anything_moves(
    served: FakeHub, tmp_path: Path
) -> None:
    served.add("own/old", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(ModelError, match="pickle"):
        resolve_model("hf://own/old", hub=on(served, tmp_path))
    assert not any("resolve" in request for request in served.requests)


async def test_a_controller_fetches_in_a_process_of_its_own(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = served.add("own/tiny", TINY)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    told: list[tuple[int, int]] = []
    found = await fetch_model(ModelSpec(path="hf://own/tiny"), commit, lambda d, t: told.append((d, t)))
    assert found.revision == commit
    assert tmp_path in found.folder.parents
    assert names(found.folder) == NEEDED
    assert told[-1][0] == told[-1][1] > len(WEIGHTS)
    with pytest.raises(ModelError, match="no such model"):
        await fetch_model(ModelSpec(path="hf://own/other"), "", lambda d, t: None)


async def test_a_transfer_that_is_cancelled_leaves_no_process(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("own/tiny", TINY)
    served.stall = True
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    task = asyncio.create_task(fetch_model(ModelSpec(path="hf://own/tiny"), "", lambda d, t: None))
    await asyncio.to_thread(served.asked.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(b"gcore.models" in command for command in child_commands())


def test_modelscope_is_fetched_by_the_commit_its_listing_names(served: FakeHub, tmp_path: Path) -> None:
    commit = served.add("own/tiny", TINY, branch="master")
    hub = ModelScope(endpoint=served.url, cache=tmp_path / "ms")
    found = resolve_model("ms://own/tiny", hub=hub)
    assert found.revision == commit
    assert names(found.folder) == NEEDED
    assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS
    asked = len(served.requests)
    assert resolve_model("ms://own/tiny", hub=hub, revision=commit) == found
    assert len(served.requests) == asked


def test_modelscope_says_what_is_wrong_and_what_to_do(served: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"ModelScope has no such model"):
        resolve_model("ms://own/absent", hub=ModelScope(endpoint=served.url, cache=tmp_path))


def test_modelscope_s_token_and_endpoint_come_from_the_environment(served: FakeHub, tmp_path: Path) -> None:
    served.add("own/tiny", TINY, branch="master")
    program = "from gcore.models.resolve import resolve_model; print(resolve_model('ms://own/tiny').folder)"
    environment = {
        **os.environ,
        "MODELSCOPE_ENDPOINT": served.url,
        "MODELSCOPE_CACHE": str(tmp_path),
        "MODELSCOPE_API_TOKEN": "ms-secret",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tmp_path in Path(done.stdout.strip().splitlines()[-1]).parents
    assert "Bearer ms-secret" in served.tokens


def test_modelscope_without_its_client_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ModelError, match=r"gcore\[modelscope\]"):
        resolve_model("ms://own/tiny")
