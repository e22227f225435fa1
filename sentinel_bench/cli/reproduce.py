"""`sentinel-bench reproduce`: published numbers held against our own results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from sentinel_bench import suite
from sentinel_bench.cli import _options, _output
from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.record import check_writable
from sentinel_bench.reproduce import published, show
from sentinel_bench.reproduce.published import SCALES

if TYPE_CHECKING:
    from sentinel_bench.batch import Entry
    from sentinel_bench.reproduce.cells import Key, Outcome, Reproduction

LIST = "list"


class _WithNames(click.Command):
    """Adds what there is to the help, only when it is asked for."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and titles."""
        with formatter.section("Names"):
            formatter.write_dl([(row["name"], row["title"]) for row in _listed()])


@click.command(cls=_WithNames)
@click.argument("name", metavar="NAME")
@click.option(
    "--scale", type=click.Choice(SCALES), default="tiny", show_default=True,
    help="a stand-in for CPUs, or the published settings, for GPUs with internet",
)  # fmt: skip
@click.option(
    "--seeds", default="0-2", show_default=True, help="each for model, data and threat alike"
)
@click.option("--row", "numbers", type=int, multiple=True, help="only this row, from 1; repeatable")
@click.option(
    "--results", multiple=True, type=click.Path(path_type=Path), metavar="FOLDER",
    help="take every result.json below it, and run nothing; repeatable",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="folder of the run folders; finished cells are reused",
)  # fmt: skip
@click.option(
    "--write", "document", type=click.Path(path_type=Path), metavar="FILE",
    help="put the table into this Markdown document, beside those that it has",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]),
    help="[default: cpu at scale tiny, cuda at scale paper]",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), help="cells at a time  [default: one for each CPU]")
@click.option(
    "--threads", type=click.IntRange(1), help="threads of torch in each process  [default: 1]"
)
@click.option("--dry-run", is_flag=True, help="print rows and cells, and stop")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def reproduce(name: str, **options: Any) -> int:
    """Run what a published table corresponds to, and print its numbers beside ours.

    NAME is a table, a figure or a paper; 'list' says which there are, and what each has at which
    scale. docs/reproduction.md says when two numbers agree; that they do not is no failure.

    Example: sentinel-bench reproduce table1 --row 2 --row 9
    """
    if name == LIST:
        _list(as_json=options["as_json"])
        return 0
    from sentinel_bench.reproduce import cells, document
    from sentinel_bench.reproduce.compare import compare

    device = options["device"] or ("cpu" if options["scale"] == "tiny" else "cuda")
    seeds = _options.parse_seeds(options["seeds"])
    found = cells.reproduction(name, options["scale"], seeds, options["numbers"], device)
    if options["dry_run"]:
        _print_plan(found, as_json=options["as_json"])
        return 0
    path = options["document"]
    if path is not None:
        if options["numbers"]:
            raise ConfigError("--write takes whole tables: leave --row out")
        document.read(path)  # before anything is run
        check_writable(path.parent)
    outcomes, valid = _outcomes(found, options)
    data = compare(found, outcomes)
    if options["as_json"]:
        _output.print_json(data)
    else:
        _print(data)
    picture = _picture(data, path, options["out"]) if published.get(name).of else None
    if path is not None:
        document.write(path, data, picture)
        click.echo(f"written: {path}", err=True)
    return 0 if valid else 1


def _outcomes(
    found: Reproduction, options: Mapping[str, Any]
) -> tuple[Mapping[Key, Outcome], bool]:
    """Return what results say, and whether all cells that were run are valid.

    Raises:
        ConfigError: cells cannot be run, or folders hold no result of any cell.
    """
    from sentinel_bench.reproduce import cells

    if not options["results"]:
        entries = _run(found.plan, options["out"], options["jobs"], options["threads"] or 1)
        finished = [
            suite.Finished(e.cell, e.folder, e.result) for e in entries if e.folder and e.result
        ]
        return cells.of_runs(finished), all(e.state != "failed" for e in entries)
    outcomes, problems = cells.of_files(options["results"])
    for problem in problems:
        click.echo(f"left out: {problem}", err=True)
    if not any(cells.key_of(cell) in outcomes for cell in found.plan.cells):
        raise ConfigError(
            f"no result of {found.name} at scale {found.scale} is below "
            f"{', '.join(map(str, options['results']))}; leave --results out to run its cells"
        )
    return outcomes, True


def _run(plan: suite.Plan, out: Path, jobs: int | None, threads: int) -> list[Entry]:
    """Run the cells of a plan that `out` does not have yet, corpus by corpus."""
    from sentinel_bench.batch_worker import Work
    from sentinel_bench.cli._live import look_up, work_off

    corpora: dict[str, suite.Plan] = {}
    for scenario, group in plan.groups:
        part = corpora.setdefault(scenario.data.model_dump_json(), suite.Plan())
        part.groups.append((scenario, group))
    done = []
    for part in corpora.values():
        entries, _ = look_up(part, out)
        task = Work(out, (_output.command(),), threads)
        work_off(entries, part, task, jobs or _options.usual_jobs())
        done += entries
    return done


def _picture(data: Mapping[str, Any], document: Path | None, out: Path) -> str:
    """Draw the figure beside the document, else in `out`; return its address in the document.

    Raises:
        RunError: it cannot be written.
    """
    from sentinel_bench import plots
    from sentinel_bench.reproduce import figure

    name = f"reproduction-{data['name']}-{data['scale']}"
    folder = out if document is None else document.parent / "figures"
    check_writable(folder)
    try:
        for kind, content in figure.render(data).items():
            if document is None or kind == "svg":
                plots.save(folder / f"{name}.{kind}", content)
    except OSError as error:
        raise RunError(f"{folder}: cannot write the figure: {error.strerror or error}") from error
    click.echo(f"written: {folder / name}.svg", err=True)
    return f"figures/{name}.svg"


# What is printed.


def _listed() -> list[dict[str, Any]]:
    rows = []
    for name, table in published.load().tables.items():
        row: dict[str, Any] = {"name": name, "title": table.title}
        for scale in SCALES:
            have, of, why = published.available(name, scale)
            row[scale] = {"rows": have, "of": of, "missing": why}
        rows.append(row)
    return rows


def _list(*, as_json: bool) -> None:
    rows = _listed()
    if as_json:
        _output.print_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "title", *(f"rows at {scale}" for scale in SCALES), "why others not"):
        table.add_column(title, overflow="fold")
    for row in rows:
        reasons = dict.fromkeys(row[s]["missing"] for s in SCALES if row[s]["missing"])
        shares = [f"{row[s]['rows']} of {row[s]['of']}" for s in SCALES]
        table.add_row(row["name"], row["title"], *shares, "; ".join(reasons))
    _output.stdout().print(table, markup=False)


def _print_plan(found: Reproduction, *, as_json: bool) -> None:
    """Print what would be run: cells, warm-ups and steps, and what each row corresponds to."""
    from sentinel_bench.reproduce.compare import compare

    groups = found.plan.groups
    trains = [(s.train, len(cells)) for s, cells in groups]
    data = compare(found, {})
    rows = [
        {
            **{key: row[key] for key in ("number", "settings", "mode", "attack", "defense")},
            **({"missing": row["missing"]} if row["missing"] else {"note": row["note"]}),
        }
        for row in data["rows"]
    ]
    plan = {
        "name": found.name,
        "scale": found.scale,
        "seeds": list(found.seeds),
        "cells": len(found.plan.cells),
        "warm_ups": len(groups),
        "steps": sum(t.warmup_steps + n * (t.steps - t.warmup_steps) for t, n in trains),
        "settings": data["settings"],
        "rows": rows,
    }
    if as_json:
        _output.print_json(plan)
        return
    console = _output.stdout()
    console.print(
        f"{found.name} at scale {found.scale}, seeds {', '.join(map(str, found.seeds))}: "
        f"{plan['cells']} cells from {plan['warm_ups']} warm-ups, {plan['steps']:,} steps"
    )
    _lines(data["settings"] + show.differences(data))
    table = _table("row", "what", "defense", "counterpart")
    for row in data["rows"]:
        counterpart = f"none: {row['missing']}" if row["missing"] else "yes"
        table.add_row(str(row["number"]), show.what(row), show.defense(row), counterpart)
    console.print(table, markup=False)


def _print(data: Mapping[str, Any]) -> None:
    console = _output.stdout()
    columns, signs = show.brief(data), show.signs(data)
    console.print(f"{data['name']} at scale {data['scale']}: {data['title']}")
    _lines(data["settings"] + show.differences(data))
    console.print("\npublished above ours; all metrics are in --json and --write")
    table = _table("row", "what", *(title for title, _, _ in columns), *signs, "verdict")
    for row in data["rows"]:
        numbers = [
            f"{show.published(row, m, style)}\n{show.own(row, m, style)}" for _, m, style in columns
        ]
        judged = [show.sign(row, name).replace(" / ", "\n") for name in signs]
        defense = f"\nvs {row['defense']}" if row["defense"] else ""
        table.add_row(
            str(row["number"]), show.what(row) + defense, *numbers, *judged, show.verdict(row)
        )
    console.print(table, markup=False)
    console.print()
    _lines(show.summary(data))
    _lines(f"note: {note}" for note in data["notes"])
    _lines(show.problems(data))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
