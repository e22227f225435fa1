"""`sentinel-bench report`: a page for a run."""

from __future__ import annotations

from pathlib import Path

import click

from sentinel_bench.cli import _output
from sentinel_bench.errors import ConfigError, RunError


@click.command()
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="folder to write to; of several runs, to OUT/RUN  [default: RUN]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of paths")
def report(folders: tuple[Path, ...], out: Path | None, as_json: bool) -> int:
    """Write report.html for each run folder RUN, and its figures to figures/ beside it.

    The page needs nothing but itself. Runs with the same scenario and seeds, without the attack or
    the defense, are taken from the folders beside RUN. 'run --trace' records what the page needs
    to show every worker.

    Exit status 1 if a run cannot be read; the others are written.
    """
    from sentinel_bench.report import require_run, write

    for folder in folders:  # before anything is written
        require_run(folder)
    written, failed = [], False
    for folder, target in _targets(folders, out):
        try:
            done = write(folder, target)
        except RunError as error:
            click.echo(f"error: {error}", err=True)
            failed = True
            continue
        written.append(done)
        if not as_json:
            click.echo(done.page)
    if as_json:
        _output.print_json(
            [
                {
                    "run": str(done.run),
                    "page": str(done.page),
                    "figures": [str(path) for path in done.figures],
                }
                for done in written
            ]
        )
    return 1 if failed else 0


def _targets(folders: tuple[Path, ...], out: Path | None) -> list[tuple[Path, Path | None]]:
    """Return each folder once, and where its page goes.

    Raises:
        ConfigError: two of them have the same name, and would go to the same place.
    """
    unique = list({folder.resolve(): folder for folder in folders}.values())
    if out is None:
        return [(folder, None) for folder in unique]
    if len(unique) == 1:
        return [(unique[0], out)]
    named = {folder.resolve().name: folder for folder in unique}
    if len(named) < len(unique):
        raise ConfigError(
            f"two runs have the same name: write them one after the other, not both to {out}"
        )
    return [(folder, out / name) for name, folder in named.items()]
