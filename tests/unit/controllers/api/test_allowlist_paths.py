"""The paths that a spec may name: within the roots, and never the daemon's own files; links are resolved first."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from controllers.api.submission.allowlist import EVERYTHING, Allowlist, daemon_paths, spec_paths
from gcore.config import JobSpec, NodeConfig, parse_spec
from gcore.config.node import AllowSection
from gcore.errors import SpecError

BASE: dict[str, Any] = {
    "name": "job",
    "model": {"path": "/models/m"},
    "data": {"path": "/data/d.jsonl"},
    "flow": {"steps": 1},
    "rollout": {"max_new_tokens": 8},
}
JUDGE: dict[str, Any] = {"name": "t", "model": {"path": "/data/judge"}, "template": "x{{ response }}"}


def spec(**sections: Any) -> JobSpec:
    """A spec with further sections."""
    tree = dict(BASE)
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_spec(tree)


def node(folder: Path, **more: Any) -> NodeConfig:
    """A daemon that tells its callers apart, with its files in `folder`."""
    own = folder / "own"
    files = {name: str(own / f"{name}.pem") for name in ("ca", "cert", "key")}
    tree = {
        "node": "n",
        "home": str(folder / "home"),
        "run_root": str(folder / "shared" / "runs"),
        "memory_dir": str(folder / "shared" / "memory"),
        "slots": ["cpu:0"],
        "etcd": {
            "endpoints": ["https://a:1"],
            "tls": {name: str(own / f"etcd-{name}.pem") for name in files},
            "user": {"name": "gcore", "password_file": str(own / "password")},
        },
        "tls": {**files, "engines_key": str(own / "engines.key")},
        "auth": {"admin_token_file": str(own / "admin.token"), "journal": str(own / "calls.jsonl")},
        **more,
    }
    return NodeConfig.model_validate(tree)


def on(config: NodeConfig, *roots: Path | str, **section: Any) -> Allowlist:
    """What may be named there, with these roots."""
    return Allowlist(AllowSection(roots=tuple(map(str, roots)), **section), config)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


def path_fields(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The fields of a spec that say of themselves that they name a file or a folder."""
    for name, field in model.model_fields.items():
        below = list(models_in(field.annotation))
        for one in below:
            yield from path_fields(one, f"{above}{name}.")
        says = field.description or ""
        if not below and "str" in str(field.annotation) and re.search(r"(?i)\b(folder|file)\b", says):
            yield above + name


def test_every_field_that_names_a_file_is_on_the_list_of_paths() -> None:
    one = {"name": "a", "path": "/p", "template": "/p", "tools": "/p"}
    judge = {key: value for key, value in JUDGE.items() if key != "template"} | {"template_file": "/p"}
    whole = spec(
        data={"template": "/p", "tools": "/p"},
        eval={"path": "/p"},
        judges=[judge],
        reward={"judge": "t"},
        storage={"root": "/p"},
        train={"advantage": "gae", "critic": {"path": "/p"}},
    )
    several = spec(data={"path": None, "sources": [one]}, eval={"sources": [one]})
    adapter = {key: value for key, value in JUDGE.items() if key != "model"} | {"adapter": "/p"}
    beside = spec(judges=[adapter], reward={"judge": "t"}, train={"lora": {"publish": "adapter"}})
    listed = {re.sub(r"\.\d+", "", named.where) for part in (whole, several, beside) for named in spec_paths(part)}
    # The file of a judge's key is a secret, of which there is a list of its own.
    assert listed == set(path_fields(JobSpec)) - {"judges.external.key"}


def test_where_callers_are_told_apart_and_no_roots_are_named_no_path_may_be(tmp_path: Path) -> None:
    for section in (AllowSection(), AllowSection(roots=())):
        with pytest.raises(SpecError, match=r"lists no folders that specs may use") as caught:
            Allowlist(section, node(tmp_path)).check(spec())
        assert "allow.roots of the nodes' configuration" in caught.value.fix
    EVERYTHING.check(spec())
    Allowlist.of(NodeConfig(node="n", home="/h", run_root="/r", etcd={"endpoints": ["a:1"]}, slots=["cpu:0"])).check(
        spec()
    )  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="lists no folders"):
        Allowlist.of(node(tmp_path)).check(spec())
    Allowlist.of(node(tmp_path, allow={"roots": ["/models", "/data"]})).check(spec())


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"model": {"path": "/etc/m"}}, "model.path"),
        ({"model": {"path": "/models/../etc"}}, "model.path"),
        ({"model": {"path": "/models/no-such/../../etc"}}, "model.path"),
        ({"model": {"path": "/models2"}}, "model.path"),
        ({"data": {"path": "/data2/d"}}, "data.path"),
        ({"data": {"path": None, "sources": [{"name": "a", "path": "/proc/self/environ"}]}}, "data.sources.0.path"),
        ({"data": {"template": "/etc/passwd"}}, "data.template"),
        ({"data": {"tools": "/etc/passwd"}}, "data.tools"),
        (
            {"data": {"path": None, "sources": [{"name": "a", "path": "/data/d", "template": "/etc/passwd"}]}},
            "data.sources.0.template",
        ),
        ({"eval": {"path": "/etc/passwd"}}, "eval.path"),
        ({"eval": {"sources": [{"name": "a", "path": "/data/d", "tools": "/etc/passwd"}]}}, "eval.sources.0.tools"),
        ({"storage": {"root": "/"}}, "storage.root"),
        ({"train": {"advantage": "gae", "critic": {"path": "/etc"}}}, "train.critic.path"),
        ({"judges": [{**JUDGE, "model": {"path": "/etc"}}], "reward": {"judge": "t"}}, "judges.0.model.path"),
        (
            {"judges": [{**JUDGE, "template": None, "template_file": "/etc/passwd"}], "reward": {"judge": "t"}},
            "judges.0.template_file",
        ),
        ({"tracking": [{"name": "tensorboard", "options": {"folder": "/etc"}}]}, "tracking.0.options.folder"),
        ({"tracking": [{"name": "mlflow", "options": {"uri": "file:///etc/x"}}]}, "tracking.0.options.uri"),
        ({"tracking": [{"name": "mlflow", "options": {"uri": "sqlite:////etc/x"}}]}, "tracking.0.options.uri"),
        ({"tracking": [{"name": "mlflow", "options": {"uri": "/etc/x"}}]}, "tracking.0.options.uri"),
    ],
)
@pytest.mark.parametrize("strangers", [True, False])
def test_a_path_that_leads_out_of_the_roots_is_refused(
    sections: dict[str, Any], where: str, strangers: bool, tmp_path: Path
) -> None:
    section = AllowSection(roots=("/models", "/data"))
    with pytest.raises(SpecError, match="is outside the folders that jobs of this cluster may") as caught:
        Allowlist(section, node(tmp_path) if strangers else None).check(spec(**sections))
    assert caught.value.where == where


@pytest.mark.parametrize("path", ["models/m", "~/m", "~root/m", "./m", "../m", "hf:/m"])
def test_a_path_that_is_not_whole_is_refused_for_nobody_knows_what_it_is_relative_to(path: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not an absolute path"):
        on(node(tmp_path), "/").check(spec(model={"path": path}))


@pytest.mark.parametrize("field", ["path", "template", "tools"])
def test_hub_name_in_a_path_field_counts_as_a_path(field: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not an absolute path"):
        on(node(tmp_path), "/models", "/data").check(spec(data={field: "hf://../../etc/passwd"}))


def test_a_tracker_that_is_a_server_is_no_path(tmp_path: Path) -> None:
    for uri in ("https://mlflow.example", "http://mlflow.example:5000", "databricks", "databricks://profile"):
        tracked = spec(tracking=[{"name": "mlflow", "options": {"uri": uri}}])
        on(node(tmp_path), "/models", "/data").check(tracked)


def test_hubs_are_allowed_or_not(tmp_path: Path) -> None:
    hub = spec(model={"path": "hf://org/model"})
    on(node(tmp_path), "/models", "/data").check(hub)
    with pytest.raises(SpecError, match="does not allow hub models"):
        on(node(tmp_path), "/models", "/data", hubs=False).check(hub)


def test_a_link_that_leads_out_of_the_roots_is_followed_before_it_is_judged(tmp_path: Path) -> None:
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    (tmp_path / "way").symlink_to(tmp_path / "in")
    roots = on(node(tmp_path), tmp_path / "way", "/data")
    roots.check(spec(model={"path": str(tmp_path / "way" / "m")}))
    roots.check(spec(model={"path": str(tmp_path / "in" / "m")}))
    for path in ("link/m", "link", "link/../out"):
        with pytest.raises(SpecError, match="is outside the folders"):
            roots.check(spec(model={"path": f"{tmp_path}/in/{path}"}))


@pytest.mark.parametrize("deep", ["", "additional_chat_templates"])
def test_a_link_within_a_folder_that_is_read_is_judged_too(deep: str, tmp_path: Path) -> None:
    model = tmp_path / "models" / "m"
    (model / deep).mkdir(parents=True)
    (tmp_path / "out").write_text("x")
    (tmp_path / "models" / "blob").write_text("x")
    roots = on(node(tmp_path), tmp_path / "models", "/data")
    (model / deep / "config.json").symlink_to("../" * (2 if deep else 1) + "blob")
    (model / "circle").symlink_to("circle")
    roots.check(spec(model={"path": str(model)}))  # as a hub's cache has them
    (model / deep / "chat_template.jinja").symlink_to(tmp_path / "out")
    with pytest.raises(SpecError, match=r"through the link 'chat_template.jinja', outside the folders") as caught:
        roots.check(spec(model={"path": str(model)}))
    assert caught.value.where == "model.path"


def test_a_link_to_a_folder_of_links_is_followed_to_its_end(tmp_path: Path) -> None:
    config = node(tmp_path)
    model = tmp_path / "models" / "m"
    model.mkdir(parents=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "admin.token").write_text("x")
    other = tmp_path / "models" / "other"
    other.symlink_to(tmp_path / "own" / "admin.token")
    (model / "chat_template.jinja").symlink_to(other)
    with pytest.raises(SpecError, match=r"through the link 'chat_template.jinja', to the daemon's own files"):
        on(config, "/").check(spec(model={"path": str(model)}, data={"path": str(model)}))


def test_a_folder_of_very_many_files_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.api.submission.allowlist.MOST_ENTRIES", 3)
    (folder := tmp_path / "m").mkdir()
    for number in range(4):
        (folder / f"{number}").touch()
    with pytest.raises(SpecError, match="more than 3 files"):
        on(node(tmp_path), tmp_path, "/data").check(spec(model={"path": str(folder)}))
    on(node(tmp_path), tmp_path, "/data", "/models").check(spec(storage={"root": str(folder)}))


def test_paths_in_guarded_sections_count_as_the_daemons_own(tmp_path: Path) -> None:
    config = node(tmp_path)
    tree = config.model_dump(include={"tls": True, "auth": True, "etcd": {"tls", "user"}})

    def strings(value: Any) -> Iterator[str]:
        for one in value.values() if isinstance(value, dict) else [value]:
            yield from strings(one) if isinstance(one, dict) else [one] if isinstance(one, str) else []

    named = {text for text in strings(tree) if text.startswith("/")}
    assert len(named) == 10
    assert named <= set(daemon_paths(config))
    for path in (*named, config.home, f"{config.home}/logs/calls.jsonl"):
        with pytest.raises(SpecError, match="to the daemon's own files") as caught:
            on(config, "/").check(spec(data={"template": path}))
        assert caught.value.where == "data.template"


def test_a_link_to_the_admins_token_is_the_token(tmp_path: Path) -> None:
    config = node(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "admin.token").write_text("x")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "t.jinja").symlink_to(tmp_path / "own" / "admin.token")
    (tmp_path / "data" / "way").symlink_to(tmp_path / "own")
    for path in ("t.jinja", "way/admin.token", "way/../own/admin.token"):
        with pytest.raises(SpecError, match="to the daemon's own files"):
            on(config, tmp_path, "/models", "/data").check(spec(data={"template": f"{tmp_path}/data/{path}"}))


def test_a_file_that_specs_may_name_as_a_secret_may_not_be_named_as_anything_else(tmp_path: Path) -> None:
    config = node(tmp_path)
    (tmp_path / "keys").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "keys")
    allowed = on(config, "/", secrets=[f"file:{tmp_path}/way/*", "env:JUDGE_KEY"])
    for folder in ("keys", "way"):
        with pytest.raises(SpecError, match="to the daemon's own files"):
            allowed.check(spec(data={"template": str(tmp_path / folder / "judge")}))
    allowed.check(spec(data={"template": str(tmp_path / "other" / "judge")}))


def test_runs_of_jobs_are_nobodys_to_name_and_what_they_hold_is_exported(tmp_path: Path) -> None:
    config = node(tmp_path)
    runs = tmp_path / "shared" / "runs"
    for path in (
        f"{runs}/job-0/samples/1.jsonl",
        str(runs),
        f"{tmp_path}/shared",
        f"{tmp_path}/shared/memory/gcore-{os.getuid()}/x",
    ):
        with pytest.raises(SpecError, match="into the folder of job runs") as caught:
            on(config, "/").check(spec(data={"template": path}))
        assert "gcore export" in caught.value.fix
    with pytest.raises(SpecError, match="into the folder of job runs") as caught:
        on(config, "/").check(spec(storage={"root": str(runs)}))
    assert "run_root" in caught.value.fix
    on(config, "/").check(spec(storage={"root": str(tmp_path / "shared")}))  # beside them there is room for others


def test_a_run_in_a_folder_of_its_own_jobs_choice_is_known_by_what_lies_in_it(tmp_path: Path) -> None:
    run = tmp_path / "vision" / "job-0123456789ab"
    (run / ".nodes").mkdir(parents=True)
    (run / "samples").mkdir()
    roots = on(node(tmp_path / "n"), tmp_path, "/models", "/data")
    for path in (run, run / "samples" / "1.jsonl"):
        with pytest.raises(SpecError, match="into the folder of job runs"):
            roots.check(spec(data={"template": str(path)}))
    roots.check(spec(data={"template": str(tmp_path / "vision" / "t.jinja")}))
    (tmp_path / "vision" / "data-0123456789ab").mkdir()
    roots.check(spec(data={"path": str(tmp_path / "vision" / "data-0123456789ab")}))


def test_the_daemon_of_one_person_may_read_whatever_that_person_may(tmp_path: Path) -> None:
    config = node(tmp_path, tls=None, auth=None)
    Allowlist.of(config).check(
        spec(data={"template": str(Path(config.run_root) / "job-0" / "t.jinja"), "path": "d.jsonl"})
    )
