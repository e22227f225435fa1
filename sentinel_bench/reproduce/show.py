"""A compared table in words: columns, cells and sentences, for the terminal and for documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sentinel_bench.reproduce.agreement import SIGNS

Data = Mapping[str, Any]

COLUMNS = (  # title, metric, format
    ("precision", "precision", ".1f"),
    ("recall", "recall", ".1f"),
    ("F1", "f1", ".1f"),
    ("found after", "detection_steps", ".1f"),
    ("loss", "val_loss", ".3f"),
    ("excess", "excess", "+.3f"),
    ("loss, no defense", "val_loss_unprotected", ".3f"),
    ("excess, no defense", "excess_unprotected", "+.3f"),
    ("tokens/s, relative", "tps", "g"),
    ("clean perplexity", "perplexity_clean", ".2f"),
    ("attacked", "perplexity_attacked", ".2f"),
    ("defended", "perplexity_defended", ".2f"),
)
_RELATIVE = {"tps": ".2f"}
"""Format of ours where it has another unit than the published number."""
BRIEF = (
    "f1",
    "val_loss",
    "excess",
    "excess_unprotected",
    "tps",
    "perplexity_clean",
    "perplexity_attacked",
)
"""Metrics that a terminal has room for; the loss only where there is no excess loss."""
_VERDICTS = {
    "agrees": "agrees",
    "differs": "differs",
    "unclear": "cannot be said",
    None: "not judged",
}
WORDS = {True: "yes", False: "no", None: "?"}
ORDER_NAMES = {"excess_unprotected": "excess loss without defense", "f1": "F1", "tps": "throughput"}


def columns(data: Data) -> list[tuple[str, str, str]]:
    """Return the columns that some row prints: title, metric, format."""
    return [c for c in COLUMNS if any(c[1] in row["published"] for row in data["rows"])]


def brief(data: Data) -> list[tuple[str, str, str]]:
    """Return those of them that a terminal has room for."""
    found = [column for column in columns(data) if column[1] in BRIEF]
    excess = any(metric == "excess" for _, metric, _ in found)
    return [column for column in found if not (excess and column[1] == "val_loss")]


def signs(data: Data) -> list[str]:
    """Return the signs that some row is judged by."""
    return [
        name
        for name in SIGNS
        if any(row["signs"]["published"].get(name) is not None for row in data["rows"])
    ]


def what(row: Data) -> str:
    """Say what a row is: what it prints of its settings, mode, attack and defense."""
    parts = [f"{key} {value}" for key, value in row["settings"].items()]
    if row["attack"]:
        mode = row["mode"] if row["mode"] and row["mode"] != row["attack"] else ""
        parts.append(f"{row['attack']} {f'({mode})' if mode else ''}".strip())
    return ", ".join(parts)


def defense(row: Data) -> str:
    """Return the defense of our cell, "-" where there is no cell."""
    return "-" if row["missing"] else row["defense"] or "none"


def published(row: Data, metric: str, style: str) -> str:
    """Return a published number, with its standard deviation if there is one."""
    value = row["published"].get(metric)
    if value is None:
        return "-"
    spread = row["published"].get(f"{metric}_std")
    return format(value, style) + ("" if spread is None else f" ± {spread:{style}}")


def own(row: Data, metric: str, style: str) -> str:
    """Return our mean with half its interval, and how many seeds it lacks."""
    if row["own"] is None:
        return "-"
    found, style = row["own"][metric], _RELATIVE.get(metric, style)
    if found["mean"] is None:
        return "diverged" if found["diverged"] else "-"
    text = format(found["mean"], style)
    if found["half"] is not None:
        text += f" ± {found['half']:{style.lstrip('+')}}"
    return f"{text}, {found['diverged']} diverged" if found["diverged"] else text


def sign(row: Data, name: str) -> str:
    """Return a sign of both, empty where the paper says nothing."""
    told = row["signs"]["published"].get(name)
    if told is None:
        return "-"
    ours = (row["signs"]["own"] or {}).get(name)
    return f"{WORDS[told]} / {WORDS[ours] if row['own'] is not None else '-'}"


def verdict(row: Data) -> str:
    """Return the verdict on a row, or why there is none."""
    if row["missing"]:
        return f"no counterpart: {row['missing']}"
    return _VERDICTS[row["verdict"]]


def summary(data: Data) -> list[str]:
    """Return sentences that say how far both agree."""
    counts = data["counts"]
    others = {"not judged": counts["not_judged"], "no counterpart": counts["no_counterpart"]}
    more = "".join(f", {word} {n}" for word, n in others.items() if n)
    lines = [f"Rows ({counts['rows']}): {_tally(counts)}{more}."]
    lines += [f"Sign {name}: {_tally(found)}." for name, found in counts["signs"].items()]
    for name, one in data["order"].items():
        tau = "not defined" if one["tau"] is None else f"{one['tau']:+.2f} (p = {one['p']:.2g})"
        word = _VERDICTS[one["verdict"]]
        lines.append(f"Order of {ORDER_NAMES[name]}: tau {tau} over {one['rows']} rows: {word}.")
    return lines


def _tally(counts: Data) -> str:
    return (
        f"agree {counts['agrees']}, differ {counts['differs']}, cannot be said {counts['unclear']}"
    )


def differences(data: Data) -> list[str]:
    """Return in what counterparts differ from what was published, each once."""
    notes = dict.fromkeys(row["note"] for row in data["rows"] if row["note"])
    if data["scale"] == "tiny":
        stand_in = (
            "a tiny stand-in: another model, corpus, grid and length than published; so signs and "
            "order can be compared, and no absolute number"
        )
        return [stand_in, *notes, *tuned(data["rows"])]
    return [*notes, *tuned(data["rows"])]


def tuned(rows: Sequence[Data]) -> list[str]:
    """Return the settings of defenses that come from the track."""
    found = {
        row["defense"].partition(" + ")[0].partition(":")[0]: row["tuned"]
        for row in rows
        if row["tuned"]
    }
    return [f"settings of the track for {name}: {json.dumps(v)}" for name, v in found.items()]


def seeds(data: Data) -> str:
    """Return the seeds as the command line takes them: 0-2, or 0,3."""
    found: list[int] = data["seeds"]
    first, last = found[0], found[-1]
    if len(found) > 1 and found == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, found))


def problems(data: Data) -> list[str]:
    """Return what is missing, row by row."""
    return [
        f"row {row['number']}, {what(row)}: {problem}"
        for row in data["rows"]
        for problem in row["problems"]
    ]
