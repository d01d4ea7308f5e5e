"""The settings of `deploy/systemd` that the daemon relies on. `make test-deploy` also checks them with systemd-analyze."""

from __future__ import annotations

import configparser
from pathlib import Path

import yaml
from deployed import specs_may_name

from controllers.daemon.daemon import LEAVE_WITHIN_S
from gcore.config import NodeConfig
from gcore.errors import CannotListen, UsageError
from gcore.worker.control_groups import DELEGATED

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"


def unit(name: str) -> configparser.SectionProxy:
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string((FOLDER / name).read_text())
    return found["Service"]


def test_the_unit_waits_for_readiness_has_a_watchdog_reloads_and_restarts_except_after_exit_code_2() -> None:
    service = unit("gcore.service")
    assert service["Type"] == "notify"
    assert service["TimeoutStartSec"] == "infinity"
    assert service["WatchdogSec"] == "30s"
    assert "-HUP" in service["ExecReload"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("always", str(UsageError.exit_code))
    assert CannotListen.exit_code != UsageError.exit_code, (
        "an address that is not up yet at boot must lead to a restart"
    )


def test_workers_survive_their_daemon_and_it_has_time_to_hand_over() -> None:
    service = unit("gcore.service")
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert int(service["TimeoutStopSec"].removesuffix("s")) > LEAVE_WITHIN_S
    assert "PrivateTmp" not in service, "the next daemon must see the files of the adopted workers"


def test_cgroups_of_jobs_are_delegated() -> None:
    service = unit("gcore.service.d/limits.conf")
    assert service["DelegateSubgroup"] == DELEGATED
    assert set(service["Delegate"].split()) == {"cpu", "memory", "pids"}


def test_the_example_configuration_is_valid() -> None:
    config = NodeConfig.load(FOLDER / "node.yaml")
    assert config.advertised(7500) == "node.example:7500"
    assert unit("gcore.service")["ExecStart"].endswith("--config /etc/gcore/node.yaml")
    specs_may_name(config, "/SHARED/models", "/SHARED/data")
    assert config.home == f"/var/lib/{unit('gcore.service')['StateDirectory']}"


def test_three_etcd_members_are_started_with_peers_that_show_certificates() -> None:
    service = unit("etcd.service")
    assert (service["Type"], service["Restart"]) == ("notify", "always")
    config = yaml.safe_load((FOLDER / "etcd.yaml").read_text())
    members = dict(member.split("=") for member in config["initial-cluster"].split(","))
    assert len(members) == 3
    assert members[config["name"]] == config["initial-advertise-peer-urls"]
    assert config["client-transport-security"]["client-cert-auth"]
    assert config["peer-transport-security"]["client-cert-auth"]
    assert config["data-dir"].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert (config["auto-compaction-mode"], config["quota-backend-bytes"]) == ("periodic", 8 << 30)


def test_certificates_are_renewed_every_day_and_the_daemon_reads_them() -> None:
    service = unit("gcore-certs-renew.service")
    words = service["ExecStart"].split()
    assert words[1:3] == ["certs", "renew"]
    assert "reload" in service["ExecStartPost"]
    timer = configparser.ConfigParser(interpolation=None, strict=True)
    timer.read_string((FOLDER / "gcore-certs-renew.timer").read_text())
    assert timer["Timer"]["OnCalendar"] == "daily"
    assert timer["Timer"]["Persistent"] == "true"
