"""`sentinel-bench compare`: two runs, or two sets of results, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from sentinel_bench.cli import _output
from sentinel_bench.leaderboard._read import NUMBERS

Row = Mapping[str, Any]
LONGEST = 60  # characters of a name or a value


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", type=click.Choice(NUMBERS),
    help="of sets; repeatable  [default: f1, excess_loss, undetected_damage, false_bans]",
)  # fmt: skip
@click.option(
    "--top", type=click.IntRange(1), default=10, show_default=True,
    help="of sets: how many cells are shown of each metric",
)  # fmt: skip
@click.option(
    "--force", is_flag=True,
    help="of sets: match cells by attack, mode and defense alone, whatever their track and setting",
)  # fmt: skip
@click.option("--fail-on-difference", is_flag=True, help="exit status 1 if a number differs")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of text")
def compare(
    a: Path,
    b: Path,
    metrics: tuple[str, ...],
    top: int,
    force: bool,
    fail_on_difference: bool,
    as_json: bool,
) -> int:
    """Compare two run folders, or two sets of results; differences are those of B to A.

    A set is a folder of runs or results, or a board.json. Its cells are matched by attack, mode,
    defense and setting, and paired by seed.

    Exit status: 0, with --fail-on-difference 1 if a number but speed differs or a cell is missing,
    2 if something cannot be read.
    """
    from sentinel_bench import compare as comparing

    found = comparing.compare(a, b, metrics=metrics or comparing.METRICS, force=force)
    if as_json:
        _output.print_json(found)
    else:
        for side in "ab":
            click.echo(f"{side.upper()}: {_text(found[side], 1000)}")
        click.echo()
        _print_runs(found) if found["kind"] == "runs" else _print_sets(found, top)
    return 1 if fail_on_difference and found["differs"] else 0


# Two runs.


def _print_runs(found: Row) -> None:
    _print_table("settings", ("setting", "A", "B"), [
        (item["key"], _value(item["a"]), _value(item["b"])) for item in found["settings"]
    ])  # fmt: skip
    apart = [item for item in found["scores"] if not item["equal"]]
    _print_table("scores", ("score", "A", "B", "difference"), [
        (item["name"], _value(item["a"]), _value(item["b"]), _number(item["difference"], "+.6g"))
        for item in apart
    ])  # fmt: skip
    click.echo(_losses(found["losses"]))
    click.echo(_bans(found["bans"]))


def _losses(losses: Row) -> str:
    text = f"losses: of {losses['steps']} steps"
    if losses["first"] is None:
        text += ", all equal"
    else:
        first = losses["first"]
        text += (
            f", {losses['apart']} differ, first step {first['step']}: {_value(first['a'])} and "
            f"{_value(first['b'])}"
        )
    if losses["at"] is not None:
        text += f"; at most by {losses['largest']:.6g}, step {losses['at']}"
    alone = [f"{losses[key]} steps only in {key[-1].upper()}" for key in ("only_a", "only_b")
             if losses[key]]  # fmt: skip
    return "; ".join([text, *alone])


def _bans(bans: Row) -> str:
    parts = [f"{bans['equal']} equal"]
    for key in ("only_a", "only_b"):
        workers = [f"stage {w['stage']} replica {w['replica']} at {w['step']}" for w in bans[key]]
        if workers:
            parts.append(f"only in {key[-1].upper()}: {', '.join(workers)}")
    moved = [f"stage {w['stage']} replica {w['replica']} at {w['a']} and {w['b']}"
             for w in bans["moved"]]  # fmt: skip
    if moved:
        parts.append(f"at other steps: {', '.join(moved)}")
    return f"bans: {'; '.join(parts)}"


# Two sets.


def _print_sets(found: Row, top: int) -> None:
    for name in dict.fromkeys(item["metric"] for item in found["differences"]):
        items = [item for item in found["differences"] if item["metric"] == name]
        apart = [item for item in items if not item["equal"]]
        _print_table(
            f"{name}: {len(apart)} of {len(items)} cells differ",
            ("attack", "mode", "defense", "seeds", "A", "B", "difference", ""),
            [
                (
                    *(_text(item[key]) for key in ("attack", "mode", "defense")),
                    str(item["difference"]["n"]),
                    *(_number(item[side], ".4g") for side in "ab"),
                    _spread(item["difference"]),
                    "*" * bool(item["decided"]) + f" {item['lost']} lost" * bool(item["lost"]),
                )
                for item in apart[:top]
            ],
            more=len(apart) - top,
        )
    click.echo(
        f"{found['cells']} cells matched; {found['decided']} of {found['intervals']} intervals do "
        f"not hold 0 (*), and about {found['by_chance']:.1f} would not by chance alone"
    )
    _print_lines("ended otherwise", map(_ending, found["outcomes"]), top)
    for side in "ab":
        rows = [_seeds(cell, f"only_{side}") for cell in found["seeds"] if cell[f"only_{side}"]]
        _print_lines(f"seeds only in {side.upper()}", rows, top)
        _print_lines(f"cells only in {side.upper()}", map(_cell, found[f"only_{side}"]), top)
    for side, problems in found["problems"].items():
        for problem in problems:
            click.echo(f"left out of {side.upper()}: {_text(problem, 400)}", err=True)


def _ending(cell: Row) -> str:
    ends = [", ".join(f"{n} {_text(how)}" for how, n in cell[side].items()) for side in "ab"]
    return f"{_cell(cell)}: {ends[0]} in A, {ends[1]} in B"


def _seeds(cell: Row, key: str) -> str:
    return f"{_cell(cell)}: {', '.join('/'.join(map(str, seeds)) for seeds in cell[key])}"


def _cell(cell: Row) -> str:
    mode = f" ({_text(cell['mode'])})" if cell["mode"] else ""
    place = f", {_text(cell['track'])} {_text(cell['scenario'], 13)}" if cell["track"] else ""
    return f"{_text(cell['attack'])}{mode} against {_text(cell['defense'])}{place}"


# Text.


def _print_lines(title: str, lines: Iterable[str], top: int) -> None:
    rows = list(lines)
    if rows:
        click.echo(f"\n{title}: {len(rows)}")
    for row in rows[:top]:
        click.echo(f"  {row}")
    if len(rows) > top:
        click.echo(f"  and {len(rows) - top} more; --top shows them")


def _print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], more: int = 0
) -> None:
    if not rows:
        click.echo(f"{title}{'' if ':' in title else ': no difference'}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    click.echo(title)
    _output.stdout().print(table)
    if more > 0:
        click.echo(f"and {more} more; --top shows them")
    click.echo()


def _spread(found: Row) -> str:
    text = _number(found["mean"], "+.4g")
    return text if found["half"] is None else f"{text} ± {found['half']:.4g}"


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.8g}"
    return "-" if value is None else _text(str(value))


def _text(text: str, longest: int = LONGEST) -> str:
    from sentinel_bench.submit.rules import shown

    return shown(text, longest)
