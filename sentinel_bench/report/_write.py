"""Writes the page and the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sentinel_bench.errors import RunError
from sentinel_bench.plots import files_of, save
from sentinel_bench.record import check_writable, write_atomically
from sentinel_bench.report import _figures, _panels
from sentinel_bench.report._page import page
from sentinel_bench.report._read import Partner, Run, partners, read_run, steps_of
from sentinel_bench.report._statistics import Statistics, statistics_of
from sentinel_bench.report._workers import Grid, grid_of

PAGE, FIGURES = "report.html", "figures"


@dataclass(frozen=True)
class Written:
    """What was written: the page of a run, and its figures."""

    run: Path
    page: Path
    figures: list[Path]


def write(folder: Path, out: Path | None = None) -> Written:
    """Write `report.html`, and `figures/` with each figure as PNG and SVG.

    Args:
        folder: of the run.
        out: where to write; None is the folder of the run.

    Raises:
        ConfigError: it is no run folder, or nothing can be written to `out`.
        RunError: the record cannot be read, or a write failed.
    """
    run = read_run(folder)
    out = folder if out is None else out
    check_writable(out / FIGURES)
    others, grid, statistics = partners(run), grid_of(run), statistics_of(run)
    drawn = _draw(run, others, grid, statistics)
    svgs = {name: kinds["svg"] for name, kinds in drawn.items()}
    html = page(run, others, grid, statistics, svgs)
    paths = []
    try:
        for name, kinds in drawn.items():
            for kind, content in kinds.items():
                paths.append(out / FIGURES / f"{name}.{kind}")
                save(paths[-1], content)
        write_atomically(out / PAGE, html)
    except OSError as error:
        raise RunError(f"{out}: cannot write the report: {error.strerror or error}") from error
    return Written(folder, out / PAGE, paths)


def _draw(
    run: Run, others: Sequence[Partner], grid: Grid | None, statistics: Statistics
) -> dict[str, dict[str, bytes]]:
    """Return the figures that can be drawn: name to kind to content."""
    drawn = {"losses": files_of(lambda: _figures.losses(run, others, grid))}
    if grid is not None and grid.stages * grid.replicas <= _figures.MAX_CELLS:
        drawn["workers"] = files_of(lambda: _figures.workers(grid))
    fates = [] if grid is None else grid.interesting()
    panels = [(fate, told) for fate in fates if (told := statistics.telling(fate))]
    if panels:
        shown = panels[: _panels.PANELS]
        drawn["statistics"] = files_of(lambda: _panels.statistics(statistics, shown, steps_of(run)))
    return drawn
