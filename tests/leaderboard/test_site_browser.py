"""The pages in a browser: no script error, no request, sorting, filters, and a narrow window.

Skipped where there is no Chromium. A page around the site's page drives it, and says what it saw.
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
from made_runs import act, ban, flag, log, write_run

from sentinel_bench.config import Scenario
from sentinel_bench.leaderboard import site
from sentinel_bench.leaderboard.collect import collect

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
{frames}
<script>
addEventListener("load", () => {{
  const said = [...document.querySelectorAll("iframe")].map((frame) => {{
    const view = frame.contentWindow, page = view.document;
    const all = (query, from = page) => [...from.querySelectorAll(query)];
    const column = (table, n) => [...table.tBodies[0].rows].filter((row) => !row.hidden)
      .map((row) => row.cells[n].textContent.trim());
    const set = (field, value) => {{
      field.value = value;
      for (const kind of ["input", "change"]) field.dispatchEvent(new view.Event(kind));
    }};
    {script}
  }});
  document.getElementById("said").textContent = JSON.stringify(said);
}});
</script></body>"""
SEEN = """return {
  requests: view.performance.getEntriesByType("resource").map((e) => e.name.split("/").pop()),
  wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
  styled: view.getComputedStyle(page.body).maxWidth !== "none",
  buttons: all("table.sortable thead th").every((head) => head.querySelector("button")
    && head.getAttribute("aria-sort") === "none"),
};"""
ODD = "<img src=x onerror=alert(1)>" + "x" * 90
Browse = Callable[..., Any]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Return a function that runs a script against pages, and gives what it returns for each.

    Fails on any message of the browser's console.
    """

    def run(pages: list[Path], script: str, widths: tuple[int, ...] = (1000,)) -> list[Any]:
        frames = "".join(
            f'<iframe style="width:{width}px;height:900px" src="{page.as_uri()}"></iframe>'
            for width in widths
            for page in pages
        )
        driver = tmp_path / "driver.html"
        driver.write_text(DRIVER.format(frames=frames, script=script))
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
        done = subprocess.run(
            [*command, driver.as_uri()], capture_output=True, text=True, timeout=100, check=False
        )
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not console, "\n".join(console)
        found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found is not None and found[1], done.stderr[-2000:]
        said: list[Any] = json.loads(html.unescape(found[1]))
        return said

    return run


@pytest.fixture
def pages(make_scenario: Callable[..., Scenario], save: Any, tmp_path: Path) -> Path:
    """The site of a few results, some with curves, some with hostile names."""
    scenario = make_scenario(track="core", grid__stages=3, train__steps=10, train__warmup_steps=4)
    trace = [(step, 1, "activation", {0: {"l1": [0.1, 0, 1]}}) for step in range(4, 9)]
    for attack, defense in (("none", "none"), ("zeros", "none"), ("zeros", "sentinel")):
        rows = [act(5, 1, 0), ban(7, 1, 0), ban(6, 0, 2), flag(6, 1, 0), flag(5, 0, 2)]
        write_run(tmp_path / "made", scenario, log(*rows), attack=attack, defense=defense,
                  trace=trace)  # fmt: skip
    collect([tmp_path / "made"], tmp_path / "runs")
    for number, f1 in enumerate((9.0, 100.0, None, 20.0)):
        save(f"b{number}", f"attack-{number}", "cascade", f1=f1, excess_loss=0.1 * number,
             mode="gradient" if number == 1 else "activation")  # fmt: skip
    path = save("odd", outcome="broken", recall=0.0, excess_loss=2.0)
    content = json.loads(path.read_text())
    content["cell"] |= {"attack": ODD, "defense": ODD}
    path.write_text(json.dumps(content))
    site.write([tmp_path / "runs"], tmp_path / "out")
    return tmp_path / "out" / "site"


def test_pages_ask_nobody_and_are_as_wide_as_their_window(browse: Browse, pages: Path) -> None:
    every = sorted(pages.rglob("*.html"))
    said = browse(every, SEEN, widths=(360, 1000))
    assert len(said) == 2 * len(every) == 26
    for seen in said:
        assert seen == {"requests": [], "wide": 0, "styled": True, "buttons": True}


def test_a_column_is_sorted_by_its_numbers_and_what_is_missing_comes_last(
    browse: Browse, pages: Path
) -> None:
    ((heads, up, down, by_name, aria),) = browse(
        [pages / "tracks" / "core" / "index.html"],
        """const table = page.getElementById("all"), heads = [...table.tHead.rows[0].cells];
        const field = page.querySelector("[data-filter=defense]");
        set(field, "cascade");
        const f1 = heads.findIndex((head) => head.textContent.trim() === "F1");
        const press = (n) => heads[n].querySelector("button").click();
        press(f1); const up = column(table, f1), aria = [heads[f1].getAttribute("aria-sort")];
        press(f1); const down = column(table, f1); aria.push(heads[f1].getAttribute("aria-sort"));
        press(0); press(0);
        aria.push(heads[0].getAttribute("aria-sort"), heads[f1].getAttribute("aria-sort"));
        return [heads.map((h) => h.tagName + h.scope).join(" "), up, down, column(table, 0), aria];
        """,
    )
    assert set(heads.split()) == {"THcol"}
    assert up == ["9.0", "20.0", "100.0", "–"]  # noqa: RUF001
    assert down == ["100.0", "20.0", "9.0", "–"]  # noqa: RUF001
    assert by_name == ["attack-3", "attack-2", "attack-1", "attack-0"]
    assert aria == ["ascending", "descending", "descending", "none"]


def test_rows_are_filtered_by_text_mode_and_defense(browse: Browse, pages: Path) -> None:
    (said,) = browse(
        [pages / "tracks" / "core" / "index.html"],
        """const table = page.getElementById("all"), said = [];
        const field = (kind) => page.querySelector(`[data-filter=${kind}]`);
        const see = () => said.push([column(table, 0).length,
          page.querySelector("[role=status]").textContent]);
        see();
        set(field("text"), "ATTACK- casc"); see();
        set(field("mode"), "gradient"); see();
        set(field("text"), ""); set(field("mode"), ""); set(field("defense"), "sentinel"); see();
        set(field("text"), "nothing at all"); see();
        set(field("text"), "("); see();
        return said;""",
    )
    assert said == [
        [8, "8 of 8 rows"], [4, "4 of 8 rows"], [1, "1 of 8 rows"], [1, "1 of 8 rows"],
        [0, "0 of 8 rows"], [0, "0 of 8 rows"],
    ]  # fmt: skip


def test_the_matrix_shows_and_sorts_by_the_number_that_is_chosen(
    browse: Browse, pages: Path
) -> None:
    (said,) = browse(
        [pages / "tracks" / "core" / "index.html"],
        """const metric = page.getElementById("metric");
        const table = all(".matrix").find((one) => one.textContent.includes("cascade"));
        const shown = () => all("td:nth-child(3) .m", table).filter((a) => a.offsetParent)
          .map((a) => a.textContent);
        const before = shown();
        set(metric, "excess_loss");
        table.tHead.rows[0].cells[2].querySelector("button").click();
        table.tHead.rows[0].cells[2].querySelector("button").click();
        return [[...table.tHead.rows[0].cells].map((head) => head.textContent.slice(0, 9)),
          before, shown(),
          all(".scale").filter((line) => line.offsetParent).map((line) => line.className)];""",
    )
    assert said[0] == ["attack", "<img src=", "cascade ↕"]
    assert said[1] == ["9.0", "100.0", "–", "20.0"]  # noqa: RUF001
    assert said[2] == ["+0.300", "+0.200", "+0.100", "+0.000"]
    assert said[3] == ["scale m m-excess_loss"]


def test_curves_are_drawn_within_their_pictures(browse: Browse, pages: Path) -> None:
    (said,) = browse(
        [pages / "tracks" / "core" / "defense-sentinel.html"],
        """return all(".charts svg").map((svg) => {
          const box = svg.getBoundingClientRect();
          const out = all("path, text", svg).filter((node) => {
            const own = node.getBoundingClientRect();
            return own.left < box.left - 2 || own.right > box.right + 2
              || own.top < box.top - 2 || own.bottom > box.bottom + 2;
          });
          return [box.width > 100, svg.children.length > 3, out.length];
        });""",
    )
    assert len(said) == 7 and all(seen == [True, True, 0] for seen in said)


def test_without_scripts_everything_is_there(browse: Browse, pages: Path) -> None:
    page = pages / "tracks" / "core" / "index.html"
    page.write_text(re.sub(r"<script.*?</script>", "", page.read_text()))
    ((rows, cells, controls),) = browse(
        [page],
        """return [all("#all tbody tr").length,
          all(".matrix .m").filter((a) => a.offsetParent).every((a) => a.matches(".m-f1")),
          all(".controls").filter((node) => node.offsetParent).length];""",
    )
    assert (rows, cells, controls) == (8, True, 0)


def test_a_script_that_fails_would_be_seen(browse: Browse, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>nothing.at.all</script>")
    with pytest.raises(AssertionError, match="nothing is not defined"):
        browse([broken], "return 1;")
