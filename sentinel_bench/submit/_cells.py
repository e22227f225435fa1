"""The cells of an entry: which a track asks for, and whether a record is of one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sentinel_bench import registry, tracks
from sentinel_bench.attacks import ATTACKS
from sentinel_bench.config import Cell, Component, flatten
from sentinel_bench.provenance import digest
from sentinel_bench.soundness import attackers_of
from sentinel_bench.submit._entry import Kind, Numbers

Row = Mapping[str, Any]
_KEPT = ("baseline", "ban", "eval", "cost")


@dataclass(frozen=True, order=True)
class Key:
    """A place in the table of a track. `mode`: "" without an attack, "update" for weights."""

    seed: int
    attack: str
    mode: str
    protection: str

    def __str__(self) -> str:
        mode = f" ({self.mode})" if self.mode else ""
        return f"{self.attack}{mode} against {self.protection}, seed {self.seed}"


@dataclass(frozen=True)
class Record:
    """A cell with what was recorded of it.

    Attributes:
        place: its folder, for findings.
        config: with `cell`, `identity`, `digest`, `defense`, `commands`.
        cell: `config["cell"]`.
        events: without the statistics of flags.
        result: as it was stored.
        size: bytes of the events.
    """

    place: str
    config: dict[str, Any]
    cell: Cell
    events: list[Any]
    result: dict[str, Any]
    size: int

    @property
    def key(self) -> Key:
        """Its place in the table."""
        scenario, attack = self.cell.scenario, self.cell.attack
        rows = attackers_of(self.events)
        mode: str = scenario.threat.mode
        if attack.name == "none":
            mode = ""
        elif rows and all(row.get("mode") == "update" for row in rows):
            mode = "update"
        return Key(scenario.seeds.model, attack.label(), mode, self.cell.protection)

    @property
    def name(self) -> str:
        """The name that its folder has in an entry."""
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", self.cell.label)[:100]
        return f"{label}_{self.config['digest'][:12]}"

    def slim(self, sound: bool) -> Record:
        """Return it without the events that nothing but its own checks needs."""
        warm = self.cell.scenario.train.warmup_steps
        kept = [
            row
            for row in self.events
            if row.get("type") == "start"
            or (sound and row["type"] in _KEPT)
            or (sound and row["type"] == "step" and row["step"] < warm)
        ]
        return replace(self, events=kept)


def row_of(record: Record, kind: str) -> Row:
    """Return the event of a kind of which a sound record has one."""
    row: Row = next(row for row in record.events if row["type"] == kind)
    return row


def numbers_of(record: Record) -> Numbers:
    """Return what is compared of a cell that is run again."""
    scores = record.result["scores"]
    bans = [[r["stage"], r["replica"], r["step"]] for r in record.events if r["type"] == "ban"]
    return Numbers(
        outcome=scores["outcome"],
        f1=scores["f1"],
        validation_loss=scores["validation_loss"],
        bans=sorted(bans),
    )


def baseline(seed: int) -> Key:
    """Return the cell that all others of a seed are compared with."""
    return Key(seed, "none", "", "none")


def complete(track: str, kind: Kind, subject: str, on_weights: bool = False) -> list[Key]:
    """Return the cells that an entry must have, in order.

    A defense is run against all attacks of the track, an attack against no defense, those with
    settings for the track and the default one; both beside the baseline, with all seeds and modes.

    Args:
        track: its name.
        kind, subject: what the entry is about, the subject as tables name it.
        on_weights: whether the subject is an attack on weights, which has no mode.

    Raises:
        ConfigError: there is no such track.
    """
    told = tracks.get(track)
    if kind == "defense":
        attacks = [Component.parse(text) for text in told.attacks]
        rows = [
            (a.label(), mode, subject) for a in attacks for mode in _modes(told, a, known(a.name))
        ]
    else:
        modes = ["update"] if on_weights else [str(mode) for mode in told.modes]
        defenses = dict.fromkeys(["none", *told.defenses, tracks.DEFENSE])
        rows = [(subject, mode, defense) for mode in modes for defense in defenses]
    return [
        key for seed in told.seeds for key in (baseline(seed), *(Key(seed, *row) for row in rows))
    ]


def _modes(track: tracks.Track, attack: Component, on_weights: bool) -> list[str]:
    if attack.name == "none":
        return [""]
    return ["update"] if on_weights else [str(mode) for mode in track.modes]


def known(attack: str) -> bool:
    """Tell whether an attack is one on weights, as far as this package knows."""
    return attack in ATTACKS and registry.attacks.get(attack).axis == "weights"


def only_weights(attack: str, keys: Iterable[Key]) -> bool:
    """Tell whether an attack, as tables name it, is one on weights: known, or by its cells."""
    name = attack.partition(":")[0]
    if name in ATTACKS:
        return known(name)
    modes = {key.mode for key in keys if key.attack == attack}
    return modes == {"update"}


def packages_of(subject: str) -> list[str]:
    """Return the distributions that a defense with its aggregator, or an attack, is from."""
    names = [part.partition(":")[0] for part in subject.split(" + ")]
    return [name.partition("/")[0] for name in names if "/" in name] or ["sentinel-bench"]


def foreign(track: str, cell: Cell) -> list[str]:
    """Return the dotted keys in which a cell leaves its track, with what the track says.

    Raises:
        ConfigError: there is no such track.
    """
    told, scenario = tracks.get(track), cell.scenario
    base = tracks.scenario(track, {})
    ours, theirs = flatten(base.model_dump(mode="json")), flatten(scenario.model_dump(mode="json"))
    keys = tracks.deviations(base, scenario) + ["track"] * (scenario.track != track)
    found = [f"{key} is {theirs.get(key)!r}, and {ours[key]!r} in the track" for key in keys]
    if scenario.threat.mode not in told.modes and cell.attack.name != "none":
        found.append(f"threat.mode is {scenario.threat.mode!r}, and one of {told.modes}")
    seeds = set(scenario.seeds.model_dump().values())
    if len(seeds) > 1 or not seeds <= set(told.seeds):
        found.append(f"seeds are {scenario.seeds.model_dump()}; all three are one of {told.seeds}")
    tuned = tracks.tuned(track, cell.defense)
    if cell.tuned != tuned:
        found.append(f"tuned is {cell.tuned}, and {tuned} in the track")
    return found


def codes(record: Record) -> Iterator[tuple[str, str]]:
    """Yield what must be equal in all cells of an entry: a name for it, and its value."""
    identity = record.config["identity"]
    for name in ("engine", "data", "versions"):
        yield name, _short(identity.get(name))
    yield "device", record.cell.scenario.device
    for kind in ("attack", "defense", "aggregator"):
        plugin = identity.get(kind, {})
        code = _code(plugin) if kind == "attack" else plugin
        yield f"{kind} {plugin.get('name')}", _short(code)


def _code(plugin: Row) -> dict[str, Any]:
    """Return what stands for the code of a plugin and of those that it wraps."""
    return {
        "source": plugin.get("source"),
        "version": plugin.get("version"),
        "wraps": [_code(inner) for inner in plugin.get("wraps", [])],
    }


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else digest({"value": value})[:12]


def mixed(records: Iterable[Record]) -> Iterator[tuple[Record, str]]:
    """Yield the records whose code is not that of the first one, with what differs."""
    first: dict[str, tuple[str, str]] = {}
    for record in records:
        for name, value in codes(record):
            told, place = first.setdefault(name, (value, record.place))
            if told != value:
                yield record, f"{name} is {value}, and {told} in {place}"


def of_subject(kind: Kind, subject: str, cell: Cell) -> bool:
    """Tell whether a cell is about the subject of an entry: its baselines are not."""
    return subject == (cell.protection if kind == "defense" else cell.attack.label())


def subjects(kind: Kind, cells: Sequence[Cell]) -> list[str]:
    """Return what cells could be about, each once."""
    labels = {c.protection if kind == "defense" else c.attack.label() for c in cells}
    return sorted(labels - {"none"})
