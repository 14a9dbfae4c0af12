"""The keys of a deployment."""

import ssl
import stat
from pathlib import Path

import pytest

from conftest import Command, contents

pytest.importorskip("cryptography")

from fedseal.deploy import keys
from fedseal.errors import UserError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_creates_all_files_and_keeps_secrets(tmp_path: Path, fedseal: Command) -> None:
    folder = tmp_path / "keys"
    answer = fedseal(
        "keys", "init", folder, "--host", "server.example", "--host", "10.0.0.1", "--client", "a"
    )
    assert answer.code == 0 and "give this file to client a only" in answer.out
    assert "clients reach the server as server.example, 10.0.0.1 or localhost" in answer.out
    assert [mode(folder / name) for name in ("ca.key", "server.key", "clients/a.key")] == [0o600] * 3
    assert set(keys.certified_hosts(folder)) == {
        "server.example",
        "10.0.0.1",
        "localhost",
        "127.0.0.1",
        "::1",
    }
    key = keys.read_client_key(folder / "clients" / "a.key")
    assert (
        keys.read_registered(folder) == {"a": key.public}
        and key.ca_certificate == (folder / "ca.crt").read_bytes()
    )


def test_init_without_a_host_says_that_other_machines_are_excluded(tmp_path: Path, fedseal: Command) -> None:
    answer = fedseal("keys", "init", tmp_path / "keys")
    assert answer.code == 0 and "localhost only" in answer.out and "--host" in answer.out


def test_the_certificate_passes_a_strict_check(tmp_path: Path) -> None:
    keys.create_keys(tmp_path, ["10.0.0.1"], [])
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    assert handshake(client, server, "10.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server, "10.0.0.2")


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    """A TLS handshake in memory."""
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    left = [client.wrap_bio(a, b, server_hostname=host), server.wrap_bio(b, a, server_side=True)]
    for _ in range(20):
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                pass
        if not left:
            return True
    return False


def test_nothing_is_ever_overwritten(tmp_path: Path, fedseal: Command) -> None:
    keys.create_keys(tmp_path, [], ["a"])
    before = contents(tmp_path)
    fedseal("keys", "init", tmp_path).refuses("already holds keys")
    for names, reason in (
        (("a",), "already has a client 'a'"),
        (("b", "c d"), "'c d' is not a valid client name"),
    ):
        fedseal("keys", "add-client", tmp_path, *names).refuses(reason)
    fedseal("keys", "add-client", tmp_path, "b", "b").refuses("Two clients are named 'b'")
    assert contents(tmp_path) == before


def test_clients_can_be_added_later_and_are_sorted(tmp_path: Path, fedseal: Command) -> None:
    keys.create_keys(tmp_path, [], ["m"])
    assert fedseal("keys", "add-client", tmp_path, "z", "b").code == 0
    assert list(keys.read_registered(tmp_path)) == ["b", "m", "z"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".a", "a b", "x" * 65])
def test_invalid_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a valid client name"):
        keys.create_keys(tmp_path / "keys", [], [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("host", ["", "a b", "http://x", "-x", "a:8000"])
def test_invalid_hosts_are_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--host takes"):
        keys.create_keys(tmp_path / "keys", [host], [])


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no client keys"):
        keys.read_registered(tmp_path)
    keys.create_keys(tmp_path, [], ["a"])
    keys.create_keys(tmp_path / "other", [], ["a"])
    assert "localhost" in keys.certified_hosts(tmp_path)
    for name in ("ca.crt", "server.key"):
        right = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
        with pytest.raises(UserError, match="do not belong together"):
            keys.certified_hosts(tmp_path)
        (tmp_path / name).write_bytes(right)
    (tmp_path / "clients" / "b.pub").write_text("nonsense")
    with pytest.raises(UserError, match=r"b\.pub is not a client's public key"):
        keys.read_registered(tmp_path)
    with pytest.raises(UserError, match=r"b\.pub is not a client's key"):
        keys.read_client_key(tmp_path / "clients" / "b.pub")
    with pytest.raises(UserError, match=r"Cannot read .*missing"):
        keys.read_client_key(tmp_path / "missing")
