"""`sentinel-bench docs`: a page for each built-in attack, defense and aggregator."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def docs() -> None:
    """The reference of attacks, defenses and aggregators."""


@docs.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs"), show_default=True)
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("leaderboards"), show_default=True,
    help="folder that is searched for result.json",
)  # fmt: skip
@click.option("--check", is_flag=True, help="write nothing; exit status 1 if anything differs")
def build(out: Path, results: Path, check: bool) -> int:
    """Write OUT/attacks/, OUT/defenses/ and OUT/aggregators/ from the classes and RESULTS.

    Prints what is changed; a page of a plugin that is gone is removed.
    """
    from sentinel_bench import reference
    from sentinel_bench.record import check_writable

    if check:
        todo = reference.changes(out, results)
    else:
        check_writable(out)
        todo = reference.build(out, results)
    for change in todo:
        click.echo(f"{change.what}: {change.path}")
    if not todo:
        click.echo("nothing differs", err=True)
    elif check:
        click.echo("run 'sentinel-bench docs build' and commit what it writes", err=True)
    return 1 if check and todo else 0
