"""Commands of a deployment that refuse to start, as real processes."""

from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import Processes, create_keys_at, images, processes  # noqa: F401


def test_an_expired_certificate_and_a_folder_without_images(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = create_keys_at(timedelta(days=-4000), tmp_path / "old", monkeypatch)
    server = processes.start("serve", "folders", "--labels", images / "server", "--keys", tmp_path / "old")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "notes.txt").write_text("no image")
    client = processes.start("join", "127.0.0.1:1", "--images", tmp_path / "junk", "--key", key)
    assert server.wait() == client.wait() == 2
    assert "ca.crt expired on" in server.output and str(tmp_path / "junk") in client.output
    for process in (server, client):
        assert "Traceback" not in process.output and process.output.count("error: ") == 1
