"""`sentinel-bench new`: a small package to start a plugin from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import get_args

import click

from sentinel_bench.scaffold import Kind, create, module_of

_RUN = {
    "attack": "--attack {plugin}",
    "defense": "--attack zeros --defense {plugin}",
    "aggregator": "--attack update-sign-flip --defense none --aggregator {plugin}",
}


@click.command()
@click.argument("kind", type=click.Choice(get_args(Kind)))
@click.argument("name")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="folder to make  [default: ./NAME]"
)
def new(kind: Kind, name: str, folder: Path | None) -> None:
    """Write an installable package with a working example, its tests and a README.

    NAME is of lower-case words with hyphens between them.

    Example: sentinel-bench new attack soft-flip
    """
    folder = Path(name) if folder is None else folder
    for path in create(kind, name, folder):
        click.echo(f"written: {path}")
    module = module_of(name)
    file = shlex.quote(str(folder / "src" / f"{module}.py"))
    run = _RUN[kind].format(plugin=f"{module}/{name}")
    click.echo(
        f"\nnext: change {file}, then\n"
        f"    pytest {shlex.quote(str(folder))}\n"
        f"    sentinel-bench validate {module}/{name} --plugin {file}\n"
        f"    sentinel-bench run --track smoke {run} --plugin {file}\n"
        f"\nto let others use it: 'pip install -e {shlex.quote(str(folder))}' makes it "
        f"{name}/{name}, without --plugin;\n"
        f"{folder / 'README.md'} says how to submit it"
    )
