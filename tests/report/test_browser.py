"""A browser draws the report."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("svg, .matrix, img, path.line, rect.bar")].map(e => {
    const box = e.getBoundingClientRect();
    const kind = e.matches("svg svg") ? "plot" : e.tagName.toLowerCase();
    return [kind, box.width, box.height, e.tagName == "IMG" ? e.naturalWidth : 1];
  });
  document.body.dataset.found = JSON.stringify({found, wide: document.documentElement.scrollWidth});
});
</script>"""


def browse(path: Path, folder: Path, width: int) -> dict[str, Any]:
    """The boxes that a browser gives to all figures; fails if the browser logs a complaint."""
    assert CHROMIUM is not None
    probed = folder / "probed.html"
    probed.write_text(path.read_text("utf-8").replace("</body>", PROBE + "</body>"), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    [found] = re.findall(r'data-found="([^"]*)"', done.stdout)
    seen: dict[str, Any] = json.loads(html.unescape(found))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: install Debian's package chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_draws_every_figure(width: int, finished: Path, tmp_path: Path) -> None:
    seen = browse(finished / "report.html", tmp_path, width)
    kinds = [kind for kind, *_ in seen["found"]]
    assert kinds.count("svg") >= 5 and kinds.count("table") == 2 and kinds.count("img") >= 12
    assert kinds.count("path") >= 10 and kinds.count("rect") >= 1
    for kind, wide, high, natural in seen["found"]:
        assert natural > 0 and (wide > 0 or high > 0), kind
        assert kind in ("path", "rect") or wide > 20, kind
        assert kind in ("path", "rect", "plot") or high > 20, kind  # a plot of constant lines is flat
    assert seen["wide"] <= max(width, 500)  # fits a phone's screen; Chromium's smallest window is 500 wide
