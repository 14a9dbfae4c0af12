"""Keys are revoked and renewed while a run goes on, with real processes and TLS."""

import socket
import ssl
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import NAMES, Deployment, Processes, images, processes, wait_until  # noqa: F401

from fedseal.deploy import expiry, keys
from fedseal.deploy.revocation import Keys, KeyWatch
from fedseal.engines.flower.engine import ClientRegistry
from fedseal.errors import UserError
from fedseal.storage.events_file import read_events
from fedseal.storage.run_folder import read_expelled


def test_a_running_server_notices_revoked_and_renewed_keys(processes: Processes, images: Path) -> None:  # noqa: F811
    deployment = Deployment(processes, images, rounds=1000)
    server = deployment.serve()
    clients = {name: deployment.join(name) for name in NAMES}
    running = [server, clients["east"]]
    wait_until(lambda: deployment.last_round() >= 1, server, *clients.values())
    check_tls(processes.port, deployment.keys / "ca.crt")

    keys.revoke_client(deployment.keys, "north")
    assert clients["north"].wait() == 2 and "its key is not registered there" in clients["north"].output
    wait_until(lambda: "north is excluded from the run" in server.output, *running)
    done = deployment.last_round()
    wait_until(lambda: deployment.last_round() >= done + 2, *running, clients["south"])
    events = read_events(deployment.run / "events.jsonl")
    reasons = [event["reason"] for event in events if event["event"] == "left-out" and event["t"] <= done + 1]
    assert len(reasons) <= 1 and set(reasons) <= {"its key was revoked"}
    assert events[-1].get("left_out", []) == []

    new = keys.renew_client(deployment.keys, "south")
    assert clients["south"].wait() == 2 and "its key is not registered there" in clients["south"].output
    wait_until(lambda: "south has a new key" in server.output, *running)
    crl = deployment.keys / "ca.crl"
    again = deployment.join("south", "--crl", crl, key=new)
    wait_until(lambda: "sends" in again.output, *running, again)
    assert list(read_expelled(deployment.run)) == ["north"]

    keys.create_keys(deployment.keys.with_name("other"), [], ["south"])
    other = deployment.join("south", "--crl", deployment.keys.with_name("other") / "ca.crl", key=new)
    assert other.wait() == 2 and "--crl is not the present list" in other.output

    keys.renew_server(deployment.keys, revoke=True)  # the running server has the old certificate
    refused = deployment.join("north", "--crl", crl, key=new)
    assert refused.wait() == 2 and "was revoked" in refused.output

    server.process.terminate()
    assert server.wait() == 143
    last = deployment.last_round()
    resumed = deployment.serve("--resume", "--set", f"rounds={last + 2}")  # north is known to be excluded
    assert resumed.wait() == 0, resumed.output
    assert [clients["east"].wait(), again.wait()] == [0, 0]


def test_a_running_server_refuses_expired_keys(processes: Processes, images: Path) -> None:  # noqa: F811
    changes = {
        "engine.deadline": 20,
        "engine.min_replies": 1,
    }  # a round waits for a client that expires in it
    deployment = Deployment(processes, images, rounds=1000, **changes)
    expired = keys.renew_client(deployment.keys, "east", days=0)
    server = deployment.serve("--clients", "2")
    east, north, south = (deployment.join(name) for name in NAMES)
    assert east.wait() == 2 and f"the key in {expired} expired on" in east.output
    assert "its key is not registered there" in east.output
    running = [server, south]
    wait_until(lambda: deployment.last_round() >= 1, *running, north)
    assert server.output.count("east cannot take part, because its key expired on") == 1
    assert f"'fedseal keys renew {deployment.keys} --client east'" in server.output

    new = keys.renew_client(deployment.keys, "east")
    wait_until(lambda: "east has a new key" in server.output, *running, north)
    again = deployment.join("east", key=new)
    wait_until(lambda: "sends" in again.output, *running, north, again)

    expire_at(deployment.keys / "clients" / "north.pub", datetime.now(UTC) + timedelta(seconds=3))
    assert north.wait() == 2 and "its key is not registered there" in north.output
    wait_until(lambda: "north cannot take part, because its key expired" in server.output, *running, again)
    done = deployment.last_round()
    wait_until(lambda: deployment.last_round() >= done + 2, *running, again)
    assert read_expelled(deployment.run) == {}


def expire_at(public: Path, date: datetime) -> None:
    """Changes the date in a client's public key file."""
    line = public.read_bytes().partition(b"\n")[0]
    public.write_bytes(line + f"\nexpires: {date.isoformat()}\n".encode())


def check_tls(port: int, ca: Path) -> None:
    """The server accepts TLS 1.3 and nothing older."""
    context, address = ssl.create_default_context(cafile=ca), ("127.0.0.1", port)
    with context.wrap_socket(socket.create_connection(address), server_hostname=address[0]) as connection:
        assert connection.version() == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError) as caught, socket.create_connection(address) as plain:
        context.wrap_socket(plain, server_hostname=address[0])
    assert not isinstance(caught.value, ssl.SSLCertVerificationError)


def test_a_full_disk_does_not_keep_a_revoked_key(tmp_path: Path) -> None:
    """The key is refused at once, and recorded when there is space."""
    keys.create_keys(tmp_path, [], ["east", "north"])
    before = {key: name for name, key in keys.read_registered(tmp_path).items()}
    registry = ClientRegistry(None, ["east", "north"], before)  # type: ignore[arg-type]
    admitted: list[Keys] = []
    expelled: list[list[str]] = []
    full = True

    def expel(names: list[str]) -> None:
        if full:
            raise OSError("No space left on device")
        expelled.append(names)

    watch = KeyWatch(tmp_path, registry, admitted.append, expel)
    keys.revoke_client(tmp_path, "east")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            watch.check()
    assert [set(found.values()) for found in admitted] == [{"north"}] and registry.revoked == {"east"}
    full = False
    watch.check()
    watch.check()
    assert expelled == [["east"]]


def test_only_a_change_is_acted_upon(tmp_path: Path) -> None:
    """The files are real; what the server would do is recorded."""
    keys.create_keys(tmp_path, [], ["east", "north"])
    before = {key: name for name, key in keys.read_registered(tmp_path).items()}
    registry = ClientRegistry(None, ["east", "north"], before)  # type: ignore[arg-type]
    admitted: list[Keys] = []
    expelled: list[list[str]] = []
    watch = KeyWatch(tmp_path, registry, admitted.append, expelled.append)
    watch.check()
    keys.add_clients(tmp_path, ["west"])  # a run keeps its clients
    watch.check()
    assert (admitted, expelled, registry.revoked) == ([], [], set())

    keys.renew_client(tmp_path, "north")
    watch.check()
    assert len(admitted) == 1 and set(admitted[0].values()) == {"east", "north"} and admitted[0] != before
    assert registry.keys == admitted[0] and registry.revoked == set() and expelled == []

    keys.revoke_client(tmp_path, "east")
    watch.check()
    assert set(admitted[1].values()) == {"north"} and expelled == [["east"]] and registry.revoked == {"east"}
    keys.add_clients(tmp_path, ["east"])  # not in this run
    watch.check()
    assert len(admitted) == 2

    (tmp_path / "clients" / "north.pub").write_text("nonsense")
    with pytest.raises(UserError, match=r"north\.pub is not a client's public key"):
        watch.check()
    (tmp_path / "clients").rename(tmp_path / "away")  # a disk that is away excludes nobody
    with pytest.raises(OSError, match="clients"):
        watch.check()
    assert len(admitted) == 2


def test_an_expired_client_is_refused_until_its_key_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files are real and do not change when the key expires; admission fails once."""
    keys.create_keys(tmp_path, [], ["east"])
    keys.add_clients(tmp_path, ["north"], days=2)
    before = {key: name for name, key in keys.read_registered(tmp_path).items()}
    registry = ClientRegistry(None, ["east", "north"], before)  # type: ignore[arg-type]
    admitted: list[Keys] = []
    expelled: list[list[str]] = []
    busy = True

    def admit(found: Keys) -> None:
        if busy:
            raise OSError("busy")
        admitted.append(found)

    watch = KeyWatch(tmp_path, registry, admit, expelled.append)
    watch.check()
    assert admitted == []

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=3)

    monkeypatch.setattr(expiry, "datetime", Clock)
    with pytest.raises(OSError, match="busy"):
        watch.check()
    busy = False
    for _ in range(3):
        watch.check()
    assert [set(found.values()) for found in admitted] == [{"east"}]
    assert caplog.text.count("north cannot take part, because its key expired on") == 1
    assert (registry.keys, registry.revoked, expelled) == (before, set(), [])

    keys.renew_client(tmp_path, "north")
    watch.check()
    assert len(admitted) == 2 and set(admitted[1].values()) == {"east", "north"} and admitted[1] != before
    expire_at(tmp_path / "clients" / "north.pub", datetime.now(UTC))
    watch.check()
    keys.revoke_client(tmp_path, "north")  # an expired key can be revoked
    watch.check()
    assert [set(found.values()) for found in admitted[2:]] == [{"east"}]
    assert expelled == [["north"]] and registry.revoked == {"north"}
