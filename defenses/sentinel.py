"""SENTINEL: moving averages at every boundary (arXiv 2603.03592), and its averaging baseline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from sentinel_bench.api import Defense, Direction, ResponseParams, Setup, Signals, Verdict
from sentinel_bench.config import Frozen
from sentinel_bench.defenses.published import TABLE14

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from sentinel_bench.defenses.fence import Fences, FenceSettings

DIRECTIONS: tuple[Direction, ...] = ("activation", "gradient")
Column = Literal[
    "llama-3-0.6b-16x8", "llama-3-0.6b-16x16", "llama-3-1.2b-8x8", "nanogpt-0.25b-12x8"
]
PUBLISHED: Column = "llama-3-0.6b-16x8"


class PerDirection(Frozen):
    """One value for activations and one for gradients; a single number stands for both."""

    activation: float = Field(ge=0)
    gradient: float = Field(ge=0)


class Share(PerDirection):
    """From 0 to 1."""

    activation: float = Field(ge=0, le=1)
    gradient: float = Field(ge=0, le=1)


class Decay(PerDirection):
    """From 0 to below 1."""

    activation: float = Field(ge=0, lt=1)
    gradient: float = Field(ge=0, lt=1)


class Positive(PerDirection):
    """Above 0."""

    activation: float = Field(gt=0)
    gradient: float = Field(gt=0)


class Growth(PerDirection):
    """At least 1."""

    activation: float = Field(ge=1)
    gradient: float = Field(ge=1)


class Shrinkage(PerDirection):
    """Above 0, at most 1."""

    activation: float = Field(gt=0, le=1)
    gradient: float = Field(gt=0, le=1)


class SentinelParams(ResponseParams):
    """Parameters of `sentinel`; the defaults are the published ones of `values`."""

    values: Column = Field(
        PUBLISHED, description="column of the paper's Table 14 that gives the defaults"
    )
    beta: Decay = Field(description="decay of the moving average")
    k0: Positive = Field(description="first factor of the interquartile range")
    alpha: Share = Field(description="target share of honest deviations outside")
    grow: Growth = Field(description="factor on k while too many are outside")
    shrink: Shrinkage = Field(description="factor on k while too few are outside")
    slack: float = Field(0.1, ge=0, le=1, description="too few: below slack * alpha")
    lambda_: PerDirection = Field(alias="lambda", description="least half width over the median")
    eps: Positive = Field(description="least interquartile range")
    window: int = Field(100, ge=2, description="steps of deviations behind a fence")
    min_steps: int = Field(10, ge=1, description="steps before a fence closes")
    max_changes: int = Field(10, ge=0, description="changes of k in one step, each way")
    statistics: tuple[Literal["l1", "l2", "sfr", "swd"], ...] = Field(
        ("l1", "l2", "sfr", "swd"), min_length=1, description="any of them flags"
    )
    z_axis: Literal["tensor", "token"] = Field("tensor", description="what l2 standardises over")
    projections: int = Field(32, ge=1, description="directions of the sliced Wasserstein distance")
    seed: int = Field(0, ge=0, description="of the projection directions")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Lay what is given on the published column, number by number."""
        if not isinstance(data, Mapping):
            return data
        column = TABLE14.get(str(data.get("values", PUBLISHED)), TABLE14[PUBLISHED])
        filled = dict(data)
        if "lambda_" in filled:
            filled["lambda"] = filled.pop("lambda_")
        statistics = filled.get("statistics", ())
        if isinstance(statistics, list | tuple) and len(set(statistics)) < len(statistics):
            raise ValueError(f"statistics {list(statistics)} names one twice")
        for key, published in column.items():
            given = filled.get(key, {})
            if isinstance(given, Mapping):
                filled[key] = {**published, **given}
            elif not isinstance(given, PerDirection):
                filled[key] = dict.fromkeys(DIRECTIONS, given)
        return filled


class Sentinel(Defense[SentinelParams]):
    """Compares each signal with a moving average of the clean ones, by four distances.

    State per stage and direction: `m_t = beta m_{t-1} + (1 - beta) mean over clean replicas of
    x_t`, elementwise. A signal is tested against `m_{t-1}`: flagged if any statistic lies outside
    of its fence (see `fence.Fences`), at once banned if it lies `severity` half widths away. Each
    microbatch of a step moves the average; the fences stay as they are until the step ends.
    """

    name = "sentinel"
    goal = "flag what is far from the moving average of the clean signals at this boundary"
    formula = "any statistic Omega_i(x_t, m_{t-1}) with abs(Gamma - median) >= fence"
    source = "SENTINEL, arXiv 2603.03592, sections 4 and 5, Table 14"
    blind_to: ClassVar[str] = (
        "honest signals of another place, time or replica (`swap`, `token-shift`, `delay`, `mimic`:"
        " missed, or found only while the honest are banned too), lies inside of all fences"
        " (`fence-rider`), most lies about gradients that keep their size, and attacks on weight"
        " gradients or weights, which are no signals"
    )
    Params = SentinelParams

    def start(self, setup: Setup) -> None:
        """Make one fence per stage, direction and statistic."""
        import torch

        from sentinel_bench.defenses.fence import Fences
        from sentinel_bench.defenses.statistics import unit_directions

        p = self.params
        self._average: dict[tuple[int, Direction], Tensor] = {}
        self._statistics = self._functions(
            unit_directions(setup.shape[-1], p.projections, p.seed, setup.device)
        )
        self._n = len(p.statistics)
        settings = self._settings(setup)
        room = (len(settings.k0), setup.microbatches, setup.replicas)
        self._fences: Fences = Fences(
            settings, room[1] * room[2], p.window, p.max_changes, p.min_steps
        )
        self._values = torch.full(room, torch.nan, device=setup.device)
        self._last: Tensor | None = None

    def check(self, signals: Signals) -> Verdict:
        """Measure the deviations and hold them against the fences."""
        verdict, self._last = self._judge(signals)
        return verdict

    def preview(self, signals: Signals) -> Verdict:
        """Do the same without keeping the deviations."""
        return self._judge(signals)[0]

    def _judge(self, signals: Signals) -> tuple[Verdict, Tensor | None]:
        """Return the verdict, and the deviations `[statistics, replicas]` if there are any."""
        nobody = signals.active.new_zeros(signals.active.shape)
        reference = self._reference(signals)
        if reference is None:
            return Verdict(nobody, nobody), None
        import torch

        x = signals.sent.float()
        deviations = torch.stack([f(x, reference) for f in self._statistics.values()])
        channels = self._channels(signals)
        reference = reference.to(signals.sent.dtype)
        explained = _Explained(self.params.statistics, deviations, self._fences, channels)
        if _is_cheap_to_read(deviations) and self._fences.all_inside(channels, deviations):
            return Verdict(nobody, nobody, reference, explained), deviations
        outside, distance = self._fences.outside(channels, deviations)
        severe = (~(distance < self.params.severity) & outside).any(0)
        verdict = Verdict(
            flagged=outside.any(0) & signals.active,
            severe=severe & signals.active,
            reference=reference,
            statistics=explained,
        )
        return verdict, deviations

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Take the clean signals into the average and the clean deviations into the window."""
        if self._last is not None:
            values = self._last.masked_fill(~clean, float("nan"))
            self._values[self._channels(signals), signals.microbatch] = values
        self._remember(signals, clean)

    def end_step(self, step: int) -> None:
        """Move all fences by one step."""
        self._fences.push(self._values.flatten(1))
        self._values.fill_(float("nan"))

    def state_bytes(self) -> int:
        """Return the bytes of the averages and of the windows."""
        return sum(m.nbytes for m in self._average.values()) + self._fences.state_bytes()

    def needed_lambda(self) -> Tensor:
        """Return the least lambda that lets all clean deviations of each replica pass in this step.

        `[channels, replicas]`; 0 within `k * IQR`, NaN where there was no signal. Call before
        `end_step`.
        """
        needed = self._fences.needed_least(self._values.flatten(1)).view_as(self._values)
        worst = needed.nan_to_num(-1.0, float("inf")).amax(1)
        return worst.where(worst >= 0, float("nan"))

    def channel_names(self, stages: int) -> list[tuple[int, Direction, str]]:
        """Return (stage, direction, statistic) of each channel."""
        return [
            (stage, direction, statistic)
            for stage in range(stages)
            for direction in DIRECTIONS
            for statistic in self.params.statistics
        ]

    def _remember(self, signals: Signals, clean: Tensor) -> None:
        """Move the average towards the mean of the clean signals."""
        key = (signals.stage, signals.direction)
        old = self._average.get(key)
        if (old is None or _is_cheap_to_read(clean)) and not clean.any():
            return
        mean = _mean(signals.sent.float(), clean)
        beta = getattr(self.params.beta, signals.direction)
        if old is not None:
            mean = old.lerp(mean, 1 - beta)
            mean = mean if _is_cheap_to_read(clean) else mean.where(clean.any(), old)
        self._average[key] = mean

    def _reference(self, signals: Signals) -> Tensor | None:
        """Return what the signals are compared with, or None while there is nothing."""
        return self._average.get((signals.stage, signals.direction))

    def _channels(self, signals: Signals) -> slice:
        first = (signals.stage * 2 + DIRECTIONS.index(signals.direction)) * self._n
        return slice(first, first + self._n)

    def _functions(self, directions: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        from sentinel_bench.defenses import statistics

        every: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "l1": statistics.l1,
            "l2": partial(statistics.l2, axis=self.params.z_axis),
            "sfr": statistics.sfr,
            "swd": partial(statistics.swd, directions=directions),
        }
        return {name: every[name] for name in self.params.statistics}

    def _settings(self, setup: Setup) -> FenceSettings:
        import torch

        from sentinel_bench.defenses.fence import FenceSettings

        p = self.params
        names = self.channel_names(setup.stages)

        def column(values: PerDirection) -> Tensor:
            return torch.tensor([getattr(values, d) for _, d, _ in names], device=setup.device)

        return FenceSettings(
            k0=column(p.k0),
            alpha=column(p.alpha),
            grow=column(p.grow),
            shrink=column(p.shrink),
            slack=torch.full((len(names),), p.slack, device=setup.device),
            least=column(p.lambda_),
            eps=column(p.eps),
        )


class Averaging(Sentinel):
    """Sentinel without memory: compares with the mean of the replicas in the same step."""

    name = "averaging"
    goal = "flag what is far from the instantaneous mean of the replicas"
    formula = "as sentinel, with the mean over active replicas of x_t in place of m_{t-1}"
    source = "SENTINEL, arXiv 2603.03592, Table 5 (beta = 0)"
    blind_to: ClassVar[str] = (
        "lies no further from the mean than the data move honest signals (among them those of"
        " another place, time or replica), liars who together move the mean that all are compared"
        " with, lies inside of all fences, and attacks on weight gradients or weights, which are no"
        " signals"
    )

    def _reference(self, signals: Signals) -> Tensor | None:
        if _is_cheap_to_read(signals.active) and not signals.active.any():
            return None
        return _mean(signals.sent.float(), signals.active)

    def _remember(self, signals: Signals, clean: Tensor) -> None:
        """Keep nothing: the reference is made anew in each step."""


class _Explained(Mapping[str, "tuple[Tensor, float, float]"]):
    """Statistics of a verdict, put into words only when somebody reads them."""

    def __init__(
        self, names: tuple[str, ...], values: Tensor, fences: Fences, channels: slice
    ) -> None:
        self._names = names
        self._values = values
        self._median = fences.median[channels]
        self._half = fences.half_width[channels]

    def __getitem__(self, name: str) -> tuple[Tensor, float, float]:
        i = self._names.index(name)
        median, half = float(self._median[i]), float(self._half[i])
        return self._values[i], median - half, median + half

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_cheap_to_read(x: Tensor) -> bool:
    """Tell whether a look at a number does not wait for a device."""
    return x.device.type == "cpu"


def _mean(x: Tensor, where: Tensor) -> Tensor:
    """Mean over the replicas in `where`, `[batch, tokens, hidden]`."""
    weights = where.to(x.dtype)
    return (weights @ x.flatten(1)).view(x.shape[1:]) / weights.sum()
