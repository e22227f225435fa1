from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import Page, write_run
from matplotlib.figure import Figure

from sentinel_bench.config import Scenario
from sentinel_bench.report import write

Make = Callable[..., Path]


@pytest.fixture
def make(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Make:
    """Return a function that writes a run folder into the folder `runs`."""

    def run(events: list[dict[str, Any]], scenario: Scenario | None = None, **more: Any) -> Path:
        scenario = scenario or make_scenario(grid__stages=3, train__steps=10, train__warmup_steps=4)
        return write_run(tmp_path / "runs", scenario, events, **more)

    return run


def sketch(draw: Callable[[], Figure]) -> dict[str, bytes]:
    """Return a figure without a layout, and only as SVG."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure, buffer = draw(), io.BytesIO()
        figure.set_layout_engine("none")
        figure.savefig(buffer, format="svg")
    return {"svg": buffer.getvalue()}


@pytest.fixture
def page(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """Return a function that writes a run folder and its page with sketches, and reads the page."""
    monkeypatch.setattr("sentinel_bench.report._write.files_of", sketch)

    def show(events: list[dict[str, Any]], **more: Any) -> Page:
        folder = make(events, **more)
        return Page(write(folder).page.read_text(encoding="utf-8"))

    return show
