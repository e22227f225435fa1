"""Every number of a run, recomputed from its events alone.

Workers: positive = banned; truth = an attacker whose first corrupted signal (`act`) came no later
than its ban. An attacker that was banned before it acted is honest here, and its ban a false one.

* precision, recall, f1: percent, scikit-learn. Nobody acted: 100/100/100 without a ban, and
  0/100/0 with one (nothing was missed, everything banned was wrong).
* harm_weighted_recall: percent; recall in which each attacker counts by its harm per step, signals
  x size / (steps from its first act to its ban or the last step, inclusive). `size` is its mean of
  |sent - x| / (|sent - x| + |x|), 1 for silence, 0 for an honest signal that is late. 100 where
  nobody acted; None in records without `tamper` rows, and where nobody did harm.
* false_bans_per_1000: false bans per 1000 worker-steps = honest workers x steps after warm-up.
* detection_steps: ban step - act step + 1 over the attackers that acted and were banned.
* validation_loss, perplexity: the last evaluation. excess_loss: less that of the paired run with
  no attack and no defense; None without one, and for a run that ended early.
* undetected_damage: excess_loss if recall < 50, else 0.
* attack_success_rate, attack_success_base: percent, how often a backdoor's trigger is followed by
  its target, at the end and after the honest warm-up; mean over the triggers, None without one.
* tokens_per_second: tokens trained after warm-up over the seconds of these steps, those included
  that everybody would have waited for a late worker (`waited`, pipeline/transport.py). What a rank
  contributes while it is left out, and a step that is skipped, do not count. relative_tps: over
  that of the paired run; one measurement of one run, so benchmarks/step.py is the better guide.
* extra_flops: floating-point operations that the defense and the aggregator add to a step, as a
  share of those of a plain one (1: twice the work); extra_bytes: what travels between machines
  because of them, per step; both counted in honest steps, as pipeline/cost.py says; None in records
  without a `cost` row. state_bytes: memory that the defense keeps from step to step.
* traffic: bytes that the processes of the run have sent each other per step, by kind; None in one
  process.
* capacity: smallest share of workers not banned, over the stages, at the end.
* flags: signals checked and flagged, by ground truth; the two rates lie in [0, 1].
* attackers (planned), acted, banned, false_bans, skipped_steps, amnesties: counts.

Outcome, with its reason:

* invalid: the run says nothing, because a party failed, a simulated fault ended it, it was cut off,
  rows are missing or contradict each other, or its baseline diverged. All numbers are None.
* broken: the final loss is not finite, excess_loss is above DAMAGE_TOLERANCE, capacity is below
  CAPACITY_FLOOR (a defense that bans the network away does not defend it), or nobody acted and
  more than FALSE_BAN_TOLERANCE of the workers were banned.
* defended: everything else.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel_bench.soundness import (
    Row,
    Worker,
    attackers_of,
    finite,
    is_number,
    planned,
    problem,
    rows_of,
    start_of,
    worker_of,
)

if TYPE_CHECKING:
    from sentinel_bench.config import Scenario

DAMAGE_TOLERANCE = 0.05  # nats per token
CAPACITY_FLOOR = 0.5  # share of the workers of the thinnest stage
FALSE_BAN_TOLERANCE = 0.01  # share of the workers, where nobody acted
RECALL_FLOOR = 50.0  # percent; damage below it went undetected

METRICS = (
    *("precision", "recall", "harm_weighted_recall", "f1"),
    *("attackers", "acted", "banned", "false_bans"),
    *("false_bans_per_1000", "detection_steps_mean", "detection_steps_median"),
    *("validation_loss", "perplexity", "excess_loss", "undetected_damage", "diverged"),
    *("attack_success_rate", "attack_success_base"),
    *("tokens_per_second", "relative_tps", "capacity", "skipped_steps", "amnesties"),
    *("extra_flops", "extra_bytes", "state_bytes", "traffic"),
)
FLAGS = (
    *("honest_checked", "honest_flagged", "tampered_checked", "tampered_flagged"),
    *("false_flag_rate", "true_flag_rate"),
)


def score(events: Sequence[Row]) -> dict[str, Any]:
    """Return outcome, reason and all metrics of the module docstring, JSON-able, without NaN."""
    scores: dict[str, Any] = dict.fromkeys(METRICS) | {"flags": dict.fromkeys(FLAGS)}
    wrong = problem(events)
    if wrong is not None:
        return {"outcome": "invalid", "reason": wrong, **scores}
    scores |= _workers(events) | _speed(events) | _cost(events)
    scores |= _signals(events) | _backdoor(events)
    scores |= _damage(events, scores["recall"])
    reasons = _broken(events, scores)
    outcome = "broken" if reasons else "defended"
    return {"outcome": outcome, "reason": "; ".join(reasons) or None, **scores}


def result(config: Row, events: Sequence[Row], provenance: Row) -> dict[str, Any]:
    """Return the content of `result.json`.

    Args:
        config: of the run folder: `cell` (a dumped `Cell`), `digest`, optionally `commands`.
        events: all rows of the run.
        provenance: from `record.provenance`.
    """
    from sentinel_bench.config import Component, Scenario
    from sentinel_bench.provenance import digest

    cell = config["cell"]
    # settings that the record is too old to know were at their defaults
    whole = Scenario.model_validate(cell["scenario"])
    scenario = whole.model_dump(mode="json")
    seeds, track = scenario["seeds"], scenario["track"]
    mode, knowledge = _threat(events)
    return {
        "schema": 1,
        "digest": config["digest"],
        "finished": next((row.get("time") for row in events if row.get("type") == "end"), None),
        "cell": {
            "track": track,
            "attack": Component.model_validate(cell["attack"]).label(),
            "mode": mode or scenario["threat"]["mode"],
            "knowledge": knowledge,
            "defense": _protection(cell),
            "code": digest(_code(config.get("identity", {}))),
            "tuned": {} if "values" in cell["defense"]["params"] else cell.get("tuned", {}),
            "seeds": seeds,
            "scenario": scenario_digest(whole),
            "setting": {
                "model": scenario["model"]["preset"],
                "stages": scenario["grid"]["stages"],
                "replicas": scenario["grid"]["replicas"],
                "steps": scenario["train"]["steps"],
                "device": scenario["device"],
            },
        },
        "scores": score(events),
        "provenance": dict(provenance),
        "commands": list(config.get("commands", [])),
    }


def scenario_digest(scenario: Scenario) -> str:
    """Return what names a scenario in results: of all but its track, its seeds and its mode."""
    from sentinel_bench.config import FaultConfig
    from sentinel_bench.provenance import digest

    setting = scenario.model_dump(mode="json", exclude={"track": True, "seeds": True})
    del setting["threat"]["mode"]
    # as in results that are older than these settings
    if setting["faults"] == FaultConfig().model_dump(mode="json"):
        del setting["faults"]
    newer = {"microbatches": 1, "precision": "auto", "lr_decay_type": "linear"}
    setting["train"] = {k: v for k, v in setting["train"].items() if newer.get(k) != v}
    for key in ("pretrained", "revision"):
        if setting["model"][key] is None:
            del setting["model"][key]
    return digest(setting)


def _threat(events: Sequence[Row]) -> tuple[str, str]:
    """Return the mode of all attackers, "mixed" if they differ, and all that they know together.

    Empty where the record does not say.
    """
    from sentinel_bench.api import Knowledge, tier

    rows = attackers_of(events)
    modes = {row["mode"] for row in rows if "mode" in row}
    mode = "mixed" if len(modes) > 1 else "".join(modes)
    if not rows or any(not row.get("knowledge") for row in rows):
        return mode, ""
    words = {word for row in rows for word in row["knowledge"].split("+")}
    return mode, tier([known for known in Knowledge if known.value in words])


def _protection(cell: Row) -> str:
    from sentinel_bench.config import Component

    parts = [Component.model_validate(cell["defense"]).label()]
    aggregator = Component.model_validate(cell.get("aggregator", {"name": "mean"}))
    return " + ".join(parts if aggregator.name == "mean" else [*parts, aggregator.label()])


def _code(identity: Row) -> dict[str, Any]:
    """Return the parts of a cell's identity that stand for code: rows of two codes differ."""
    plugins = [identity.get(kind, {}) for kind in ("attack", "defense")]
    return {
        "engine": identity.get("engine"),
        "plugins": [[plugin.get("source"), plugin.get("version")] for plugin in plugins],
    }


def rescore(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Recompute the scores of a run folder and compare them with what its `result.json` says.

    Returns:
        The recomputed scores, and one line for each difference; none if all is equal.

    Raises:
        RunError: a file cannot be read.
    """
    from sentinel_bench.config import flatten
    from sentinel_bench.errors import RunError
    from sentinel_bench.record import CONFIG, read_config, read_events, read_result

    config, events = read_config(folder), read_events(folder)
    try:
        fresh = result(config, events, {})
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / CONFIG}: its cell cannot be read: {error!r}") from error
    stored = read_result(folder)
    if stored is None:
        return fresh["scores"], ["result.json is missing"]
    checked = ("schema", "digest", "finished", "cell", "scores")
    new, old = (flatten({k: r[k] for k in checked if k in r}) for r in (fresh, stored))
    missing = "nothing"
    return fresh["scores"], [
        f"{key}: stored {old.get(key, missing)}, recomputed {new.get(key, missing)}"
        for key in sorted(new.keys() | old.keys())
        if not _same(new.get(key, missing), old.get(key, missing))
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and is_number(b):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return type(a) is type(b) and bool(a == b)


# The numbers; the rows are known to be sound here.


def _verified(events: Sequence[Row]) -> list[Row]:
    warmup = start_of(events)["warmup_steps"]
    return [row for row in rows_of(events, "step") if row["step"] >= warmup]


def _ratio(part: float, whole: float) -> float | None:
    """Return part / whole, None where that is not a finite number."""
    quotient = part / whole if whole and math.isfinite(whole) else math.inf
    return quotient if math.isfinite(quotient) else None


def _workers(events: Sequence[Row]) -> dict[str, Any]:
    start, (acts, bans) = start_of(events), acts_and_bans(events)
    grid = [(s, r) for s in range(start["stages"]) for r in range(start["replicas"])]
    delays = [bans[worker] - step + 1 for worker, step in acts.items() if worker in bans]
    false_bans = len(bans.keys() - acts.keys())
    honest_steps = (len(grid) - len(acts)) * len(_verified(events))
    thinnest = max(Counter(stage for stage, _ in bans).values(), default=0)
    return {
        **_agreement([w in acts for w in grid], [w in bans for w in grid]),
        "harm_weighted_recall": _harm_weighted(events, acts, bans),
        "attackers": len(planned(start)),
        "acted": len(acts),
        "banned": len(bans),
        "false_bans": false_bans,
        "false_bans_per_1000": _ratio(1000 * false_bans, honest_steps),
        "detection_steps_mean": statistics.fmean(delays) if delays else None,
        "detection_steps_median": float(statistics.median(delays)) if delays else None,
        "capacity": (start["replicas"] - thinnest) / start["replicas"],
    }


def acts_and_bans(events: Sequence[Row]) -> tuple[dict[Worker, int], dict[Worker, int]]:
    """Return the first corrupted signal of each attacker that acted before its ban, and all bans.

    Both as worker to step.
    """
    bans = {worker_of(row): row["step"] for row in rows_of(events, "ban")}
    acts: dict[Worker, int] = {}
    for row in rows_of(events, "act"):
        acts[worker_of(row)] = min(row["step"], acts.get(worker_of(row), row["step"]))
    return {w: step for w, step in acts.items() if step <= bans.get(w, step)}, bans


def _agreement(truth: list[bool], banned: list[bool]) -> dict[str, float]:
    if not any(truth):
        wrong = any(banned)
        return {
            "precision": 0.0 if wrong else 100.0,
            "recall": 100.0,
            "f1": 0.0 if wrong else 100.0,
        }
    from sklearn.metrics import precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, banned, average="binary", pos_label=True, zero_division=0.0
    )
    percent = {"precision": precision, "recall": recall, "f1": f1}
    return {name: 100 * float(value) for name, value in percent.items()}


def _harm_weighted(
    events: Sequence[Row], acts: dict[Worker, int], bans: dict[Worker, int]
) -> float | None:
    tampers = {worker_of(row): row for row in rows_of(events, "tamper")}
    if not acts:
        return 100.0
    if not tampers:
        return None
    last = max((row["step"] for row in rows_of(events, "step")), default=0)
    harm = {
        worker: tampers[worker]["signals"]
        * tampers[worker]["size"]
        / (bans.get(worker, max(last, step)) - step + 1)
        for worker, step in acts.items()
    }
    found = math.fsum(harm[worker] for worker in acts.keys() & bans.keys())
    share = _ratio(found, math.fsum(harm.values()))
    return None if share is None else 100 * share


def _backdoor(events: Sequence[Row]) -> dict[str, Any]:
    rows = rows_of(events, "trigger")
    names = {"attack_success_rate": "rate", "attack_success_base": "base"}
    return {
        name: 100 * statistics.fmean(row[key] for row in rows) if rows else None
        for name, key in names.items()
    }


def _damage(events: Sequence[Row], recall: float) -> dict[str, Any]:
    loss, baseline = rows_of(events, "eval")[-1]["loss"], rows_of(events, "baseline")
    if not finite(loss):
        return {"diverged": True}
    ended_early = bool(rows_of(events, "exhausted"))
    paired = None if ended_early or not baseline else baseline[0]["validation_loss"]
    excess = None if paired is None else loss - paired
    excess = excess if finite(excess) else None
    undetected = excess if excess is None or recall < RECALL_FLOOR else 0.0
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = None
    return {
        "diverged": False,
        "validation_loss": loss,
        "perplexity": perplexity,
        "excess_loss": excess,
        "undetected_damage": undetected,
    }


def _speed(events: Sequence[Row]) -> dict[str, Any]:
    start, steps, baseline = start_of(events), _verified(events), rows_of(events, "baseline")
    seconds = sum(row["seconds"] for row in steps)
    ranks = start["replicas"]
    kept = sum(
        0.0 if row.get("skipped") is True else 1 - min(row["excluded"], ranks) / ranks
        for row in steps
    )
    tps = _ratio(start["tokens_per_step"] * kept, seconds)
    paired = baseline[0]["tokens_per_second"] if baseline else None
    relative = None if tps is None or paired is None else _ratio(tps, paired)
    return {"tokens_per_second": tps, "relative_tps": relative}


def _cost(events: Sequence[Row]) -> dict[str, Any]:
    cost = next(iter(rows_of(events, "cost")), None)
    return {
        "extra_flops": None if cost is None else _ratio(cost["flops"], cost["step_flops"]),
        "extra_bytes": None if cost is None else cost["bytes"],
        "state_bytes": start_of(events).get("state_bytes"),
        "traffic": next((dict(row["sent"]) for row in rows_of(events, "traffic")), None),
    }


def _signals(events: Sequence[Row]) -> dict[str, Any]:
    steps = rows_of(events, "step")
    honest, tampered = (sum(row["checked"][i] for row in steps) for i in (0, 1))
    false, true = (sum(row["flagged"][i] for row in steps) for i in (0, 1))
    counts = (honest, false, tampered, true, _ratio(false, honest), _ratio(true, tampered))
    return {
        "flags": dict(zip(FLAGS, counts, strict=True)),
        "skipped_steps": sum(row.get("skipped") is True for row in steps),
        "amnesties": len(rows_of(events, "amnesty")),
    }


def _broken(events: Sequence[Row], scores: Row) -> list[str]:
    start, excess = start_of(events), scores["excess_loss"]
    workers = start["stages"] * start["replicas"]
    reasons = []
    if scores["diverged"]:
        reasons.append("the final validation loss is not finite")
    exhausted = rows_of(events, "exhausted")
    for row in exhausted:
        whole = scores["capacity"] == 0
        reasons.append(f"all workers of stage {row['stage']} banned" if whole else "no rank left")
    if not exhausted and scores["capacity"] < CAPACITY_FLOOR:
        reasons.append(f"only {scores['capacity']:.1%} of the workers of a stage are left")
    if excess is not None and excess > DAMAGE_TOLERANCE:
        reasons.append(f"excess loss {excess:.3f} is above {DAMAGE_TOLERANCE}")
    if not scores["acted"] and scores["false_bans"] > FALSE_BAN_TOLERANCE * workers:
        reasons.append(f"{scores['false_bans']} of {workers} workers banned, though none attacked")
    return reasons
