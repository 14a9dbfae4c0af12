"""The keys of a deployment."""

import os
import pty
import re
import shutil
import ssl
import stat
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from conftest import Command, contents

pytest.importorskip("flwr")

from deployment import create_keys_at

from fedseal.deploy import certificates, expiry, keys
from fedseal.deploy.certificates import revocation_address
from fedseal.deploy.connection import trust
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
    assert mode(folder) == mode(folder / "clients") == 0o700
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
    with pytest.raises(UserError, match=r"There are no keys in .*: create them with 'fedseal keys init"):
        keys.read_registered(tmp_path)
    (tmp_path / "ca.crt").touch()
    with pytest.raises(UserError, match="has no client keys"):
        keys.read_registered(tmp_path)
    (tmp_path / "ca.crt").unlink()
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
    (tmp_path / "clients" / "b.pub").chmod(0o600)
    with pytest.raises(UserError, match=r"b\.pub is not a client's public key"):
        keys.read_registered(tmp_path)
    with pytest.raises(UserError, match=r"b\.pub is not a client's key"):
        keys.read_client_key(tmp_path / "clients" / "b.pub")
    with pytest.raises(UserError, match=r"Cannot read .*missing"):
        keys.read_client_key(tmp_path / "missing")


# ---- private files and passphrases ----------------------------------------------------------------------


@pytest.mark.parametrize("rights", [0o640, 0o604, 0o620])
def test_private_keys_that_others_can_read_are_refused(rights: int, tmp_path: Path, fedseal: Command) -> None:
    keys.create_keys(tmp_path / "keys", [], ["a"])
    (tmp_path / "labels").mkdir()
    for name in ("ca.key", "server.key", "clients/a.key"):
        file = tmp_path / "keys" / name
        file.chmod(rights)
        fedseal("serve", "folders", "--labels", tmp_path / "labels", "--keys", tmp_path / "keys").refuses(
            f"run 'chmod 600 {file}'"
        )
        file.chmod(0o600)
    file.chmod(rights)
    answer = fedseal("join", "127.0.0.1:9", "--images", tmp_path, "--key", file)
    answer.refuses(f"Other users may read or change {file}", f"run 'chmod 600 {file}'")


def test_an_encrypted_key_needs_its_passphrase(
    tmp_path: Path, fedseal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    join = ("join", "127.0.0.1:9", "--images", tmp_path)
    init = ("keys", "init", tmp_path / "keys", "--client", "a", "--passphrase-file", secret)
    secret.chmod(0o644)
    fedseal(*init).refuses(f"chmod 600 {secret}")
    secret.chmod(0o600)
    assert fedseal(*init).code == 0
    file = tmp_path / "keys" / "clients" / "a.key"
    assert file.read_bytes().startswith(keys.PEM_ENCRYPTED)
    key = keys.read_client_key(file, lambda: b"correct horse")
    assert keys.read_registered(tmp_path / "keys") == {"a": key.public}
    fedseal(*join, "--key", file).refuses("give --passphrase-file, or set FEDSEAL_PASSPHRASE")
    fedseal(*join, "--key", file, "--passphrase-file", secret).refuses("has no images")  # it was opened
    monkeypatch.setenv("FEDSEAL_PASSPHRASE", "wrong")
    fedseal(*join, "--key", file).refuses(f"The passphrase does not open {file}")
    monkeypatch.setenv("FEDSEAL_PASSPHRASE", "correct horse")
    fedseal(*join, "--key", file).refuses("has no images")
    assert fedseal("keys", "add-client", tmp_path / "keys", "b", "--encrypt").code == 0
    assert keys.read_client_key(tmp_path / "keys" / "clients" / "b.key", lambda: b"correct horse")


def test_a_passphrase_is_asked_for_on_a_terminal(tmp_path: Path) -> None:
    [file] = keys.create_keys(tmp_path / "keys", [], ["a"], passphrase=b"correct horse")
    us, terminal = pty.openpty()
    command = [sys.executable, "-m", "fedseal", "join", "127.0.0.1:9", "--images", tmp_path, "--key", file]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        asked = b""
        while b"a.key: " not in asked:
            asked += os.read(us, 1000)
        os.write(us, b"correct horse\n")
        answer = b""
        while b"has no images" not in answer:
            answer += os.read(us, 1000)
        assert process.wait() == 2 and b"correct horse" not in answer
    os.close(us)


@pytest.mark.parametrize("pipe", ["-", "/dev/fd/{}"])
def test_a_key_may_come_from_a_pipe(pipe: str, tmp_path: Path) -> None:
    """It then has no permissions that could be checked."""
    [file] = keys.create_keys(tmp_path / "keys", [], ["a"])
    reader, writer = os.pipe()
    os.write(writer, file.read_bytes())
    os.close(writer)
    words = ["join", "127.0.0.1:9", "--images", str(tmp_path), "--key", pipe.format(reader)]
    answer = subprocess.run(
        [sys.executable, "-m", "fedseal", *words],
        **{"stdin": reader, "pass_fds": [reader], "capture_output": True, "text": True},
    )
    os.close(reader)
    assert answer.returncode == 2 and "has no images" in answer.stderr


# ---- expiry, renewal and revocation ---------------------------------------------------------------------


def left(folder: Path) -> int:
    """Days until the first certificate expires."""
    return round((expiry.expiry(folder) - datetime.now(UTC)) / timedelta(days=1))


def test_certificates_are_valid_for_a_year_or_as_long_as_you_say(tmp_path: Path, fedseal: Command) -> None:
    assert fedseal("keys", "init", tmp_path / "a").code == 0 and left(tmp_path / "a") == 365
    assert fedseal("keys", "init", tmp_path / "b", "--days", 3650).code == 0 and left(tmp_path / "b") == 3650
    assert fedseal("keys", "init", tmp_path / "c", "--days", 3651).code == 2 and not (tmp_path / "c").exists()


def test_serve_join_and_doctor_warn_before_the_end(
    tmp_path: Path, fedseal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keys"
    file = create_keys_at(timedelta(days=-334), folder, monkeypatch)  # 31 days are left
    join = ("join", "127.0.0.1:9", "--images", tmp_path, "--key", file)
    assert expiry.warn_of_expiry(folder) == "" and "expires" not in fedseal(*join).err
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    file = create_keys_at(timedelta(days=-336), folder, monkeypatch)  # 29 days
    warning = expiry.warn_of_expiry(folder)
    assert warning.startswith(f"the certificate {folder / 'ca.crt'} expires on") and "--ca" in warning
    assert f"the certificate in {file} expires on" in fedseal(*join).err
    assert f"expires on {expiry.expiry(folder):%Y-%m-%d}" in fedseal("doctor", "--keys", folder).out


def trusts(client: ssl.SSLContext, folder: Path) -> bool:
    """Whether a client accepts the server of a folder of keys."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    try:
        return handshake(client, server, "10.0.0.1")
    except ssl.SSLCertVerificationError:
        return False


def test_a_renewed_server_certificate_needs_nothing_new_at_clients(tmp_path: Path, fedseal: Command) -> None:
    [file] = keys.create_keys(tmp_path, ["10.0.0.1"], ["a"], days=400)
    key, before = keys.read_client_key(file), contents(tmp_path)
    assert "valid until" in fedseal("keys", "renew", tmp_path).out
    changed = {name for name, content in contents(tmp_path).items() if content != before[name]}
    assert changed == {"server.crt", "server.key"} and mode(tmp_path / "server.key") == 0o600
    assert trusts(trust(key), tmp_path) and "10.0.0.1" in keys.certified_hosts(tmp_path)
    assert left(tmp_path) == 365
    fedseal("keys", "renew", tmp_path, "--days", 3650)
    assert left(tmp_path) == 400  # the certificate of the CA ends then
    (tmp_path / "server.key").write_bytes(before["server.key"][0])  # as if the command had been killed
    fedseal("keys", "renew", tmp_path)
    assert trusts(trust(key), tmp_path)


def test_a_renewed_ca_is_in_the_clients_new_files(tmp_path: Path, fedseal: Command) -> None:
    files = keys.create_keys(tmp_path, ["10.0.0.1"], ["a", "b"], days=20)
    old = keys.read_client_key(files[0])
    assert fedseal("keys", "renew", tmp_path, "--ca").code == 0
    new = keys.read_client_key(files[0])
    assert new.public == old.public and new.ca_certificate == (tmp_path / "ca.crt").read_bytes()
    assert new.ca_certificate != old.ca_certificate and expiry.warn_of_expiry(tmp_path) == ""
    assert trusts(trust(new), tmp_path) and trusts(trust(old), tmp_path)


def test_a_client_with_the_list_refuses_a_server_with_a_stolen_key(tmp_path: Path, fedseal: Command) -> None:
    folder, crl = tmp_path / "keys", tmp_path / "keys" / "ca.crl"
    address = "http://example.org/ca.crl"
    assert fedseal("keys", "init", folder, "--host", "10.0.0.1", "--client", "a", "--crl", address).code == 0
    shutil.copytree(folder, tmp_path / "stolen")
    key = keys.read_client_key(folder / "clients" / "a.key", crl=crl)
    assert keys.read_revocations(crl) == [] and trusts(trust(key), tmp_path / "stolen")

    stolen = certificates.read_certificate(folder / "server.crt").serial_number
    for _ in range(2):
        answer = fedseal("keys", "renew", folder, "--revoke")
        assert answer.code == 0 and f"{crl}: give this file to every client" in answer.out
    assert keys.read_revocations(crl)[0] == stolen and len(keys.read_revocations(crl)) == 2
    assert not trusts(trust(key), tmp_path / "stolen") and trusts(trust(key), folder)
    assert trusts(trust(replace(key, crl=None)), tmp_path / "stolen")  # why clients need the list
    assert revocation_address(certificates.read_certificate(folder / "server.crt")) == address

    keys.renew_ca(folder)
    key = keys.read_client_key(folder / "clients" / "a.key", crl=crl)
    assert not trusts(trust(key), tmp_path / "stolen") and trusts(trust(key), folder)


def test_a_bad_list_is_refused(tmp_path: Path, fedseal: Command) -> None:
    [file] = keys.create_keys(tmp_path, [], ["a"])
    join = ("join", "127.0.0.1:9", "--images", tmp_path, "--crl")
    fedseal(*join, tmp_path / "ca.crt", "--key", file).refuses("ca.crt is not a list of revoked certificates")
    fedseal(*join, tmp_path / "none", "--key", file).refuses("Cannot read", "none")
    fedseal(*join, tmp_path / "ca.crl", "--insecure", "--name", "a").refuses("--crl needs TLS")
    fedseal("keys", "init", tmp_path / "b", "--crl", "ca.crl").refuses("--crl takes an address")
    assert not (tmp_path / "b").exists()


def test_renewal_needs_the_key_of_the_ca(tmp_path: Path, fedseal: Command) -> None:
    keys.create_keys(tmp_path / "keys", [], ["a"])
    keys.create_keys(tmp_path / "other", [], [])
    (tmp_path / "keys" / "ca.key").unlink()
    before = contents(tmp_path)
    fedseal("keys", "renew", tmp_path / "keys").refuses("ca.key, which signs certificates: copy it back")
    fedseal("keys", "renew", tmp_path / "keys", "--ca", "--client", "a").refuses(
        "either --ca, --revoke or --client"
    )
    assert contents(tmp_path) == before
    (tmp_path / "other" / "ca.key").rename(tmp_path / "keys" / "ca.key")
    fedseal("keys", "renew", tmp_path / "keys").refuses("ca.crt and ca.key", "do not belong together")


def test_an_expired_ca_is_renewed_first(
    tmp_path: Path, fedseal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_keys_at(timedelta(days=-400), tmp_path / "keys", monkeypatch)
    for words in ((), ("--revoke",)):
        answer = fedseal("keys", "renew", tmp_path / "keys", *words)
        answer.refuses("ca.crt expired on", f"'fedseal keys renew {tmp_path / 'keys'} --ca'")
    assert fedseal("keys", "renew", tmp_path / "keys", "--ca").code == 0
    assert fedseal("keys", "renew", tmp_path / "keys").code == 0


def test_a_passphrase_is_for_a_client(tmp_path: Path, fedseal: Command) -> None:
    keys.create_keys(tmp_path, [], ["a"])
    fedseal("keys", "renew", tmp_path, "--ca", "--encrypt").refuses("give its --client NAME")


def test_a_clients_key_is_renewed_and_revoked(tmp_path: Path, fedseal: Command) -> None:
    files = keys.create_keys(tmp_path, [], ["a", "b"])
    old = keys.read_client_key(files[0])
    assert (
        f"{files[0]}: give this file to client a only"
        in fedseal("keys", "renew", tmp_path, "--client", "a").out
    )
    new = keys.read_client_key(files[0])
    assert keys.read_registered(tmp_path)["a"] == new.public != old.public
    assert fedseal("keys", "revoke", tmp_path, "a").code == 0
    assert list(keys.read_registered(tmp_path)) == ["b"] and not files[0].exists()
    assert (tmp_path / "revoked" / "a.pub").exists()
    for command in ("revoke", "renew"):
        words = ("--client", "a") if command == "renew" else ("a",)
        fedseal("keys", command, tmp_path, *words).refuses("has no client 'a': its clients are b")
    assert fedseal("keys", "add-client", tmp_path, "a").code == 0  # another machine of that name


def ends(folder: Path) -> dict[str, int | None]:
    """Days until the clients' keys expire; both files of a client have the same date."""
    dates = expiry.client_expiries(folder)
    for name, last in dates.items():
        assert keys.read_client_key(folder / "clients" / f"{name}.key", lambda: b"x").key_expiry == last
    now = datetime.now(UTC)
    return {name: last and round((last - now) / timedelta(days=1)) for name, last in dates.items()}


def test_clients_keys_expire_after_a_year_or_when_you_say(
    tmp_path: Path, fedseal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSEAL_PASSPHRASE", "x")
    assert fedseal("keys", "init", tmp_path, "--client", "a", "--days", 500).code == 0
    assert fedseal("keys", "add-client", tmp_path, "b").code == 0
    assert fedseal("keys", "add-client", tmp_path, "c", "--days", 20, "--encrypt").code == 0
    assert ends(tmp_path) == {"a": 500, "b": 365, "c": 20}
    assert fedseal("keys", "renew", tmp_path, "--client", "c", "--days", 90, "--encrypt").code == 0
    assert fedseal("keys", "renew", tmp_path, "--client", "a").code == 0
    assert ends(tmp_path) == {"a": 365, "b": 365, "c": 90}
    assert fedseal("keys", "renew", tmp_path, "--ca").code == 0  # keeps the clients' keys
    assert ends(tmp_path) == {"a": 365, "b": 365, "c": 90}
    text = (tmp_path / "clients" / "b.pub").read_text()
    assert text.startswith("ecdsa-sha2-nistp384 ") and text.splitlines()[1].startswith("expires: 20")


def forget_expiry(*files: Path) -> None:
    """Makes files as earlier versions wrote them."""
    for file in files:
        file.write_text(re.sub("expires: .*\n", "", file.read_text()))


def test_keys_that_expire_soon_or_never_are_named(tmp_path: Path, fedseal: Command) -> None:
    folder, join = tmp_path / "keys", ("join", "127.0.0.1:9", "--images", tmp_path, "--key")
    files = keys.create_keys(folder, [], ["valid"], days=31)
    for name, days in (("gone", 0), ("soon", 29), ("old", 1), ("older", 1)):
        files += keys.add_clients(folder, [name], days=days)
        if days == 1:
            forget_expiry(files[-1], files[-1].with_suffix(".pub"))
    today, later = datetime.now(UTC), datetime.now(UTC) + timedelta(days=29)
    gone = f"gone cannot take part, because its key expired on {today:%Y-%m-%d}: "
    gone += f"run 'fedseal keys renew {folder} --client gone', and give it its new file"
    soon = f"the key of soon expires on {later:%Y-%m-%d}: run 'fedseal keys renew {folder} --client soon'"
    assert expiry.explain_expired(folder, expiry.client_expiries(folder)) == {"gone": gone}
    first, second = expiry.warn_of_clients(folder)
    assert first.startswith(soon)
    assert second.startswith("keys of an earlier version, which never expire: old, older; renew each with")
    answer = fedseal("doctor", "--keys", folder)
    lines = [line for line in answer.out.splitlines() if "client keys" in line]
    assert [line.split()[0] for line in lines] == ["fail", "note", "note", "ok"] and answer.code == 2
    assert gone in lines[0] and soon in lines[1] and lines[3].endswith(" old, older, soon, valid")

    said = [fedseal(*join, file).err for file in files]
    assert f"the key in {files[1]} expired on {today:%Y-%m-%d}: ask for a new file" in said[1]
    assert f"the key in {files[2]} expires on {later:%Y-%m-%d}: ask for a new file" in said[2]
    assert all("the key in" not in text for text in (said[0], *said[3:]))
    assert keys.renew_client(folder, "gone") and "gone" not in "".join(expiry.warn_of_clients(folder))


@pytest.mark.parametrize(
    "line",
    ["expires: soon", "expires:", "expire: 2099-01-01", "expires: 2099-01-01\nexpires: 2099-01-01", "\xff"],
)
def test_a_damaged_date_is_refused(line: str, tmp_path: Path, fedseal: Command) -> None:
    folder = tmp_path / "keys"
    [file] = keys.create_keys(folder, [], ["a"])
    (tmp_path / "labels").mkdir()
    for damaged in (file, file.with_suffix(".pub")):
        text = re.sub("expires: .*\n", f"{line}\n", damaged.read_text())
        damaged.write_text(text, "latin-1")
    reason = "is not a date such as 'expires: 2030-12-31': correct it, or renew the key with"
    serve = ("serve", "folders", "--labels", tmp_path / "labels", "--keys", folder)
    fedseal(*serve).refuses(f"The text after the key in {file.with_suffix('.pub')} {reason}")
    fedseal("join", "127.0.0.1:9", "--images", tmp_path, "--key", file).refuses(f"in {file} {reason}")
    assert str(file.with_suffix(".pub")) in fedseal("doctor", "--keys", folder).out
    assert fedseal("keys", "renew", folder, "--client", "a").code == 0 and ends(folder) == {"a": 365}


def test_a_date_may_be_written_by_hand(tmp_path: Path) -> None:
    """A date without a time is the beginning of the day, UTC."""
    for text in ("2030-12-31", "2030-12-31T00:00:00Z", "2030-12-31T02:00:00+02:00\r\n"):
        found = expiry.parse_expiry(f"expires: {text}".encode(), tmp_path)
        assert found == datetime(2030, 12, 31, tzinfo=UTC)
    assert expiry.parse_expiry(b"\r\n", tmp_path) is None
