"""The daemon's configuration: its fields in YAML and as `gcore up` writes it, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.node import MAX_BYTES, NodeConfig
from gcore.errors import UsageError

LEAST: dict[str, Any] = {
    "node": "gpu-7",
    "home": "/var/lib/gcore",
    "run_root": "/mnt/runs",
    "etcd": {"endpoints": ["127.0.0.1:2379"]},
    "slots": ["cpu:0"],
}


def written(folder: Path, text: str) -> Path:
    file = folder / "node.yaml"
    file.write_text(text)
    return file


def loaded(folder: Path, **more: Any) -> NodeConfig:
    return NodeConfig.load(written(folder, yaml.safe_dump({**LEAST, **more})))


FULL = """
node: gpu-7
home: state                      # beside this file
listen_host: 0.0.0.0
tls: {ca: tls/ca.pem, cert: tls/node.pem, key: tls/key.pem, engines_key: tls/engines.key}
listen_port: 7500
advertise: gpu-7.cluster.example
metrics_host: 127.0.0.1
metrics_port: 9464
etcd:
  endpoints: [https://etcd-0:2379, https://etcd-1:2379]
  tls: {ca: tls/ca.pem, cert: tls/node.pem, key: tls/node-key.pem}
  user: {name: gcore, password_file: /etc/gcore/etcd-password}
slots: [cuda:0, cuda:1, cpu:0-3]
run_root: /mnt/runs
lease_ttl_s: 10
"""


TLS = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", "engines_key": "engines.key"}


@pytest.mark.parametrize("key", ["listen_host", "worker_host", "metrics_host"])
@pytest.mark.parametrize("host", ["10.0.0.7", "gpu-7.cluster", "fe80::1", "0.0.0.0"])
def test_it_does_not_listen_beyond_loopback_where_nobody_is_told_apart(tmp_path: Path, key: str, host: str) -> None:
    more: dict[str, Any] = {key: host, "advertise": "gpu-7"}
    with pytest.raises(UsageError, match=rf"{key} {host} is reachable from other machines") as caught:
        loaded(tmp_path, **more)
    assert "gcore certs issue" in str(caught.value)
    with pytest.raises(UsageError, match="callers are not authenticated"):
        loaded(tmp_path, **more, auth={"admin_token_file": "token"})  # which would go over the network as it is
    with pytest.raises(UsageError, match="its engines require no key"):
        loaded(tmp_path, **more, tls={name: file for name, file in TLS.items() if name != "engines_key"})
    assert loaded(tmp_path, **more, tls=TLS).tells_apart


def test_tokens_need_certificates_by_which_other_nodes_are_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="auth needs tls"):
        loaded(tmp_path, auth={"admin_token_file": "token"})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_on_loopback_nothing_is_needed(tmp_path: Path, host: str) -> None:
    assert not loaded(tmp_path, listen_host=host).tells_apart


def test_a_yaml_file_says_everything_and_what_is_relative_is_beside_it(tmp_path: Path) -> None:
    config = NodeConfig.load(written(tmp_path, FULL))
    assert config.home == str(tmp_path / "state")
    assert config.etcd.endpoints == ("https://etcd-0:2379", "https://etcd-1:2379")
    assert config.etcd.tls is not None
    assert config.etcd.tls.cert == str(tmp_path / "tls" / "node.pem")
    assert config.etcd.user is not None
    assert config.etcd.user.password_file == "/etc/gcore/etcd-password"
    assert config.slots == ("cuda:0", "cuda:1", "cpu:0-3")
    assert (config.listen_host, config.listen_port) == ("0.0.0.0", 7500)
    assert config.advertised(7500) == "gpu-7.cluster.example:7500"
    assert config.workers_listen_on == "gpu-7.cluster.example"
    assert config.metrics_listen_on == "127.0.0.1"
    assert config.tls is not None
    assert config.tls.key == str(tmp_path / "tls" / "key.pem")


def test_json_form_loads_as_the_same_configuration(tmp_path: Path) -> None:
    config = loaded(tmp_path, lease_margin_s=0.00001, host_memory_gib=1e-7)
    file = tmp_path / "node.json"
    file.write_text(config.model_dump_json(indent=2))
    assert NodeConfig.load(file) == config


def test_the_document_of_an_earlier_gcore_up_is_still_read(tmp_path: Path) -> None:
    tree = {key: value for key, value in LEAST.items() if key != "etcd"} | {"etcd_endpoints": ["127.0.0.1:2379"]}
    config = NodeConfig.load(written(tmp_path, json.dumps(tree)))
    assert config.etcd.endpoints == ("127.0.0.1:2379",)
    assert config.etcd.tls is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param({"slot": ["cpu:0"]}, "unknown key 'slot', did you mean 'slots'?", id="unknown key"),
        pytest.param({"etcd": {"endpoints": ["a:1"], "usr": {}}}, "did you mean 'etcd.user'?", id="unknown key within"),
        pytest.param({"etcd": {"endpoints": []}}, "etcd.endpoints: ", id="no endpoint"),
        pytest.param({"etcd": None}, "etcd: it is a section", id="no store"),
        pytest.param(
            {"etcd": {"endpoints": ["a:1"], "tls": {"cert": "c"}}}, "only one of cert and key is set", id="no key"
        ),
        pytest.param({"slots": ["cpu:0-3", "cpu:2-5"]}, "both contain core 2", id="cores in two slots"),
        pytest.param({"slots": ["gpu:0"]}, "'gpu:0' is not a slot", id="no slot"),
        pytest.param({"slots": []}, "slots: ", id="no slots"),
        pytest.param({"node": "a b"}, "node: it should be letters, digits", id="node's name"),
        pytest.param({"listen_port": 70000}, "listen_port: ", id="port"),
        pytest.param({"listen_port": True}, "listen_port: a boolean (true, false, yes", id="a truth as a port"),
        pytest.param({"listen_host": "0.0.0.0"}, "set advertise", id="every address"),
        pytest.param({"advertise": "0.0.0.0"}, "HOST or HOST:PORT", id="advertised everywhere"),
        pytest.param({"advertise": "http://a:1/x"}, "HOST or HOST:PORT", id="a URL"),
        pytest.param({"advertise": "a:99999"}, "HOST or HOST:PORT", id="no port"),
        pytest.param({"lease_ttl_s": float("inf")}, "lease_ttl_s: ", id="no end"),
    ],
)
def test_a_mistake_is_told_with_the_file_and_the_key(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, **more)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'node.yaml'}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("node: [", "node.yaml:1:8: not valid YAML: ", id="cut off"),
        pytest.param("a: &x 1\nb: *x\n", "aliases (*name) are not allowed", id="an alias"),
        pytest.param("a: !!python/object:os.system 1\n", "tags (!name) are not allowed", id="a tag"),
        pytest.param("node: a\nnode: b\n", "key 'node' occurs twice", id="a key twice"),
        pytest.param("[" * 5000, "nested too deep", id="deep"),
        pytest.param("{" * 5000, "nested too deep", id="deep, as JSON"),
        pytest.param("just words", "is not a mapping of keys", id="no mapping"),
        pytest.param("", "is not a mapping of keys", id="empty"),
        pytest.param("#" * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes", id="long"),
        pytest.param('{"node": ', "not valid YAML", id="JSON cut off"),
    ],
)
def test_a_file_that_is_no_document_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        NodeConfig.load(written(tmp_path, text))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the daemon configuration \(No such file"):
        NodeConfig.load(tmp_path / "none.yaml")
    (tmp_path / "node.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        NodeConfig.load(tmp_path / "node.yaml")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_configuration_or_one_sentence(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        NodeConfig.load(file)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("more", "advertised", "workers"),
    [
        pytest.param({}, "127.0.0.1:7", "127.0.0.1", id="where it listens"),
        pytest.param({"advertise": "a"}, "a:7", "127.0.0.1", id="a name"),
        pytest.param({"advertise": "a:9"}, "a:9", "127.0.0.1", id="a name and a port"),
        pytest.param({"listen_host": "::", "advertise": "fe80::1", "tls": TLS}, "[fe80::1]:7", "fe80::1", id="v6"),
        pytest.param({"advertise": "[fe80::1]:9"}, "[fe80::1]:9", "127.0.0.1", id="v6 and a port"),
        pytest.param({"worker_host": "10.0.0.7", "tls": TLS}, "127.0.0.1:7", "10.0.0.7", id="workers elsewhere"),
    ],
)
def test_others_reach_it_where_it_says(tmp_path: Path, more: dict[str, Any], advertised: str, workers: str) -> None:
    config = loaded(tmp_path, **more)
    assert config.advertised(7) == advertised
    assert config.workers_listen_on == workers


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "a\0b"])
@pytest.mark.parametrize("key", ["home", "run_root", "memory_dir"])
def test_a_path_that_is_none_is_told_with_the_file(tmp_path: Path, key: str, path: str) -> None:
    with pytest.raises(UsageError, match="is not a valid path") as caught:
        loaded(tmp_path, **{key: path})
    assert caught.value.where == str(tmp_path / "node.yaml")
