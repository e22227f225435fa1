"""`sentinel-bench leaderboard`: tables from a folder of results."""

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
    """Write README.md, board.json and board.csv to OUT/TRACK from all results below RESULTS.

    Results are files with the name result.json.
    """
    from sentinel_bench import leaderboard as boards
    from sentinel_bench.record import check_writable

    if as_json:
        _output.print_json(boards.summarize(results, track))
        return
    check_writable(out)
    for path in boards.build(results, out, track):
        click.echo(str(path))
