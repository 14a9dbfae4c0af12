"""The deployment of docs/deploy.md on three hosts, each with its own address: network namespaces."""

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import same_weights, settings

pytest.importorskip("flwr")

from deployment import SMALL, Processes, images, processes, wait_until  # noqa: F401

from fedseal.deploy import keys
from fedseal.training.train import train

HOSTS = {"server": "10.77.0.1", "north": "10.77.0.2", "south": "10.77.0.3"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Three hosts on a switch, each in a namespace; yields the namespaces' names."""
    if shutil.which("ip") is None:
        pytest.skip("the program 'ip' (iproute2) is missing")
    mark = uuid.uuid4().hex[:6]
    spaces = {name: f"fedseal-{mark}-{name}" for name in (*HOSTS, "switch")}
    made = []
    try:
        try:
            for space in spaces.values():
                ip("netns", "add", space)
                made.append(space)
                ip("-n", space, "link", "set", "lo", "up")
            ip("-n", spaces["switch"], "link", "add", "bridge", "type", "bridge")
            ip("-n", spaces["switch"], "link", "set", "bridge", "up")
            for name, address in HOSTS.items():
                peer = ("type", "veth", "peer", "name", name, "netns", spaces["switch"])
                ip("-n", spaces[name], "link", "add", "eth0", *peer)
                ip("-n", spaces["switch"], "link", "set", name, "master", "bridge", "up")
                ip("-n", spaces[name], "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", spaces[name], "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield spaces
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "delete", space], check=False)


def test_three_hosts(hosts: dict[str, str], processes: Processes, images: Path) -> None:  # noqa: F811
    shutil.rmtree(images / "clients" / "east")
    folder, names = processes.folder, ("north", "south")
    keys.create_keys(folder / "keys", [HOSTS["server"]], names)
    changes = settings(SMALL | {"rounds": 2})

    server = processes.start(
        *("serve", "folders", "--labels", images / "server", "--test", images / "test"),
        *("--keys", folder / "keys", "--host", "0.0.0.0", "--out", folder / "run", *changes),
        namespace=hosts["server"],
    )
    wait_until(lambda: "listening" in server.output, server)
    assert status(hosts["server"], "127.0.0.1", folder) == 200
    assert (
        status(hosts["north"], HOSTS["server"], folder) == 404
    )  # operators' paths are closed to other machines
    clients = [
        processes.start(
            *("join", f"{HOSTS['server']}:8000", "--images", images / "clients" / name),
            *("--key", folder / "keys" / "clients" / f"{name}.key", "--memory", folder / "memory" / name),
            namespace=hosts[name],
        )
        for name in names
    ]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0]
    train(
        "folders",
        out=folder / "local",
        options=SMALL | {"rounds": 2, "data.path": str(images), "engine.workers": 1},
    )
    assert same_weights(folder / "run", folder / "local")


def status(space: str, host: str, folder: Path) -> int:
    """The status of the server's answer to an operator's request from a host."""
    code = (
        "import httpx, ssl, sys; context = ssl.create_default_context(cafile=sys.argv[2]);"
        "print(httpx.get(f'https://{sys.argv[1]}:8000/health', verify=context).status_code)"
    )
    words = ["ip", "netns", "exec", space, sys.executable, "-c", code, host, str(folder / "keys" / "ca.crt")]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
