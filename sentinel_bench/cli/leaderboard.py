"""`sentinel-bench leaderboard`: results from runs, tables and pages from results."""

from __future__ import annotations

from pathlib import Path

import click

from sentinel_bench.cli import _output


@click.group()
def leaderboard() -> None:
    """Leaderboards."""


@leaderboard.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("leaderboards"), show_default=True
)
@click.option("--track", help="only this track  [default: all that have results]")
@click.option("--json", "as_json", is_flag=True, help="print the tables as JSON; write nothing")
def build(results: tuple[Path, ...], out: Path, track: str | None, as_json: bool) -> None:
    """Write README.md, board.json and board.csv to OUT/TRACK, and the pages of OUT/site.

    They are made of all files below RESULTS that are called result.json. Open OUT/site/index.html
    in a browser.
    """
    from sentinel_bench import leaderboard as boards
    from sentinel_bench.leaderboard import site
    from sentinel_bench.record import check_writable

    if as_json:
        _output.print_json(boards.summarize(results, track))
        return
    check_writable(out)
    for path in boards.build(results, out, track):
        click.echo(str(path))
    click.echo(str(site.write(results, out, track)))


@leaderboard.command()
@click.argument("runs", metavar="RUNS...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("leaderboards"), show_default=True
)
@click.option("--track", help="only this track  [default: all that have runs]")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of paths")
def collect(runs: tuple[Path, ...], out: Path, track: str | None, as_json: bool) -> int:
    """Copy the cells of finished runs to OUT/TRACK/results, without their events.

    RUNS are run folders, or folders of them. Of the same cell and seeds the newest is kept, and a
    valid one rather than an invalid one. 'leaderboard build OUT' makes tables and pages of them.

    Exit status 1 if the record of a run cannot be used; the others are copied.
    """
    from sentinel_bench.leaderboard.collect import collect as copy
    from sentinel_bench.record import check_writable

    check_writable(out)
    reporter = _output.Reporter()

    def told(number: int, of: int) -> None:
        if number == 1:
            reporter.start("cells", of)
        reporter.advance()
        if number == of:
            reporter.finish()

    done = copy(runs, out, track, told)
    for item in done.left_out:
        click.echo(f"left out: {item.run}: {item.reason}", err=True)
    if as_json:
        _output.print_json(
            {
                **{
                    name: [str(path) for path in getattr(done, name)]
                    for name in ("written", "unchanged", "removed")
                },
                "left_out": [{"run": str(i.run), "reason": i.reason} for i in done.left_out],
            }
        )
    else:
        for path in done.written:
            click.echo(str(path))
        counts = (len(done.written), len(done.unchanged), len(done.removed), len(done.left_out))
        click.echo("{} written, {} unchanged, {} replaced, {} left out".format(*counts), err=True)
    return 1 if any(item.failed for item in done.left_out) else 0
