"""The rules of submissions: their ids with what to do about a breach, limits, and tolerances.

`leaderboards/RULES.md` says the same in words; a test compares the two.
"""

from __future__ import annotations

import unicodedata
from dataclasses import asdict, dataclass
from typing import Literal

PROTOCOL = 1
"""Version of these rules; an entry that was made under another one is packed again."""

RULES = {
    "file-kind": "submit plain files in plain folders; 'submit pack' writes them",
    "file-name": "take it out: an entry holds what 'submit pack' writes, and nothing else",
    "file-missing": "pack the runs again",
    "file-size": "pack the runs again; larger records are not taken",
    "file-read": "make it readable",
    "format": "pack the runs again; do not edit what 'submit pack' wrote",
    "text": "write plain text",
    "entry": "mend entry.yaml",
    "protocol": "pack the runs again with this version",
    "cell-missing": "run this cell, and pack again",
    "cell-extra": "take the cell out of the entry",
    "cell-name": "pack the runs again",
    "cell-invalid": "find out why the run failed, run it again, and pack again",
    "settings": "run with --track alone; only seeds, mode and device are free",
    "identity": "pack the runs again; do not edit what 'submit pack' wrote",
    "code": "run all cells with one version of the code, and pack again",
    "threat": "run again: the attackers follow from settings and seed, and are not chosen",
    "events": "pack the runs again; do not edit what 'submit pack' wrote",
    "numbers": "pack the runs again: numbers follow from the events",
    "baseline": "run all cells of a seed with the same --out and --resume, and pack again",
    "plausible": "run again; if it happens again, open an issue with the record",
    "false-bans": "tune the defense: more than 1 % false bans without an attack disqualify",
    "verification": "remove verification.json: it is written by who verifies",
}
"""Id of a rule to the remedy."""

SMALL_FILE = 256 * 1024  # bytes of entry.yaml, config.json, result.json, verification.json
EVENTS_FILE = 4 * 1024**2  # bytes of events.jsonl.gz
EVENTS = 16 * 1024**2  # bytes of the events of a cell
ALL_EVENTS = 512 * 1024**2  # bytes of the events of an entry
ROWS = 100_000  # events of a cell
ROW = 128 * 1024  # bytes of an event
CELLS = 500  # cells of an entry
FINDINGS = 1000  # findings of an entry; who has more mends these first
STRING = 8192  # characters of a string
DEPTH = 12  # nesting of JSON and YAML
YAML_FILE = 16 * 1024  # bytes of entry.yaml: its parser is slow

LOSS_SAME = 1e-3  # nats per token: a cell run again by equal code
LOSS_OTHER = 0.01  # nats per token: by other code or versions
F1_OTHER = 6.0  # percent: by other code or versions

Level = Literal["self-reported", "checked", "reproduced"]


@dataclass(frozen=True, order=True)
class Finding:
    """A breach of a rule.

    Attributes:
        place: file below the folder of the entry, or a run, with the key or the row.
        rule: id in `RULES`.
        what: what is wrong.
        remedy: what to do.
    """

    place: str
    rule: str
    what: str
    remedy: str

    def data(self) -> dict[str, str]:
        """Return it JSON-able."""
        return asdict(self)


class RefusedError(Exception):
    """Something in a submission that cannot be read; becomes a finding."""

    def __init__(self, rule: str, what: str, place: str = "") -> None:
        super().__init__(what)
        self.rule = rule
        self.place = place


def finding(place: str, rule: str, what: str, remedy: str = "") -> Finding:
    """Return a finding that can be printed, whatever the names in it are made of."""
    return Finding(shown(place, 200), rule, shown(what, 400), remedy or RULES[rule])


def shown(text: str, longest: int) -> str:
    """Return text of a submission on one line, with what is not printable as escapes, cut."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: longest + 1])
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def odd(text: str) -> bool:
    """Tell whether text holds what should not be shown: controls, invisible or unpaired signs."""
    if text.isascii() and text.isprintable():
        return False
    kinds = {unicodedata.category(c) for c in text}
    return not kinds.isdisjoint({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
