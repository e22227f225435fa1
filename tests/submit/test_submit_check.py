"""What a check finds: forged numbers, settings, attackers and events, whatever is made to fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel_bench.errors import ConfigError
from sentinel_bench.submit import check
from sentinel_bench.submit._files import Files, opened
from sentinel_bench.submit._record import compare
from sentinel_bench.submit.rules import SMALL_FILE, RefusedError

Change = Callable[[Any], None]


def rules(folder: Path) -> set[str]:
    return {found.rule for found in check(folder).findings}


def whats(folder: Path) -> str:
    return "\n".join(f"{f.place}: {f.rule}: {f.what}" for f in check(folder).findings)


def test_an_entry_of_real_runs_is_accepted(packed: Path) -> None:
    report = check(packed)
    assert report.findings == []
    assert len(report.records) == 4
    assert report.entry is not None and report.entry.subject == "cascade"


def numbers(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(tree, dict):
        return [p for key, value in tree.items() for p in numbers(value, (*path, key))]
    return [path]


def test_every_stored_value_is_recomputed(entry: Path, forge: Any) -> None:
    cell = forge("delay-vs-cascade")
    paths = [p for p in numbers(cell.result) if p[0] != "provenance"]
    assert len(paths) > 50
    for path in paths:
        at = cell.result
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = 1 if at[path[-1]] is None else None
    cell.save(rescored=False)
    found = [f for f in check(entry).findings if f.rule == "numbers"]
    assert {f.place.partition(": ")[2] for f in found} == {".".join(path) for path in paths}


@pytest.mark.parametrize(
    "stored, fresh, keys",
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": True}, {"a": 1}, ["a"]),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, []),
        ({"a": 0.3001}, {"a": 0.3}, ["a"]),
        ({"a.b": 1}, {"a": {"b": 1}}, ["a", "a.b"]),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, ["a.b"]),
        ({}, {"a": None}, ["a"]),
    ],
)
def test_values_are_compared_with_their_kinds(stored: Any, fresh: Any, keys: list[str]) -> None:
    assert [key for key, _ in compare(stored, fresh)] == keys


def late_ban(cell: Any) -> None:
    ban = cell.of("ban")[0]
    cell.events.remove(ban)
    ban["step"] += 1
    cell.events.insert(cell.events.index(cell.step(ban["step"])), ban)


def harmless(cell: Any) -> None:
    cell.of("tamper")[0]["signals"] = 1


def drop_flag(cell: Any) -> None:
    cell.events.remove(cell.of("flag")[0])


def drop_attacker(cell: Any) -> None:
    """The attacker was never there: neither it nor anything that follows from it."""
    cell.events[0]["attackers"] = []
    gone = ("act", "flag", "ban", "tamper", "amnesty")
    cell.events = [row for row in cell.events if row["type"] not in gone]
    for row in cell.of("step"):
        row |= {"flagged": [0, 0], "checked": [sum(row["checked"]), 0], "tampered": 0}


def drop_act(cell: Any) -> None:
    """The attacker was there, and did nothing: then it has not been missed."""
    cell.events = [r for r in cell.events if r["type"] not in ("act", "flag", "ban", "tamper")]
    for row in cell.of("step"):
        row |= {"flagged": [0, 0], "checked": [sum(row["checked"]), 0], "tampered": 0}


def other_attacker(cell: Any) -> None:
    for row in (*cell.events[0]["attackers"], *cell.events):
        if row.get("replica") is not None:
            row["replica"] = (row["replica"] + 1) % 4


def late_attacker(cell: Any) -> None:
    cell.events[0]["attackers"][0]["start"] += 1


def ban_unflagged(cell: Any) -> None:
    at = cell.events.index(cell.step(50))
    cell.events.insert(
        at, {"type": "ban", "step": 50, "stage": 1, "replica": 0, "reason": "violations"}
    )


def act_after_ban(cell: Any) -> None:
    ban = cell.of("ban")[0]
    step = ban["step"] + 1
    row = {"type": "flag", "step": step, "stage": ban["stage"], "replica": ban["replica"]}
    row |= {"direction": "activation", "tampered": False}
    cell.step(step)["flagged"][0] += 1
    cell.events.insert(cell.events.index(cell.step(step)), row)


def set_eval(loss: Any) -> Change:
    return lambda cell: cell.of("eval")[0].update(loss=loss)


def set_step(number: int, **values: Any) -> Change:
    return lambda cell: cell.step(number).update(values)


def set_start(**values: Any) -> Change:
    return lambda cell: cell.events[0].update(values)


def swap_steps(cell: Any) -> None:
    i, j = (cell.events.index(cell.step(n)) for n in (40, 41))
    cell.events[i], cell.events[j] = cell.events[j], cell.events[i]


def set_baseline(**values: Any) -> Change:
    return lambda cell: cell.of("baseline")[0].update(values)


def new_kind(cell: Any) -> None:
    cell.events.insert(5, {"type": "note", "step": 3, "text": "trust me"})


def new_field(cell: Any) -> None:
    cell.step(3)["note"] = "trust me"


FORGERIES: dict[str, tuple[Change, str]] = {
    "a ban is moved": (late_ban, "events"),
    "an attacker did less": (harmless, "events"),
    "a flag is taken out": (drop_flag, "events"),
    "there is no attacker": (drop_attacker, "threat"),
    "an attacker never acts": (drop_act, "plausible"),
    "another worker attacks": (other_attacker, "threat"),
    "an attacker starts late": (late_attacker, "threat"),
    "somebody is banned without a flag": (ban_unflagged, "events"),
    "somebody is flagged after its ban": (act_after_ban, "events"),
    "a loss below zero": (set_eval(-1.0), "events"),
    "a loss that is better than undisturbed": (set_eval(1.0), "plausible"),
    "a loss that is no number": (set_eval(True), "cell-invalid"),
    "a step in no time": (set_step(45, seconds=0.0), "events"),
    "steps longer than the run": (set_step(45, seconds=1e6), "events"),
    "more flagged than there are flags": (set_step(45, checked=[50, 0], flagged=[2, 0]), "events"),
    "more checked than is sent": (set_step(45, checked=[5000, 0]), "events"),
    "a check in the warm-up": (set_step(5, checked=[1, 0]), "events"),
    "a warm-up of its own": (set_step(5, loss=6.0), "plausible"),
    "other tokens": (set_start(tokens_per_step=10**6), "events"),
    "a shorter run": (set_start(steps=59), "cell-invalid"),
    "a larger grid": (set_start(replicas=5), "events"),
    "steps out of order": (swap_steps, "events"),
    "a baseline that was worse": (set_baseline(validation_loss=7.5), "baseline"),
    "a baseline that was slower": (set_baseline(tokens_per_second=1e-3), "baseline"),
    "a baseline of another cell": (set_baseline(digest="0" * 64), "baseline"),
    "an event of an unknown kind": (new_kind, "events"),
    "an event with an unknown field": (new_field, "events"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_record_is_found_though_its_numbers_fit(
    name: str, entry: Path, forge: Any
) -> None:
    change, rule = FORGERIES[name]
    cell = forge("delay-vs-cascade")
    change(cell)
    cell.save()
    found = check(entry).findings
    assert rule in {f.rule for f in found}, whats(entry)
    assert all(f.place.startswith("cells/delay-vs-cascade") for f in found)
    assert "numbers" not in {f.rule for f in found}


def settings(cell: Any) -> None:
    for tree in (cell.config["cell"], cell.config["identity"]):
        tree["scenario"]["train"]["batch_size"] = 3


def own_seed(cell: Any) -> None:
    for tree in (cell.config["cell"], cell.config["identity"]):
        tree["scenario"]["seeds"]["model"] = 7


def tuned(cell: Any) -> None:
    cell.config["cell"]["tuned"] = {"violations": 2}


def parameters(cell: Any) -> None:
    cell.config["identity"]["defense"]["params"]["violations"] = 1
    cell.config["defense"]["violations"] = 1


def weak_attack(cell: Any) -> None:
    cell.config["cell"]["attack"]["params"]["steps"] = 1
    cell.config["identity"]["attack"]["params"]["steps"] = 1


def renamed_attack(cell: Any) -> None:
    cell.config["identity"]["attack"]["name"] = "zeros"


def weaker_in_secret(cell: Any) -> None:
    cell.config["identity"]["attack"]["params"]["steps"] = 1


def engine(cell: Any) -> None:
    cell.config["identity"]["engine"] = "0" * 64


def source(cell: Any) -> None:
    cell.config["identity"]["defense"]["source"] = "0" * 64


def extra(cell: Any) -> None:
    cell.config["note"] = 1


IDENTITIES: dict[str, tuple[Change, str]] = {
    "other settings": (settings, "settings"),
    "a seed of one's own": (own_seed, "settings"),
    "settings that the track does not have": (tuned, "settings"),
    "parameters that the cell does not name": (parameters, "identity"),
    "a weaker attack": (weak_attack, "cell-extra"),
    "another attack": (renamed_attack, "identity"),
    "a weaker attack in secret": (weaker_in_secret, "identity"),
    "another engine": (engine, "code"),
    "another defense": (source, "code"),
    "a field of one's own": (extra, "identity"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_forged_identity_is_found_though_its_digest_fits(
    name: str, entry: Path, forge: Any
) -> None:
    change, rule = IDENTITIES[name]
    cell = forge("delay-vs-cascade")
    change(cell)
    cell.save(redigested=True)
    assert rule in rules(entry), whats(entry)


def test_a_digest_that_is_not_of_the_identity_is_found(entry: Path, forge: Any) -> None:
    cell = forge("delay-vs-cascade")
    cell.config["digest"] = cell.config["digest"][::-1]
    cell.save()
    assert {"identity", "cell-name"} <= rules(entry)


def test_events_of_one_cell_do_not_pass_for_those_of_another(entry: Path, forge: Any) -> None:
    one, other = forge("delay-vs-cascade"), forge("zeros-vs-cascade")
    one.events, other.events = other.events, one.events
    one.save()
    other.save()
    assert "threat" in rules(entry)


def test_missing_cells_are_named_one_by_one(entry: Path, forge: Any) -> None:
    for label in ("zeros-vs-cascade", "none-vs-none"):
        folder = forge(label).folder
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    found = [f.what for f in check(entry).findings if f.rule == "cell-missing"]
    assert sorted(found) == [
        "none against none, seed 0",
        "zeros (activation) against cascade, seed 0",
    ]


def test_false_bans_without_an_attack_disqualify(entry: Path, forge: Any) -> None:
    cell = forge("none-vs-cascade")
    rows = [
        {"type": "flag", "step": step, "stage": 1, "replica": 0, "direction": "activation"}
        | {"tampered": False}
        for step in range(40, 45)
    ]
    for row in rows:
        step = cell.step(row["step"])
        step["flagged"][0] += 1
        cell.events.insert(cell.events.index(step), row)
    ban = {"type": "ban", "step": 44, "stage": 1, "replica": 0, "reason": "violations"}
    cell.events.insert(cell.events.index(cell.step(44)), ban)
    cell.save()
    assert rules(entry) == {"false-bans"}, whats(entry)


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"name": "other"}, "entry"),
        ({"track": "smoky"}, "entry"),
        ({"protocol": 0}, "protocol"),
        ({"level": "reproduced"}, "entry"),
        ({"who": ""}, "entry"),
        ({"who": "A\u202eB"}, "text"),
        ({"who": "x" * 9000}, "text"),
        ({"subject": "sentinel"}, "cell-missing"),
        ({"subject": "c\u0430scade"}, "text"),
        ({"kind": "attack"}, "cell-missing"),
        ({"plugin": {"package": "evil", "version": "1"}}, "entry"),
        ({"plugin": {"package": "sentinel-bench", "version": "9"}}, "entry"),
        ({"code": "import os"}, "entry"),
    ],
)
def test_what_an_entry_says_of_itself_is_checked(
    changes: dict[str, Any], rule: str, entry: Path
) -> None:
    path = entry / "entry.yaml"
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | changes, allow_unicode=True))
    assert rule in rules(entry), whats(entry)


def test_a_file_that_cannot_be_read_is_a_finding(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == "result.json":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    found = [f for f in check(entry).findings if f.rule == "file-read"]
    assert len(found) == 4 and found[0].what == "cannot be read: permission denied"


def test_no_folder_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened as a folder"):
        check(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be opened as a folder"):
        check(tmp_path / "file")


def test_a_link_to_an_entry_is_none(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(packed)
    assert rules(tmp_path / "mine") == {"file-kind"}


@pytest.mark.parametrize("swap", ["link", "hard link", "pipe", "larger", "linked folder", "gone"])
def test_what_is_swapped_after_it_was_listed_is_not_read(
    swap: str, entry: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "result.json"
    secret.write_text("{}")
    with opened(entry) as files:
        assert isinstance(files, Files)
        name = f"cells/{files.cells[0]}/result.json"
        path = entry / name
        assert files.read(name) == path.read_bytes()
        path.unlink()
        if swap == "link":
            path.symlink_to(secret)
        elif swap == "hard link":
            path.hardlink_to(secret)
        elif swap == "pipe":
            os.mkfifo(path)
        elif swap == "larger":
            path.write_bytes(b" " * (SMALL_FILE + 1))
        elif swap == "linked folder":
            path.parent.rename(tmp_path / "away")
            path.parent.symlink_to(tmp_path)
        with pytest.raises(RefusedError):
            files.read(name)
