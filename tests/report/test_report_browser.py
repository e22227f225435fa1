"""The page in a browser: its script runs without an error, asks nobody, and draws what is chosen.

Skipped where there is no Chromium. A page around the report drives it, and says what it saw.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import act, ban, flag, log, tamper

from sentinel_bench.report import write

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium executable")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=4000"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
DRIVER = """<!DOCTYPE html><meta charset="utf-8"><body><pre id="said"></pre>
<iframe id="frame" style="width:{width}px;height:900px" src="{page}"></iframe>
<script>
document.getElementById("frame").addEventListener("load", (event) => {{
  const view = event.target.contentWindow, page = view.document;
  const get = (id) => page.getElementById(id);
  const set = (id, value) => {{
    get(id).value = value;
    get(id).dispatchEvent(new Event("change"));
  }};
  const count = (look) => page.querySelectorAll("#chart svg ." + look).length;
  const text = (id) => get(id).textContent;
  const said = (() => {{ {script} }})();
  document.getElementById("said").textContent = JSON.stringify(said);
}});
</script></body>"""
SEEN = """return {
  requests: view.performance.getEntriesByType("resource").map((entry) => entry.name),
  wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
  broken: [...page.images].filter((image) => !image.naturalWidth).length,
};"""
Browse = Callable[..., Any]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Return a function that runs a script against a page, and gives what it returns.

    Fails on any message of the browser's console.
    """

    def run(page: Path, script: str, width: int = 1000) -> Any:
        driver = tmp_path / "driver.html"
        driver.write_text(DRIVER.format(page=page.as_uri(), script=script, width=width))
        profile = tmp_path / "profile"
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--dump-dom"]
        done = subprocess.run(
            [*command, driver.as_uri()], capture_output=True, text=True, timeout=100, check=False
        )
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not console, "\n".join(console)
        found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found is not None and found[1], done.stderr[-2000:]
        return json.loads(html.unescape(found[1]))

    return run


ROWS = (
    *(act(5, 1, 0), ban(7, 1, 0), tamper(1, 0)),
    *(flag(5, 1, 0, l1=[0.5, 0.1, 0.2]), flag(6, 1, 0, l1=["nan", 0.1, 0.2])),
    *(flag(6, 0, 1, l1=[0.15, 0.1, 0.2], sfr=[2, 0, 1]), flag(8, 0, 1, "update", norm=[9, 0, 1])),
)
TRACE = [
    (step, stage, "activation", {r: {"l1": [0.15, 0.1, 0.2], "sfr": [0.5, 0, 1]} for r in range(4)})
    for step in range(4, 10)
    for stage in (0, 1)
]


@pytest.mark.parametrize("trace", [None, TRACE])
@pytest.mark.parametrize("width", [400, 1000])
def test_a_page_asks_nobody_and_is_as_wide_as_its_window(
    browse: Browse, make: Callable[..., Path], trace: Any, width: int
) -> None:
    page = write(make(log(*ROWS), trace=trace)).page
    assert browse(page, SEEN, width) == {"requests": [], "wide": 0, "broken": 0}


def test_the_worker_that_is_shown_first_is_the_first_attacker(
    browse: Browse, make: Callable[..., Path]
) -> None:
    page = write(make(log(*ROWS))).page
    said = browse(
        page,
        """return [get("explorer").hidden, text("readout"), count("v-out"), count("v-edge"),
        count("v-flag"), count("v-bar"), count("v-act"), count("v-ban"),
        [...get("notable").children].map((button) => button.textContent)];""",
    )
    assert said[0] is False
    assert said[1] == (
        "Stage 1, replica 0: attacker, acted and banned. First lie at step 5. "
        "Banned at step 7. Flags (activation): 2."
    )
    # one flag within the axis, one not finite: an arrow, and "not finite" in words
    assert said[2:8] == [1, 2, 2, 2, 1, 1]
    assert said[8] == ["1.0 D3", "0.1"]


def test_any_worker_direction_and_statistic_can_be_chosen(
    browse: Browse, make: Callable[..., Path]
) -> None:
    page = write(make(log(*ROWS), trace=TRACE)).page
    said = browse(
        page,
        """const seen = [];
        const see = () => seen.push([count("v-dot"), count("v-peer"), count("v-fence"),
          count("v-out"), count("v-edge"), text("chart").includes("never tested here")]);
        see();
        set("stage", 0); set("replica", 1); see();
        set("statistic", "sfr"); see();
        set("direction", "update"); see();
        set("stage", 2); set("direction", "activation"); see();
        get("notable").children[2].click();
        seen.push([get("stage").value, get("replica").value, get("direction").value,
          get("statistic").value, get("notable").children[2].getAttribute("aria-pressed")]);
        return seen;""",
    )
    assert said == [
        [7, 3, 6, 1, 2, False],  # an arrow, and "not finite" in words
        [7, 3, 6, 0, 0, False],
        [7, 3, 6, 1, 0, False],
        [0, 0, 0, 0, 2, False],  # nine is beyond five fences above one
        [0, 0, 0, 0, 0, True],
        ["0", "1", "update", "norm", "true"],
    ]


def test_values_are_read_out_where_one_points(browse: Browse, make: Callable[..., Path]) -> None:
    page = write(make(log(*ROWS), trace=TRACE)).page
    said = browse(
        page,
        """const press = (key) => {
          get("chart").dispatchEvent(new view.KeyboardEvent("keydown", { key }));
          return text("readout");
        };
        return [press("ArrowRight"), press("ArrowRight"), press("ArrowRight"), press("ArrowLeft"),
          count("v-cursor")];""",
    )
    assert said == [
        "Step 4: value 0.15, fence 0.1 to 0.2.",
        "Step 5: value 0.5, fence 0.1 to 0.2; flagged, and it was honest.",
        "Step 6: value not finite, fence 0.1 to 0.2; flagged, and it was honest.",
        "Step 5: value 0.5, fence 0.1 to 0.2; flagged, and it was honest.",
        1,
    ]


def test_the_whole_range_is_shown_if_asked_for(browse: Browse, make: Callable[..., Path]) -> None:
    page = write(make(log(act(5, 1, 0), tamper(1, 0), flag(5, 1, 0, l1=[99, 0, 1])))).page
    said = browse(
        page,
        """const before = [count("v-out"), text("chart").includes("as far as 99")];
        get("whole").checked = true;
        get("whole").dispatchEvent(new Event("change"));
        return [before, [count("v-out"), text("chart").includes("as far as")]];""",
    )
    assert said == [[0, True], [1, False]]


def test_names_that_javascript_has_a_meaning_for_are_names(
    browse: Browse, make: Callable[..., Path]
) -> None:
    odd = "</script><img src=x onerror=alert(1)>"
    names = {name: [5, 0, 1] for name in ("constructor", "__proto__", "toString", odd)}
    rows = [flag(5, 1, 0, **names), flag(5, 1, 1, l1=[5, 0, 1])]
    page = write(make(log(*rows))).page
    said = browse(
        page,
        """const seen = [...get("statistic").options].map((option) => option.value);
        return [seen, seen.map((name) => { set("statistic", name); return count("v-out"); }),
          (set("replica", 1), seen.map((name) => { set("statistic", name);
            return count("v-out"); })), get("chart").querySelectorAll("img").length];""",
    )
    assert said[0] == [*names, "l1"]
    assert said[1:] == [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1], 0]


def test_a_script_that_fails_would_be_seen(browse: Browse, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>nothing.at.all</script>")
    with pytest.raises(AssertionError, match="nothing is not defined"):
        browse(broken, "return 1;")
    broken.write_text(
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\"><script>1</script>"
    )
    with pytest.raises(AssertionError, match="Content Security Policy"):
        browse(broken, "return 1;")
