"""`gcore certs`: a certificate's identity, signing by an authority, folders and file modes, renewal."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from controllers.cli.main import app
from gcore.api.authority import (
    CertificateRequest,
    add_trust,
    inspect_certificate,
    is_signed_by,
    issue_certificate,
    issue_certificate_into,
    make_authority,
    new_authority,
    read_certificate,
    renew_certificate,
)
from gcore.api.tls import CertName, check_user, parse_cert_name
from gcore.errors import UsageError

NOW = datetime(2026, 5, 1, tzinfo=UTC)
NODE = CertName("node", "n1")
names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,10}[A-Za-z0-9])?", fullmatch=True)
spaces = st.frozensets(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True), min_size=1, max_size=3)


@given(names, st.sampled_from(["viewer", "submitter"]), spaces)
def test_certificate_names_round_trip(name: str, role: str, where: frozenset[str]) -> None:
    for whose in (
        check_user(name, role, where, "x"),
        check_user(name, "admin", (), "x"),
        check_user(name, role, ["*"], "x"),
    ):
        assert parse_cert_name([whose.uri]) == whose
        assert parse_cert_name(["DNS:a", whose.uri]) == whose
    node = CertName("node", name.replace("@", "-"))
    assert parse_cert_name([node.uri]) == node


@given(st.text(max_size=40))
def test_any_other_uri_is_nobodys(text: str) -> None:
    for uri in (text, f"gcore://{text}", f"gcore://user/{text}", f"gcore://user/a?{text}"):
        found = parse_cert_name([uri])
        assert found is None or found.uri == uri


@pytest.mark.parametrize(
    "uri",
    [
        "gcore://user/a",
        "gcore://user/a?role=node",
        "gcore://user/a?role=viewer",
        "gcore://user/a?role=admin&role=viewer&namespace=x",
        "gcore://user/a?role=viewer&namespace=*&namespace=x",
        "gcore://user/a?role=admin&namespace=x",
        "gcore://node/a?role=admin",
        "gcore://node/",
        "gcore://node/a/b",
        "gcore://elsewhere/a",
        "spiffe://node/a",
    ],
)
def test_a_name_that_was_never_signed_so_is_nobodys(uri: str) -> None:
    assert parse_cert_name([uri]) is None


def test_a_certificate_with_two_names_is_nobodys() -> None:
    assert parse_cert_name([NODE.uri, CertName("node", "n2").uri]) is None


def test_an_authority_signs_for_nodes_users_and_etcd_what_each_needs() -> None:
    authority = new_authority("ours", days=100, now=NOW)
    node = issue_certificate(authority, "n1", NODE, ["n1.cluster", "10.0.0.1", "::1"], days=10, now=NOW)
    user = issue_certificate(authority, "ada", check_user("ada", "admin", (), "x"), [], days=10, now=NOW)
    etcd = issue_certificate(authority, "etcd", None, ["etcd-1"], days=10, now=NOW)
    told = read_certificate(node.cert)
    assert (told.whose, told.hosts, told.serves, told.calls) == (NODE, ("n1.cluster", "10.0.0.1", "::1"), True, True)
    assert told.ends == NOW + timedelta(days=10)
    assert (
        read_certificate(user.cert).serves,
        read_certificate(user.cert).calls,
        read_certificate(user.cert).hosts,
    ) == (False, True, ())
    assert (read_certificate(etcd.cert).whose, read_certificate(etcd.cert).serves) == (None, True)
    assert read_certificate(authority.cert).is_authority
    assert not told.is_authority
    assert all(is_signed_by(pair.cert, authority.cert) for pair in (node, user, etcd))
    assert not is_signed_by(node.cert, new_authority("ours", days=100, now=NOW).cert)
    assert "PRIVATE" not in repr(node)


def test_an_authority_signs_nothing_that_outlives_it() -> None:
    authority = new_authority("ours", days=5, now=NOW)
    with pytest.raises(UsageError, match="the authority itself expires on 2026-05-06"):
        issue_certificate(authority, "n1", NODE, ["h"], days=10, now=NOW)


def test_a_key_of_another_authority_signs_nothing() -> None:
    one, other = (new_authority("a", days=5, now=NOW) for _ in range(2))
    with pytest.raises(UsageError, match="the authority's key does not match its certificate"):
        issue_certificate(type(one)(one.cert, other.key), "n1", NODE, ["h"], days=1, now=NOW)


@pytest.mark.parametrize("host", ["", "a b", "a/b", "a:1", "x" * 300])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        issue_certificate(new_authority("a", days=5, now=NOW), "n1", NODE, [host], days=1, now=NOW)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    make_authority(tmp_path / "certs", "ours", days=1000, now=NOW)
    return tmp_path / "certs"


def test_keys_are_for_their_owner_alone_and_a_nodes_folder_has_what_a_node_needs(authority: Path) -> None:
    issue_certificate_into(authority / "n1", authority, CertificateRequest("node", "n1", ("h",)), NOW)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (authority / "n1").iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"key.pem", "engines.key"}
    assert set(modes) == {"key.pem", "engines.key", "cert.pem", "ca.pem"}
    assert stat.S_IMODE((authority / "ca-key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((authority / "n1").stat().st_mode) == 0o700
    issue_certificate_into(authority / "ada", authority, CertificateRequest("user", "ada", role="admin"), NOW)
    assert not (authority / "ada" / "engines.key").exists()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (CertificateRequest("node", "n1"), "needs the hosts at which it is reached"),
        (CertificateRequest("node", "a b", ("h",)), "is not a valid name"),
        (CertificateRequest("node", "n1", ("h",), role="admin"), "cannot have a role"),
        (
            CertificateRequest("user", "ada"),
            "a user needs a role. Set one of viewer, submitter, admin",
        ),
        (CertificateRequest("user", "ada", role="boss"), "there is no role 'boss'"),
        (CertificateRequest("user", "ada", role="viewer"), "none is"),
        (CertificateRequest("user", "ada", role="admin", namespaces=("a",)), "an admin has all namespaces"),
        (CertificateRequest("user", "ada", role="viewer", namespaces=("A",)), "is not a valid namespace"),
        (CertificateRequest("user", "ada", ("h",), role="admin"), "cannot contain a host"),
        (CertificateRequest("node", "n1", ("h",), days=0), "0 is not a valid number of days"),
    ],
)
def test_invalid_certificate_requests_are_refused_in_one_sentence(
    authority: Path, wanted: CertificateRequest, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        issue_certificate_into(authority / "x", authority, wanted, NOW)
    assert not (authority / "x").exists()


def test_nothing_is_overwritten(authority: Path) -> None:
    with pytest.raises(UsageError, match="already contains an authority"):
        make_authority(authority, "another", days=10, now=NOW)
    issue_certificate_into(authority / "n1", authority, CertificateRequest("node", "n1", ("h",)), NOW)
    with pytest.raises(UsageError, match="already contains a certificate"):
        issue_certificate_into(authority / "n1", authority, CertificateRequest("node", "n1", ("h",)), NOW)


def test_renewal_keeps_the_names_and_changes_the_key(authority: Path) -> None:
    folder = authority / "n1"
    issue_certificate_into(folder, authority, CertificateRequest("node", "n1", ("h", "10.0.0.1"), days=40), NOW)
    before, key = inspect_certificate(folder), (folder / "key.pem").read_bytes()
    later = NOW + timedelta(days=20)
    assert renew_certificate(folder, authority, within_days=10, days=None, now=later) is None
    made = renew_certificate(folder, authority, within_days=30, days=None, now=later)
    assert made == inspect_certificate(folder)
    assert (made.whose, made.hosts) == (before.whose, before.hosts)
    assert made.ends == later + timedelta(days=40)
    assert (folder / "key.pem").read_bytes() != key


def test_renewing_by_a_new_authority_leaves_both_trusted(authority: Path, tmp_path: Path) -> None:
    folder = authority / "n1"
    issue_certificate_into(folder, authority, CertificateRequest("node", "n1", ("h",)), NOW)
    old = (folder / "ca.pem").read_bytes()
    make_authority(tmp_path / "new", "new", days=1000, now=NOW)
    renew_certificate(folder, tmp_path / "new", within_days=None, days=None, now=NOW)
    trusted = (folder / "ca.pem").read_bytes()
    assert old.strip() in trusted
    assert (tmp_path / "new" / "ca.pem").read_bytes().strip() in trusted
    renew_certificate(folder, tmp_path / "new", within_days=None, days=None, now=NOW)
    assert (folder / "ca.pem").read_bytes() == trusted


def test_an_authority_is_replaced_without_a_moment_in_which_somebody_is_not_trusted(
    authority: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    make_authority(new, "new", days=1000, now=NOW)
    folders = [authority / name for name in ("n1", "n2")]
    for folder in folders:
        issue_certificate_into(folder, authority, CertificateRequest("node", folder.name, ("h",)), NOW)

    def all_trusted() -> bool:
        """Whether each folder trusts every folder's certificate."""
        found = []
        for one in folders:
            parts = (one / "ca.pem").read_bytes().split(b"-----END CERTIFICATE-----\n")
            trusted = [part + b"-----END CERTIFICATE-----\n" for part in parts if part.strip()]
            found += [any(is_signed_by((other / "cert.pem").read_bytes(), ca) for ca in trusted) for other in folders]
        return all(found)

    for folder in folders:
        assert add_trust(folder, new, only=False) == 2
        assert all_trusted()
    for folder in folders:
        with pytest.raises(UsageError, match="would no longer be trusted"):
            add_trust(folder, new, only=True)
        renew_certificate(folder, new, within_days=None, days=None, now=NOW)
        assert all_trusted()
    for folder in folders:
        assert add_trust(folder, new, only=True) == 1
        assert all_trusted()


def test_the_commands_make_show_and_renew(tmp_path: Path) -> None:
    def gcore(*words: str) -> str:
        ended = CliRunner().invoke(app, ["certs", *words], catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
        return ended.output

    ours = ("--authority", str(tmp_path / "ca"))
    gcore("init", *ours)
    gcore("issue", "n1", "--host", "localhost,127.0.0.1", *ours)
    gcore("issue", "bob", "--for", "user", "--role", "submitter", "--namespace", "vision", *ours)
    told = gcore("show", str(tmp_path / "ca" / "bob"))
    assert "a user" in told
    assert "submitter" in told
    assert "vision" in told
    assert '"hosts": [\n' in gcore("show", str(tmp_path / "ca" / "n1"), "-o", "json")
    assert "not due" in gcore("renew", str(tmp_path / "ca" / "n1"), "--within-days", "1", *ours)
    assert "until" in gcore("renew", str(tmp_path / "ca" / "n1"), *ours)
    before = inspect_certificate(tmp_path / "ca" / "n1").sha256
    with pytest.raises(UsageError, match=r"gone/cert.pem: cannot read the file"):
        gcore("renew", str(tmp_path / "gone"), str(tmp_path / "ca" / "n1"), *ours)
    assert inspect_certificate(tmp_path / "ca" / "n1").sha256 != before, (
        "one that cannot be renewed keeps no other from it"
    )
    with pytest.raises(UsageError, match=r"2 of 3 certificates were not renewed: .*gone/cert.pem.*lost/cert.pem"):
        gcore("renew", *(str(tmp_path / name) for name in ("gone", "lost", "ca/n1")), *ours)
    with pytest.raises(UsageError, match="'judge' is not a kind of certificate"):
        gcore("issue", "x", "--for", "judge", *ours)
    (tmp_path / "junk.pem").write_text("junk")
    with pytest.raises(UsageError, match=r"junk.pem: the file is not a certificate"):
        gcore("show", str(tmp_path / "junk.pem"))


@pytest.mark.parametrize("name", ["", "n" * 65])
def test_a_name_that_a_certificate_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"1 to 64 characters, not {len(name)}"):
        new_authority(name, days=1, now=NOW)
    done = CliRunner().invoke(app, ["certs", "init", "--authority", str(tmp_path / "ca"), "--name", name])
    assert isinstance(done.exception, UsageError)
    assert not (tmp_path / "ca").exists()
