"""`gcore doctor` as a user runs it: in a healthy environment, and in one with several faults."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from controllers.cli.commands.doctor import inspect_cluster
from controllers.cli.view.doctor_checks import CheckState
from gcore.config.local_cluster import ControllerProcess, EtcdProcess, LocalClusterState
from gcore.system.clock import SystemClock


def doctor(*words: str, cwd: Path, few_files: bool = False, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the checks by name."""

    def limit() -> None:
        if few_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))

    done = subprocess.run(
        [sys.executable, "-m", "controllers.cli.main", "doctor", "-o", "json", *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {check["check"]: check for check in json.loads(done.stdout)["checks"]}


def broken_torch(folder: Path) -> str:
    """A folder for PYTHONPATH with a torch that cannot be imported."""
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('libc10.so is not there')")
    return str(folder)


def test_nothing_fails_where_the_tests_run_and_hubs_that_are_away_are_but_warned_of(tmp_path: Path) -> None:
    away = "http://127.0.0.1:9"
    code, checks = doctor("--online", cwd=tmp_path, HF_ENDPOINT=away, MODELSCOPE_ENDPOINT=away)
    assert [check for check in checks.values() if check["state"] == "fail"] == []
    assert code == 0
    assert checks["FSDP2"]["seen"] == "an update on gloo succeeded"
    assert checks["DeepSpeed"]["seen"].endswith("an update on gloo succeeded")
    assert checks["etcd starts"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert checks["Hugging Face hub"]["state"] == checks["ModelScope"]["state"] == "warn"
    assert away in checks["Hugging Face hub"]["seen"]


def test_a_broken_environment_fails_by_name_each_with_what_to_do(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "etcd").write_text("#!/bin/sh\necho I am something else\n")
    (programs / "etcd").chmod(stat.S_IRWXU)
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    code, checks = doctor(
        *("--home", str(home), "--slots", "cuda:3", "--sglang-python", str(tmp_path / "absent")),
        cwd=tmp_path,
        few_files=True,
        PYTHONPATH=broken_torch(tmp_path / "packages"),
        PATH=f"{programs}:{os.environ['PATH']}",
        OMP_WAIT_POLICY="ACTIVE",
    )
    assert code == 1
    failed = {name for name, check in checks.items() if check["state"] == "fail"}
    assert failed >= {"torch", "FSDP2", "etcd starts", "home", "open files", "SGLang"}
    assert "libc10.so is not there" in checks["torch"]["seen"]
    assert "is not etcd" in checks["etcd starts"]["seen"]
    assert checks["threads"]["state"] == "warn"
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")


def test_a_cluster_whose_processes_are_gone_is_told_part_by_part(tmp_path: Path) -> None:
    controller = ControllerProcess(
        name="node-0",
        address="127.0.0.1:9",
        metrics_address="127.0.0.1:9",
        slots=("cpu:0",),
        config_file="x",
        pid=1,
        started=1,
    )
    etcd = EtcdProcess(
        endpoint="127.0.0.1:9", data_dir="x", client_port=9, peer_port=9, binary="etcd", pid=1, started=1
    )
    document = LocalClusterState(home=str(tmp_path), etcd=etcd, controllers=(controller,))
    (tmp_path / "cluster.json").write_text(document.model_dump_json())
    # Without torch doctor does not test the train backends, which takes longer than everything else.
    code, checks = doctor("--home", str(tmp_path), cwd=tmp_path, PYTHONPATH=broken_torch(tmp_path / "packages"))
    assert code == 1
    assert checks["node-0"]["state"] == checks["cluster's etcd"]["state"] == "fail"


async def test_a_cluster_s_document_that_is_damaged_is_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    checks = await inspect_cluster(tmp_path, SystemClock())
    assert (checks[0].name, checks[0].state) == ("cluster", CheckState.FAIL)
    assert "gcore down" in checks[0].fix
