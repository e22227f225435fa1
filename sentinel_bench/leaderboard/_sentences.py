"""What the leaderboards hold about one attack or one defense, in a line for each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from sentinel_bench.leaderboard._cost import price

Row = Mapping[str, Any]


def measured(
    kind: Literal["attack", "defense"], name: str, tracks: Row, headlines: Sequence[str]
) -> list[str]:
    """Return one line for each track, mode and parameter setting; none if nothing was measured.

    A defense has one more line for each track and parameter setting, over all attacks, and one for
    what it costs.

    Args:
        kind: of the plugin.
        name: of the plugin, without parameters.
        tracks: as `summarize` returns them.
        headlines: the defenses, without parameters, against which an attack is shown.
    """
    lines = []
    for track, content in tracks.items():
        found = (
            _attacked(name, content, headlines) if kind == "attack" else _defended(name, content)
        )
        for setting, words, text in found:
            place = f"{track} [{setting}]" if len(content["settings"]) > 1 else track
            lines.append(f"{', '.join([place, *filter(None, words)])}: {text}")
    return lines


def _attacked(
    name: str, content: Row, headlines: Sequence[str]
) -> Iterator[tuple[int, list[str], str]]:
    """Yield the number of the setting, mode, parameters and seeds, and the numbers."""
    cells: dict[tuple[int, str, str], dict[str, Row]] = {}
    for row in content["rows"]:
        label, params = _split(row["attack"])
        if label == name and row["defense"] in ("none", *headlines):
            cells.setdefault((row["setting"], row["mode"], params), {})[row["defense"]] = row
    for (setting, mode, params), found in sorted(cells.items()):
        seeds = max(row["n"] for row in found.values())
        parts = []
        if "none" in found:
            parts.append(f"{_harm(found['none'])} unprotected{_rest(found['none'], seeds)}")
        for defense in (d for d in headlines if d in found):
            row = found[defense]
            recall = "" if name == "none" else f"recall {_mean(row, 'recall')}, "
            f1 = "" if name == "none" else f"F1 {_mean(row, 'f1')}, "
            bans = f"false bans {_mean(row, 'false_bans')}{_rest(row, seeds)}"
            harm = _harm(row).removeprefix("excess loss " if parts and name != "none" else "")
            parts.append(f"under {defense} {harm}, {recall}{f1}{bans}")
        yield setting, [mode, params, _count(seeds, "seed")], "; ".join(parts)


def _defended(name: str, content: Row) -> Iterator[tuple[int, list[str], str]]:
    """Yield the number of the setting, parameters and mode, and the numbers."""
    for worth in content["defenses"]:
        label, params = _split(worth["defense"])
        if label != name:
            continue
        key, setting = (worth["defense"], worth["setting"]), worth["setting"]
        rows = [row for row in content["rows"] if (row["defense"], row["setting"]) == key]
        yield setting, [params], _overall(worth, rows)
        for cost in content["costs"]:
            if (cost["defense"], cost["setting"]) == key:
                yield setting, [params], f"cost {price(cost)}"
        attacks = [row for row in rows if row["attack"] != "none"]
        for mode in sorted({row["mode"] for row in attacks}):
            chosen = [row for row in attacks if row["mode"] == mode]
            seeds = _count(max(row["n"] for row in chosen), "seed")
            places = [params, mode, _count(len(chosen), "attack"), seeds]
            yield setting, places, _over_attacks(chosen)
        for text in sorted({text for row in rows for text in row["tuned"]}):
            yield setting, [params], f"measured with the settings found for this track, {text}"


def _overall(worth: Row, rows: Sequence[Row]) -> str:
    unseen, recall = worth["undetected"], worth["damage_weighted_recall"]
    parts = [
        f"damage-weighted recall {_plain(recall)} over {_count(worth['attacks'], 'attack')}",
        f"largest undetected damage {_signed(unseen['damage'])}"
        + (f" ({unseen['attack']})" if unseen["attack"] else ""),
    ]
    if unseen["diverged"]:
        parts.append(f"made the model diverge unseen: {', '.join(unseen['diverged'])}")
    parts += [
        f"without an attack, false bans {_mean(row, 'false_bans')}"
        for row in rows
        if row["attack"] == "none" and row["n"]
    ]
    return "; ".join(parts)


def _over_attacks(rows: Sequence[Row]) -> str:
    """Return mean and worst over the attacks of a mode."""
    f1, loss = _known(rows, "f1"), _known(rows, "excess_loss")
    parts = []
    if f1:
        lowest = min(sorted(f1), key=f1.__getitem__)
        parts.append(
            f"mean F1 {_plain(fmean(f1.values()))}, lowest {_plain(f1[lowest])} ({lowest})"
        )
    if loss:
        worst = max(sorted(loss), key=loss.__getitem__)
        parts.append(f"largest excess loss {_signed(loss[worst])} ({worst})")
    lost = sorted(row["attack"] for row in rows if row["diverged"])
    if lost:
        parts.append(f"the model diverged under {', '.join(lost)}")
    return "; ".join(parts) or "no valid run"


def _known(rows: Sequence[Row], metric: str) -> dict[str, float]:
    means = {row["attack"]: row["metrics"][metric]["mean"] for row in rows}
    return {attack: mean for attack, mean in means.items() if mean is not None}


def _harm(row: Row) -> str:
    """Return what a run cost, in words."""
    if not row["n"]:
        return "no valid run"
    if row["attack"] == row["defense"] == "none":
        return f"validation loss {_plain(row['metrics']['validation_loss']['mean'], 3)}"
    excess, lost = row["metrics"]["excess_loss"]["mean"], row["diverged"]
    if excess is None and lost:
        return "diverged"
    part = f" ({lost} of {row['n']} diverged)" if lost else ""
    return f"excess loss {_signed(excess)}{part}"


def _rest(row: Row, seeds: int) -> str:
    """Return the success of a backdoor, and fewer seeds than in the other part of the line."""
    success, base = (
        row["metrics"][name]["mean"] for name in ("attack_success_rate", "attack_success_base")
    )
    text = "" if success is None else f", attack success {_plain(success)} (before {_plain(base)})"
    return text + (f" ({_count(row['n'], 'seed')})" if row["n"] < seeds else "")


def _mean(row: Row, metric: str) -> str:
    return _plain(row["metrics"][metric]["mean"])


def _plain(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{round(value, digits):.12g}"


def _signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.3f}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _split(label: str) -> tuple[str, str]:
    name, _, params = label.partition(":")
    return name, params
