"""Options that several commands share: the scenario, attacks and defenses, how cells are run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
import yaml

from sentinel_bench import plugins, tracks
from sentinel_bench.config import (
    Component,
    Frozen,
    Mode,
    Scenario,
    build,
    check,
    merge,
    parse_value,
    set_dotted,
)
from sentinel_bench.data.corpora import CORPORA, find_corpus
from sentinel_bench.errors import ConfigError, nearest
from sentinel_bench.placement import Link, Order, Placement

SHORT = {
    "mode": "threat.mode",
    "fraction": "threat.fraction",
    "schedule": "threat.schedule",
    "model": "model.preset",
    "stages": "grid.stages",
    "replicas": "grid.replicas",
    "steps": "train.steps",
    "warmup": "train.warmup_steps",
    "batch_size": "train.batch_size",
    "microbatches": "train.microbatches",
    "seq_len": "train.seq_len",
    "lr": "train.lr",
    "model_seed": "seeds.model",
    "data_seed": "seeds.data",
    "threat_seed": "seeds.threat",
    "on_crash": "faults.on_crash",
    "deadline": "faults.deadline",
    "device": "device",
}
"""Option to the setting that it sets."""

_HELP = {
    "mode": "activation, gradient or both",
    "fraction": "share of malicious replicas in each open stage",
    "schedule": "at-once, waves, random-start, single or rate",
    "model": "model preset",
    "stages": "pipeline stages",
    "replicas": "replicas of each stage",
    "steps": "training steps",
    "warmup": "honest steps without verification",
    "batch_size": "sequences per worker and step",
    "microbatches": "parts of a worker's batch, which cross the pipeline one after the other",
    "seq_len": "tokens per sequence",
    "lr": "peak learning rate",
    "model_seed": "seed of the first weights",
    "data_seed": "seed of the batches",
    "threat_seed": "seed of the ground truth",
    "on_crash": "a message that is lost: end (the run) or ban (its sender)",
    "deadline": "seconds that a receiver waits for a message; later ones are lost",
    "device": "cpu or cuda",
}


class RunFile(Frozen):
    """What a YAML file may hold beside the keys of a scenario."""

    track: str | None = None
    attack: str | list[str] = []
    defense: str | list[str] = []
    scenario: dict[str, Any] = {}


def plugin_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--plugin`, which makes the plugins of single files known before any name is looked up.

    Commands need not know of it: what was given is what `plugins.in_use` says.
    """
    option: Callable[..., Callable[..., Any]] = click.option(
        "--plugin",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE.py",
        is_eager=True,
        expose_value=False,
        callback=lambda context, option, files: plugins.use(files),
        help="file with plugins, then called FILE/NAME; repeatable",
    )
    return option(command)


def scenario_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a scenario to a click command."""
    options: list[Callable[..., Any]] = [
        click.option("--track", help=f"named scenario to start from  [default: {tracks.DEFAULT}]"),
        click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            help="YAML file with keys of the scenario, attack and defense",
        ),
        click.option("--data", help="corpus name, or a text file, folder or glob"),
        *(
            click.option(f"--{name.replace('_', '-')}", name, help=_HELP[name], metavar="VALUE")
            for name in SHORT
        ),
        click.option("--seeds", help="e.g. 0-2 or 0,3: each for model, data and threat alike"),
        click.option(
            "--set", "settings", multiple=True, metavar="KEY=VALUE", help="any other setting"
        ),
        plugin_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def cell_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add attacks, defenses and the options of a scenario to a click command."""
    command = scenario_options(command)
    for kind in ("defense", "attack"):
        default = f"  [default: {tracks.DEFENSE}]" if kind == "defense" else ""
        text = f"NAME or NAME:key=value,...; repeatable{default}"
        command = click.option(f"--{kind}", f"{kind}s", multiple=True, help=text)(command)
    return command


def execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add where cells are recorded, how they are run, and what is printed, to a click command."""
    return placed(Path("runs"))(command)


def placed(out: Path | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what adds the options of execution; `out` is the default folder."""
    options = [
        click.option(
            "--out", type=click.Path(path_type=Path), default=out, show_default=out is not None,
            help="folder of the run folders",
        ),
        click.option(
            "--threads", type=click.IntRange(1), help="threads of torch  [default: its choice]"
        ),
        click.option(
            "--processes", type=click.IntRange(1), metavar="N",
            help="spread the stages over N processes here; under torchrun it is their number"
            "  [default: 1]",
        ),
        click.option(
            "--replica-groups", type=click.IntRange(1), default=1, metavar="D",
            help="of the N processes: D pipelines side by side, each with a share of the replicas",
        ),
        click.option(
            "--order", type=click.Choice(get_args(Order)), default="gpipe", show_default=True,
            help="in which order a process works on its microbatches",
        ),
        click.option(
            "--chunks", type=click.IntRange(1), default=1,
            help="segments of stages in each process, for --order interleaved",
        ),
        click.option(
            "--link", metavar="RATE,DELAY", help="slow network between processes: 80mbps,50ms"
        ),
        click.option(
            "--timeout", type=click.FloatRange(1), default=300.0, show_default=True,
            help="seconds without progress after which processes are given up",
        ),
        click.option(
            "--dry-run", is_flag=True, help="print the resolved configuration and stop"
        ),
        click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table"),
    ]  # fmt: skip

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def placement(options: dict[str, Any]) -> Placement:
    """Return where stages and replicas are.

    Raises:
        ConfigError: torchrun has started another number of processes, or an option cannot be read.
    """
    size = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    given = options["processes"]
    if size is not None and given not in (None, int(size)):
        raise ConfigError(f"torchrun has started {size} processes: leave --processes {given} out")
    values = {
        "processes": int(size or given or 1),
        "groups": options["replica_groups"],
        "order": options["order"],
        "chunks": options["chunks"],
        "link": Link.parse(options["link"]) if options["link"] else None,
        "timeout": options["timeout"],
        "torchrun": size is not None,
    }
    return build(Placement, values, "processes")


def usual_jobs(processes: int = 1) -> int:
    """Return how many cells to run at a time: each CPU has one process."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def read_file(path: Path | None) -> RunFile:
    """Read a YAML file of settings.

    Raises:
        ConfigError: it cannot be read, is not a mapping, or has an unknown key.
    """
    if path is None:
        return RunFile()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, for example 'attack: delay'")
    known = [*Scenario.model_fields, "attack", "defense"]
    unknown = [
        f"unknown key {key!r}{nearest(str(key), known)}" for key in content.keys() - {*known}
    ]
    if unknown:
        raise ConfigError(f"{path}: {'; '.join(sorted(unknown))}")
    own = {key: content.pop(key) for key in ("track", "attack", "defense") if key in content}
    check(Scenario, content, str(path))
    return build(RunFile, {**own, "scenario": content}, str(path))


def resolve_scenarios(file: RunFile, options: dict[str, Any]) -> tuple[str, list[Scenario]]:
    """Return the name of the track and the scenario once for each seed.

    Flags win over the file, the file over the track.

    Raises:
        ConfigError: an unknown track, key, value or corpus.
    """
    from sentinel_bench.suite import with_seeds

    track = options["track"] or file.track or tracks.DEFAULT
    changes: dict[str, Any] = {}
    for name, key in SHORT.items():
        if options[name] is not None:
            option = f"--{name.replace('_', '-')} {options[name]}"
            set_dotted(changes, key, parse_value(options[name], option))
    if options["data"] is not None:
        changes["data"] = _corpus(options["data"])
    _set_all(changes, options["settings"])
    scenario = tracks.scenario(track, merge(file.scenario, changes))
    find_corpus(scenario.data)
    if options["seeds"] is None:
        return track, [scenario]
    if "seeds" in changes:
        raise ConfigError("--seeds sets all three seeds: leave out --model-seed and its kin")
    return track, with_seeds(scenario, parse_seeds(options["seeds"]))


def changed(track: str, settings: Sequence[str], device: str | None) -> Scenario:
    """Return the scenario of a track with `--set` and `--device` laid on it.

    Raises:
        ConfigError: an unknown track, key, value or corpus.
    """
    changes: dict[str, Any] = {} if device is None else {"device": device}
    _set_all(changes, settings)
    scenario = tracks.scenario(track, changes)
    find_corpus(scenario.data)
    return scenario


def _set_all(changes: dict[str, Any], settings: Sequence[str]) -> None:
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} is not KEY=VALUE, for example train.lr=1e-3")
        set_dotted(changes, key.strip(), parse_value(value, f"--set {setting}"))


def modes(given: Sequence[str]) -> list[Mode]:
    """Read `--mode`.

    Raises:
        ConfigError: an unknown mode.
    """
    known: tuple[Mode, ...] = get_args(Mode)
    for text in given:
        if text not in known:
            raise ConfigError(f"--mode {text}: one of {', '.join(known)}{nearest(text, known)}")
    return [mode for mode in known if mode in given]


def parse_seeds(text: str) -> list[int]:
    """Read `0-2`, `3` or `0,2,5-7`.

    Raises:
        ConfigError: it is none of these.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", part.strip(), re.ASCII)
        if match is None:
            raise ConfigError(f"--seeds {text!r}: write a number, 0-2 or 0,3")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers = range(first, last + 1)
        if not numbers or last >= 2**32 or len(numbers) > 1000:
            raise ConfigError(f"--seeds {text!r}: {part.strip()!r} is no range of seeds")
        seeds += numbers
    return list(dict.fromkeys(seeds))


def components(given: Sequence[str], from_file: str | list[str]) -> list[Component]:
    """Return the components named by flags, else by the file; each once."""
    texts = list(given) or ([from_file] if isinstance(from_file, str) else from_file)
    return list({c.label(): c for c in map(Component.parse, texts)}.values())


def chosen(file: RunFile, options: dict[str, Any]) -> tuple[list[Component], list[Component]]:
    """Return the attacks and the defenses named by flags, else by the file, else the default one.

    Raises:
        ConfigError: there is no attack, or one is not `name:key=value`.
    """
    attacks = components(options["attacks"], file.attack)
    defenses = components(options["defenses"], file.defense)
    if not attacks:
        raise ConfigError(
            "name at least one --attack ('none' is one); see 'sentinel-bench list attacks'"
        )
    return attacks, defenses or [Component(name=tracks.DEFENSE)]


def tuned(track: str, scenario: Scenario, defenses: Sequence[Component]) -> dict[str, Any]:
    """Return the settings that the track has found for each defense, by name.

    Says so on stderr where they were found for other settings than those of the scenario.
    """
    found = {d.name: tracks.tuned(track, d) for d in defenses}
    foreign = {d.name for d in defenses if found[d.name] and "values" not in d.params}
    for name in sorted(foreign) if scenario.track != track else ():
        click.echo(
            f"note: {name} uses the fences found for track {track}; for other settings, "
            f"'sentinel-bench calibrate' finds others",
            err=True,
        )
    return found


def _corpus(text: str) -> dict[str, Any]:
    """Return the settings for `--data`: a name, or a path if there is one or it looks like one."""
    looks_like_path = any(char in text for char in "/\\*?.~") or Path(text).exists()
    if text in CORPORA or not looks_like_path:
        return {"name": text, "path": None}
    return {"path": str(Path(text).expanduser())}
