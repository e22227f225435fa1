"""What an entry says of itself, and how far it has been verified."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sentinel_bench.submit._files import ENTRY, FOLDER, VERIFICATION, Files, opened
from sentinel_bench.submit._strict import read_json, read_yaml
from sentinel_bench.submit.rules import (
    F1_OTHER,
    LOSS_OTHER,
    LOSS_SAME,
    Finding,
    Level,
    RefusedError,
)

Text = Annotated[str, StringConstraints(max_length=500)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Kind = Literal["defense", "attack"]
T = TypeVar("T", bound=BaseModel)
ABOUT = ("what", "who", "contact", "paper", "licence")
"""What the submitter fills in."""
RESERVED = "results"
"""The folder of a board's own results."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PluginPackage(_Strict):
    """The distribution that holds what was measured."""

    package: Text
    version: Text


class Entry(_Strict):
    """The content of `entry.yaml`.

    Attributes:
        name: of the entry, and of its folder.
        subject: the defense, or the attack, as tables name it.
        what, who, contact, paper, licence: `ABOUT`, in words; `paper` may be "none".
        level: what the submitter may say of it.
    """

    schema_: Literal[1] = Field(alias="schema")
    protocol: int
    track: Text
    name: Name
    kind: Kind
    subject: Text
    what: Text
    who: Text
    contact: Text
    paper: Text
    licence: Text
    plugin: PluginPackage
    level: Literal["self-reported"]


class Numbers(_Strict):
    """What is compared of a cell. `bans`: stage, replica and step of each, sorted."""

    outcome: Literal["defended", "broken", "invalid"]
    f1: float | None
    validation_loss: float | None
    bans: list[list[int]]


class Rerun(_Strict):
    """A cell that was run again.

    Attributes:
        cell: name of its folder.
        code: digest of engine and plugins of the new run.
        differing: keys of the identity that differ from the submitted one; none: equal code.
        submitted, found: the two.
        agrees: whether they are equal within the tolerances.
    """

    cell: str
    code: str
    differing: list[str]
    submitted: Numbers
    found: Numbers
    agrees: bool


class Verification(_Strict):
    """The content of `verification.json`.

    Attributes:
        entry: digest of the cells that it is about.
        seed: with that digest, it draws the cells that are run again.
        cells: number of cells that can be drawn.
        reruns: those that were run again.
        when: UTC, as ISO 8601.
        provenance: versions and machine kind.
    """

    schema_: Literal[1] = Field(alias="schema")
    protocol: int
    entry: str
    level: Level
    seed: int
    cells: int
    reruns: list[Rerun]
    when: str
    provenance: dict[str, Any]


def level_of(reruns: list[Rerun], cells: int) -> Level:
    """Return what follows from the cells that were run again, of so many."""
    if not reruns or not all(rerun.agrees for rerun in reruns):
        return "self-reported"
    return "reproduced" if len({rerun.cell for rerun in reruns}) >= cells else "checked"


def agree(submitted: Numbers, found: Numbers, same_code: bool) -> bool:
    """Tell whether a cell that was run again is the same within the tolerances.

    With equal code: the same bans at the same steps, and nearly the same loss. Else: nearly the
    same F1 and loss.
    """
    one, other = submitted.validation_loss, found.validation_loss
    if "invalid" in (submitted.outcome, found.outcome) or (one is None) != (other is None):
        return False
    apart = abs(one - other) if one is not None and other is not None else 0.0
    if same_code:
        return submitted.bans == found.bans and apart <= LOSS_SAME
    f1 = abs((submitted.f1 or 0.0) - (found.f1 or 0.0))
    return f1 <= F1_OTHER and apart <= LOSS_OTHER


def read_entry(files: Files) -> Entry:
    """Read `entry.yaml`.

    Raises:
        RefusedError: it is missing, cannot be read, or a field of it is.
    """
    return _built(Entry, read_yaml(files.read(ENTRY)), "entry")


def read_verification(files: Files) -> Verification | None:
    """Read `verification.json`; None if there is none.

    Raises:
        RefusedError: it cannot be read, or a field of it.
    """
    if VERIFICATION not in files.seen:
        return None
    return _built(Verification, read_json(files.read(VERIFICATION)), "verification")


def digest_of(files: Files) -> str:
    """Return the sha256 (hex) of all files of the cells; equal content has an equal digest.

    Raises:
        RefusedError: a file cannot be read.
    """
    total = hashlib.sha256()
    for name in sorted(files.seen):
        if name.startswith(f"{FOLDER}/"):
            total.update(f"{name} {hashlib.sha256(files.read(name)).hexdigest()}\n".encode())
    return total.hexdigest()


class Standing(_Strict):
    """What a board says of an entry. `level`: with the number of cells that were run again."""

    name: str
    kind: Kind
    subject: str
    level: str


def standing(folder: Path) -> Standing:
    """Return what a board says of an entry; nothing in it is recomputed.

    A verification of other content than that of the folder counts for nothing.

    Raises:
        ConfigError: there is no such folder.
        ValueError: the entry cannot be read.
    """
    with opened(folder) as files:
        if isinstance(files, Finding):
            raise ValueError(files.what)
        try:
            entry, verification = read_entry(files), read_verification(files)
            text = "self-reported"
            if verification is not None and verification.entry == digest_of(files):
                level = level_of(verification.reruns, verification.cells)
                again = f" ({len(verification.reruns)} of {verification.cells} cells run again)"
                text = level + again * (level == "checked")
        except RefusedError as error:
            raise ValueError(f"{ENTRY}: {error}") from error
    return Standing(name=folder.name, kind=entry.kind, subject=entry.subject, level=text)


def _built(model: type[T], values: Any, rule: str) -> T:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, e['loc'])) or 'content'}: {e['msg']}" for e in error.errors()[:8]
        ]
        raise RefusedError(rule, "; ".join(wrong)) from error
