"""A deployment is watched on its dashboard and in its logs, and stopped with SIGTERM."""

import http.client
import json
from pathlib import Path

from deployment import Deployment, Processes, free_port, images, processes, wait_until  # noqa: F401

from fedseal.privacy import spent_epsilon
from fedseal.storage.events_file import read_rounds


def look(port: int) -> str:
    """The dashboard's page, or nothing while there is no dashboard."""
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        connection.close()


def test_serve_shows_its_clients_and_stops_on_sigterm(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
) -> None:
    """The client adds noise (local differential privacy), and the server counts what that spends."""
    private = {"privacy.mode": "local", "privacy.noise": 2, "privacy.clip": 0.01}
    deployment, port = Deployment(processes, images, ["north"], rounds=1000, **private), free_port()
    log = processes.folder / "server.log"
    server = deployment.serve("--dashboard", str(port), "--log", str(log), "--json-logs")
    wait_until(lambda: "listening on" in look(port), server)
    client = deployment.join("north")
    wait_until(lambda: "<td>north</td><td>round 2</td>" in look(port), server, client)
    page = look(port)
    assert "1 of 1 clients are connected" in page and "<td>0</td>" in page and "line" in page
    assert " left" in page and str(deployment.keys) not in page

    server.process.terminate()
    assert server.wait() == 143 and look(port) == ""
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert [json.loads(line) for line in server.output.splitlines()] == lines
    assert lines[-1]["event"] == "stopped"
    assert lines[-1]["message"] == "Stopped. Continue with the same command and --resume."
    assert {"start", "round"} <= {line["event"] for line in lines}

    events = read_rounds(deployment.run)
    assert [event["epsilon"] for event in events] == [spent_epsilon(2, e["t"], 1e-5) for e in events]
    assert "positive" not in events[0] and "counts" not in client.output  # only noisy weights travel
    ledger = (deployment.run / "privacy.jsonl").read_text("utf-8").splitlines()
    assert len(events) >= 2 and len(ledger) >= len(events) and "spent." in page

    client.process.terminate()
    assert client.wait() == 143
    assert client.output.endswith("Stopped. Take part again with the same command.\n")
