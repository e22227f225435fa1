"""`sentinel-bench score`: recompute every number of a run from its events."""

from __future__ import annotations

from pathlib import Path

import click

from sentinel_bench.cli import _output


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of text")
def score(folder: Path, as_json: bool) -> int:
    """Recompute every number of the run folder RUN from its events.

    Exit status 1 if the stored result differs.
    """
    from sentinel_bench.config import flatten
    from sentinel_bench.score import rescore

    scores, differences = rescore(folder)
    if as_json:
        _output.print_json({"scores": scores, "differences": differences})
    else:
        for key, value in flatten(scores).items():
            click.echo(f"{key:<26} {'-' if value is None else value}")
        for line in differences:
            click.echo(f"differs: {line}", err=True)
        if not differences:
            click.echo("the stored result is equal", err=True)
    return 1 if differences else 0
