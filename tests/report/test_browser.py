"""A browser draws the report, at the width of a phone and of a desktop."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedseal.report.write import rewrite_report
from fedseal.storage.events_file import format_lines, read_events

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The page is shown in a frame, because Chromium's smallest window is 500 pixels wide.
PROBE = """<!doctype html><meta charset=utf-8><body>
<iframe srcdoc="{page}" style="width:{width}px; height:900px; border:0" onload="probe(this)"></iframe>
<script>
function probe(frame) {{
  const page = frame.contentDocument, all = selector => [...page.querySelectorAll(selector)];
  const box = e => {{ const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }};
  const scale = e => e.matches("svg text") ? e.getScreenCTM().a : 1;
  const written = all("body *").filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()));
  const seen = written.filter(e => !e.matches("style, script, title"));
  document.body.dataset.found = JSON.stringify({{
    figures: all("svg, .matrix, img, path.line, rect.bar").map(e =>
      [e.tagName.toLowerCase(), ...box(e), e.tagName == "IMG" ? e.naturalWidth : 1]),
    texts: seen.map(e => [e.textContent.trim(), parseFloat(getComputedStyle(e).fontSize) * scale(e)]),
    charts: all("svg").map(s =>
      [box(s), [...s.querySelectorAll("text, path.line, circle, rect")].map(e => [e.tagName, ...box(e)])]),
    boxes: all(".scroll, pre").map(e => [e.clientWidth, getComputedStyle(e).overflowX]),
    wide: page.documentElement.scrollWidth,
  }});
}}
</script></body>"""


def browse(path: Path, folder: Path, width: int) -> dict[str, Any]:
    """What a browser draws; fails if the browser logs a complaint."""
    assert CHROMIUM is not None
    probed = folder / "probed.html"
    probed.write_text(PROBE.format(page=html.escape(path.read_text("utf-8")), width=width), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width + 40},900", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    [found] = re.findall(r'data-found="([^"]*)"', done.stdout)
    seen: dict[str, Any] = json.loads(html.unescape(found))
    return seen


def overlap(one: list[float], other: list[float]) -> bool:
    """True if two boxes (left, top, right, bottom) have more than a pixel in common."""
    across, down = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    return across > 1 and down > 1


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: install Debian's package chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_draws_everything_readably(width: int, copy: Path, tmp_path: Path) -> None:
    late = {"event": "left-out", "t": 2, "client": "a-long-name" * 6, "reason": "it is late " * 9}
    events = copy / "events.jsonl"
    events.write_text(format_lines([*read_events(events), late])[0], "utf-8")
    seen = browse(rewrite_report(copy), tmp_path, width)
    assert [late["reason"].strip(), pytest.approx(14.4)] in seen["texts"]
    kinds = [kind for kind, *_ in seen["figures"]]
    assert kinds.count("svg") >= 5 and kinds.count("table") == 2 and kinds.count("img") >= 12
    assert kinds.count("path") >= 10 and kinds.count("rect") >= 1
    for kind, left, top, right, bottom, natural in seen["figures"]:
        assert natural > 0 and (right > left or bottom > top), kind
        assert kind in ("path", "rect") or min(right - left, bottom - top) > 20, kind

    assert seen["wide"] <= width  # only the boxes of tables scroll
    assert seen["boxes"] and all(wide < width and x == "auto" for wide, x in seen["boxes"])
    assert len(seen["texts"]) > 100
    assert [text for text in seen["texts"] if text[1] < 11] == []
    for (left, top, right, bottom), parts in seen["charts"]:
        for kind, *place in parts:
            assert left - 1 <= place[0] and place[2] <= right + 1, kind
            assert top - 1 <= place[1] and place[3] <= bottom + 1, kind
        labels = [place for kind, *place in parts if kind == "text"]
        assert [(a, b) for i, a in enumerate(labels) for b in labels[:i] if overlap(a, b)] == []
