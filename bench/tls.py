"""Scans the TLS endpoint of a real `fedseal serve` with testssl.sh: writes results/bench/tls.json.

python -m bench.tls

It needs testssl.sh (Debian's package of this name) and takes some minutes. The exit code is 1 if a finding is
HIGH or CRITICAL.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.page import Found, grid, measured_on, save, write_page
from fedseal.deploy.keys import create_keys

GOOD, BAD = ("OK", "INFO", "DEBUG"), ("HIGH", "CRITICAL", "FATAL")
START_SECONDS = 300.0  # for the server to listen


def find_program() -> str | None:
    """The scanner, which Debian installs without the ending .sh."""
    return shutil.which("testssl.sh") or shutil.which("testssl")


def scan(program: str, port: int, ca: Path) -> list[dict[str, Any]]:
    """All findings about the server at a port of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings.json"
        quiet = ["--quiet", "--color", "0", "--warnings", "batch", "--jsonfile", str(file)]
        words = [program, *quiet, "--add-ca", str(ca), f"127.0.0.1:{port}"]
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False)
        findings: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
    return findings


def summarise(program: str, findings: list[dict[str, Any]]) -> dict[str, Any]:
    """The scanner's version, the number of findings by severity, and all that are worse than INFO."""
    about = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"testssl\S*\s+(\d[\w.]*)", re.sub(r"\x1b\[[0-9;]*m", "", about))
    severities = Counter(finding["severity"] for finding in findings)
    notable = {
        finding["id"]: f"{finding['severity']}: {finding['finding']}"
        for finding in findings
        if finding["severity"] not in GOOD
    }
    return {"testssl.sh": found[1] if found else "?", "severities": severities, "notable": notable}


def serve_and_scan(program: str, folder: Path) -> list[dict[str, Any]]:
    """Starts a server that waits for a client, and scans it."""
    rng = np.random.default_rng(0)
    for path in (folder / "labels" / f"{name}" / f"{i}.png" for name in "ab" for i in range(5)):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    create_keys(folder / "keys", ["127.0.0.1"], ["north"], crl="http://localhost/ca.crl")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", "folders", "--labels", folder / "labels", "--keys", folder / "keys"]
    words += ["--port", port, "--out", folder / "run", "--wait", 3600]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "fedseal", *map(str, words)], stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_SECONDS
        while b"listening" not in (output := (folder / "log").read_bytes()):
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(output.decode())
            time.sleep(0.2)
        return scan(program, port, folder / "keys" / "ca.crt")
    finally:
        server.terminate()
        server.wait()


def table(found: Found) -> list[str]:
    """The table of docs/benchmarks.md."""
    rows = [[name, *text.split(": ", 1)] for name, text in found["notable"].items()]
    counts = ", ".join(f"{number} {severity}" for severity, number in found["severities"].items())
    lines = grid(["finding", "severity", "value"], rows)
    return [*lines, "", f"All findings: {counts}. testssl.sh {found['testssl.sh']}. {measured_on(found)}"]


def main() -> None:
    program = find_program()
    if program is None:
        sys.exit("testssl.sh is not installed: apt-get install testssl.sh")
    with tempfile.TemporaryDirectory() as folder:
        findings = serve_and_scan(program, Path(folder))
    summary = summarise(program, findings)
    print(json.dumps(summary, indent=1))
    save("tls", summary)
    write_page()
    sys.exit(1 if any(text.startswith(BAD) for text in summary["notable"].values()) else 0)


if __name__ == "__main__":
    main()
