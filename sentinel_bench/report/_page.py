"""The page of a run: what its template is given."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from sentinel_bench import __version__
from sentinel_bench.config import Scenario, flatten
from sentinel_bench.leaderboard import price
from sentinel_bench.report._numbers import count, number
from sentinel_bench.report._panels import REACH
from sentinel_bench.report._read import Partner, Run, steps_of
from sentinel_bench.report._statistics import DIRECTIONS, Statistics, payload
from sentinel_bench.report._workers import STATES, Fate, Grid, confusion, label_of

Row = dict[str, Any]

TILES = (
    ("precision", "precision", ".1f", "%"),
    ("recall", "recall", ".1f", "%"),
    ("f1", "F1", ".1f", "%"),
    ("false_bans", "false bans", "d", ""),
    ("detection_steps_mean", "steps until detection", ".1f", ""),
    ("excess_loss", "excess loss", "+.3f", "nats"),
    ("relative_tps", "tokens/s, relative", ".2f", "x"),
)
"""Score, its name, its format and its unit."""
MAX_ROWS = 200
"""Workers in the table."""


def page(
    run: Run,
    others: Sequence[Partner],
    grid: Grid | None,
    statistics: Statistics,
    figures: Mapping[str, bytes],
) -> str:
    """Return the HTML of a run.

    Args:
        run: what is reported.
        others: the runs that belong beside it, and itself.
        grid: what became of the workers, if the record says.
        statistics: over time.
        figures: name to SVG.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sentinel_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"number": number, "count": count}
    templates = files("sentinel_bench.report") / "templates"
    script = (templates / "explore.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        version=__version__,
        style=(templates / "style.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        figures={n: base64.b64encode(svg).decode() for n, svg in figures.items()},
        run=run,
        title=title_of(run),
        outcome=outcome(run),
        scenario=scenario(run),
        tiles=[(run.scores[key], *rest) for key, *rest in TILES],
        commands=commands(run),
        traced_command=traced_command(run),
        others=[_other(partner) for partner in others],
        grid=grid,
        states=STATES,
        confusion=confusion(grid) if grid else None,
        fates=[_fate(fate) for fate in grid.interesting()[:MAX_ROWS]] if grid else [],
        more=max(0, len(grid.fates) - MAX_ROWS) if grid else 0,
        statistics=statistics,
        directions=[d for d in DIRECTIONS if any(key[1] == d for key in statistics.flags)],
        reach=REACH,
        payload=payload(statistics, grid, steps_of(run)) if grid and statistics.names else None,
        price=price(run.scores),
        cost=next(iter(run.of("cost")), None),
        counts=_counts(run),
        provenance=provenance(run),
        settings=_settings(run),
    )


# Words and numbers.


def title_of(run: Run) -> str:
    """Return attack and defense with all their parameters."""
    return f"{run.cell.attack.label()} vs {run.cell.protection}"


def outcome(run: Run) -> tuple[str, str]:
    """Return the outcome for the style sheet, and in words with its reason."""
    found, reason = str(run.scores["outcome"]), run.scores["reason"]
    if found == "invalid":
        return found, f"Invalid: the run says nothing. {reason}"
    if run.cell.is_baseline and found == "defended":
        return found, "Baseline: no attack, no defense; the others are compared with it."
    words = {"defended": "Defended", "broken": "Broken"}[found]
    return found, f"{words}: {reason}." if reason else f"{words}."


def scenario(run: Run) -> str:
    """Return the scenario in one line."""
    s = run.cell.scenario
    shape = [f"hidden {s.model.hidden_size}"] * (s.model.hidden_size is not None)
    threat = (
        []
        if run.cell.attack.name == "none"
        else [
            f"{100 * s.threat.fraction:g} % of the replicas of {_stages(s)} malicious",
            f"{s.threat.mode}, {s.threat.schedule}",
        ]
    )
    seeds = f"seeds model {s.seeds.model}, data {s.seeds.data}, threat {s.seeds.threat}"
    return "; ".join(
        [
            f"track {s.track}",
            " ".join([s.model.preset, *shape]),
            f"{s.grid.stages} stages x {s.grid.replicas} replicas",
            f"{s.train.steps} steps ({s.train.warmup_steps} warm-up)",
            f"{s.train.batch_size} x {s.train.seq_len} tokens a worker and step",
            str(s.data.path or s.data.name),
            *threat,
            seeds,
            s.device,
        ]
    )


def _stages(s: Scenario) -> str:
    first, *rest = s.open_stages or [s.threat.honest_first]
    return f"stages {first} to {rest[-1]}" if rest else f"stage {first}"


def commands(run: Run) -> list[str]:
    """Return what the user had typed."""
    given = run.config.get("commands")
    return [str(command) for command in given] if isinstance(given, list) else []


def traced_command(run: Run) -> str:
    """Return the command that gives the trace."""
    for command in commands(run):
        try:
            words = shlex.split(command)
        except ValueError:
            continue
        if words[1:2] == ["run"]:
            kept = [word for word in words if word not in ("--resume", "--trace")]
            return shlex.join([*kept, "--trace"])
    attack, defense = run.cell.attack.label(), run.cell.defense.label()
    return shlex.join(
        ["sentinel-bench", "run", "--attack", attack, "--defense", defense, "--trace"]
    )


# Tables.


def _other(partner: Partner) -> Row:
    run = partner.run
    return {
        "role": partner.role,
        "why": partner.why,
        "self": partner.self,
        "folder": run.folder.resolve().name if run else None,
        "scores": run.scores if run else None,
        "loss": run.validation_loss if run else None,
    }


def _fate(fate: Fate) -> Row:
    attacker = fate.attacker
    return {
        "fate": fate,
        "attack": label_of(attacker) if attacker else "",
        "mode": str(attacker.get("mode", "")) if attacker else "",
        "start": attacker.get("start") if attacker else None,
    }


def _counts(run: Run) -> list[tuple[str, int]]:
    return sorted(Counter(str(row["type"]) for row in run.rows).items())


def provenance(run: Run) -> dict[str, str]:
    """Return what made the run, by name."""
    identity = run.config["identity"]
    source = run.result.get("provenance") if run.result else None
    start, end = run.start or {}, next(iter(run.of("end")), {})
    found = {
        "digest": run.config["digest"],
        "started": start.get("time"),
        "finished": end.get("time"),
        "seconds": number(end.get("seconds"), ".1f") if end else None,
        "status": end.get("status", "no end event"),
        "engine": identity.get("engine"),
        "data": identity.get("data"),
    }
    for kind in ("attack", "defense", "aggregator"):
        own = identity.get(kind)
        if isinstance(own, Mapping):
            found[f"{kind} source"] = own.get("source")
    for name, own in (("versions", identity.get("versions")), ("machine", source)):
        if isinstance(own, Mapping):
            found |= {f"{name}: {key}": value for key, value in flatten(own).items()}
    return {key: str(value) for key, value in found.items() if value is not None}


def _settings(run: Run) -> dict[str, str]:
    """Return all settings of the cell and of the defense with its defaults, by dotted name."""
    cell = run.cell.model_dump(mode="json")
    defense = run.config.get("defense")
    resolved = {"defense (resolved)": defense} if isinstance(defense, Mapping) else {}
    return {key: str(value) for key, value in flatten({**cell, **resolved}).items()}
