"""Where the stages and replicas of a run are: in one process, or in several.

Placement changes no number of a run, so it is no part of a cell's identity. No torch here.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field

from sentinel_bench import registry
from sentinel_bench.config import Cell, Frozen, Scenario, build
from sentinel_bench.errors import ConfigError

Order = Literal["gpipe", "1f1b", "interleaved"]
"""In which order a process works on its microbatches: the schedules of torch's pipelining."""

_RATES = {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Link(Frozen):
    """A slow network between two processes.

    Attributes:
        rate: bits per second; None: as fast as it is.
        delay: seconds from one end to the other.
    """

    rate: float | None = Field(None, gt=0)
    delay: float = Field(0.0, ge=0)

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read `80mbps,50ms`, `80mbps` or `50ms`.

        Raises:
            ConfigError: it is none of these.
        """
        found: dict[str, float] = {}
        for part in text.lower().split(","):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", part, re.ASCII)
            unit = match[2] if match else ""
            kind = "rate" if unit in _RATES else "delay"
            if match is None or unit not in _RATES | _TIMES or kind in found:
                raise ConfigError(
                    f"--link {text!r}: write a rate (kbps, mbps, gbps), a delay (us, ms, s) or "
                    "both, for example 80mbps,50ms"
                )
            found[kind] = float(match[1]) * (_RATES | _TIMES)[unit]
        if found.get("rate") == 0:
            raise ConfigError(f"--link {text!r}: at a rate of 0 nothing arrives")
        return build(cls, found, f"--link {text!r}")

    def seconds(self, size: int) -> float:
        """Return how long the wire is busy with `size` bytes."""
        return 0.0 if self.rate is None else size * 8 / self.rate


class Placement(Frozen):
    """How a run is spread over processes.

    The processes are `groups` pipelines side by side; each holds all stages, and a share of the
    replicas.
    """

    processes: int = Field(1, ge=1, description="of the whole run")
    groups: int = Field(1, ge=1, description="parts of the replicas of each stage")
    order: Order = "gpipe"
    chunks: int = Field(1, ge=1, description="segments of stages in each process")
    link: Link | None = None
    timeout: float = Field(
        300.0, gt=0, le=1e6, description="seconds without progress that end a run"
    )
    torchrun: bool = False

    @property
    def several(self) -> bool:
        """True if there is more than one process."""
        return self.processes > 1

    @property
    def follows(self) -> bool:
        """True in a process of torchrun that is not the first."""
        return self.torchrun and os.environ.get("RANK", "0") != "0"

    def record(self) -> dict[str, Any]:
        """Return what goes to the provenance of a run."""
        return self.model_dump(mode="json", exclude={"timeout"})

    @property
    def length(self) -> int:
        """Number of processes of one pipeline."""
        return self.processes // self.groups

    def segments(self, stages: int) -> list[range]:
        """Cut the stages into as many segments as there are, as evenly as possible."""
        n = self.length * self.chunks
        cuts = [round(i * stages / n) for i in range(n + 1)]
        return [range(a, b) for a, b in pairwise(cuts)]

    def stages_of(self, rank: int, stages: int) -> list[range]:
        """Return the segments of a process."""
        return self.segments(stages)[rank % self.length :: self.length]

    def stages_in_words(self, rank: int, stages: int) -> str:
        """Say what a process holds, for messages."""
        segments = self.stages_of(rank, stages)
        parts = [f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in segments]
        group = f", replica group {rank // self.length}" if self.groups > 1 else ""
        plural = "s" if sum(map(len, segments)) > 1 else ""
        return f"stage{plural} {', '.join(parts)}{group}"

    def check(self, scenario: Scenario) -> None:
        """Refuse what cannot be placed.

        Raises:
            ConfigError: the violated condition, and what to do.
        """
        grid, parts = scenario.grid, scenario.train.microbatches
        if self.processes % self.groups:
            raise ConfigError(
                f"--processes {self.processes} is no multiple of --replica-groups {self.groups}"
            )
        if grid.replicas % self.groups:
            raise ConfigError(
                f"{grid.replicas} replicas cannot be shared by --replica-groups {self.groups}"
            )
        if self.length * self.chunks > grid.stages:
            raise ConfigError(
                f"{self.length} processes with {self.chunks} segments each need as many stages, "
                f"but there are {grid.stages}: lower --processes or --chunks"
            )
        if self.order == "1f1b" and parts < self.length:
            raise ConfigError(
                f"1f1b over {self.length} processes needs as many microbatches, not {parts}: "
                "set --microbatches"
            )
        if (self.order == "interleaved") != (self.chunks > 1):
            raise ConfigError("interleaved needs --chunks of at least 2, and only it takes several")
        if self.order == "interleaved" and (self.length < 2 or parts % self.length):
            raise ConfigError(
                f"interleaved needs at least 2 processes and a multiple of them in microbatches; "
                f"there are {self.length} processes and {parts} microbatches"
            )

    def check_cell(self, cell: Cell) -> None:
        """Refuse a cell that needs all stages in one process.

        Raises:
            ConfigError: with the reason.
        """
        from sentinel_bench.api import Defense

        parts, several = cell.scenario.train.microbatches, self.several
        plugins = [*registry.defenses.nested(cell.resolved_defense)]
        name = f"defense {cell.defense.name}"
        redundant = any(p.redundancy is not Defense.redundancy for p in plugins)
        repeats = any(p.recover is not Defense.recover for p in plugins)
        if (redundant and parts > 1) or ((redundant or repeats) and several):
            raise ConfigError(
                f"{name} keeps copies of stages at their neighbours and repeats a pass in the "
                "middle: it runs in one process, with --microbatches 1"
            )
        if several and any(p.across_stages for p in plugins):
            raise ConfigError(f"{name} compares stages with each other: it runs in one process")
        if parts > 1 and any(p.whole_batch for p in plugins):
            raise ConfigError(f"{name} needs the batch of a step in one piece: --microbatches 1")
        if self.length > 1 and _needs_whole_model(cell):
            raise ConfigError(
                f"attack {cell.attack.name} needs the whole model at its worker: it runs in one "
                "process, or with as many --replica-groups as --processes"
            )


def _needs_whole_model(cell: Cell) -> bool:
    """Tell whether an attacker runs stages that are not its own."""
    from sentinel_bench.api import Knowledge
    from sentinel_bench.threat import place

    return any(
        plugin.whole_model or Knowledge.MODEL in plugin.knowledge
        for attacker in place(cell.scenario, cell.attack)
        for plugin in registry.attacks.nested(attacker.attack)
    )
