"""The settings of a run, as frozen pydantic models. Unknown keys are errors.

A `Scenario` is everything that does not depend on the attack or the defense; a `Cell` is one attack
against one defense in a scenario. Each class checks what it can see by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from sentinel_bench.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)
Mode = Literal["activation", "gradient", "both"]
Schedule = Literal["at-once", "waves", "random-start", "single", "rate"]


class Frozen(BaseModel):
    """Base of all settings: immutable, unknown keys are errors, NaN and Inf are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        validate_default=True,
    )


class ModelConfig(Frozen):
    """Which model is built; a field left empty is taken from the preset."""

    preset: str = "llama-tiny"
    hidden_size: int | None = Field(None, ge=2)
    intermediate_size: int | None = Field(None, ge=1)
    layers: int | None = Field(None, ge=1, description="default: the preset's, or one a stage")
    heads: int | None = Field(None, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    init: Literal["scaled", "huggingface"] = Field(
        "scaled", description="first weights: see sentinel_bench/models/build.py"
    )
    pretrained: str | None = Field(
        None,
        min_length=1,
        description="weights to start from, of the preset's shape: a folder or a hub name",
    )
    revision: str | None = Field(None, min_length=1, description="of a pretrained hub name")


class DataConfig(Frozen):
    """Which corpus is read, and how it becomes tokens."""

    name: str = "sotu"
    path: Path | None = Field(None, description="text file, folder or glob; instead of name")
    revision: str | None = Field(None, description="revision of a hub corpus")
    documents: int = Field(20_000, ge=2, description="documents streamed from a hub corpus")
    tokenizer: str = Field("bpe", description="bpe (trained here), a tokenizer.json, a hub name")
    vocab_size: int = Field(1024, ge=257, description="of the trained tokenizer")


class GridConfig(Frozen):
    """The workers: `stages` in sequence, `replicas` of each stage."""

    stages: int = Field(8, ge=2)
    replicas: int = Field(8, ge=1)


class TrainConfig(Frozen):
    """How the model is trained. Batch and lengths are per worker, in sequences and tokens."""

    steps: int = Field(350, ge=1)
    warmup_steps: int = Field(140, ge=0, description="honest steps without verification")
    batch_size: int = Field(4, ge=1)
    microbatches: int = Field(
        1, ge=1, description="parts of a worker's batch that cross the pipeline one after the other"
    )
    seq_len: int = Field(64, ge=1)
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the forward pass, by autocast; auto: bf16 on a GPU, else fp32"
    )
    lr: float = Field(1.5e-3, gt=0)
    lr_warmup_steps: int = Field(20, ge=0)
    lr_decay_ratio: float = Field(0.8, ge=0, le=1, description="last share of steps with decay")
    lr_decay_type: Literal["linear", "cosine"] = "linear"
    lr_min_ratio: float = Field(0.0, ge=0, le=1, description="final rate over the peak rate")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    eval_sequences: int = Field(512, ge=1, description="held-out sequences of the validation loss")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be below steps {self.steps}: "
                "nothing would be verified"
            )
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches {self.microbatches} must divide batch_size {self.batch_size}"
            )
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        return self


Verifiers = Literal["honest", "cover", "lie", "collude"]
"""What a malicious replica answers that is asked for the work of another."""


class ThreatConfig(Frozen):
    """Who attacks and when; the attack itself is named in the cell."""

    fraction: float = Field(0.25, ge=0, le=1, description="of the replicas of each open stage")
    mode: Mode = "activation"
    schedule: Schedule = "waves"
    start: int | None = Field(None, ge=0, description="first step of an attack; default: warm-up")
    waves: int = Field(4, ge=1)
    gap: int = Field(25, ge=1, description="steps between two waves")
    span: int | None = Field(None, ge=1, description="random-start: length of the start window")
    rate: float = Field(0.5, gt=0, le=1, description="rate: share of the steps with an attack")
    honest_first: int = Field(1, ge=0)
    honest_last: int = Field(2, ge=0)
    allow_majority: bool = False
    collude: bool = Field(False, description="attackers of a stage draw the same random numbers")
    verifiers: Verifiers = Field(
        "cover",
        description="what a malicious replica answers when it is asked for the work of another: the"
        " truth, always a lie, what a colluder sent for a colluder (cover), or that and a lie about"
        " the honest (collude)",
    )
    poison_self: bool = Field(
        False,
        description="gradients: an attacker corrupts what it received before its own backward pass,"
        " so that its own update and what it sends both follow from the lie",
    )


class FaultConfig(Frozen):
    """What becomes of a message that does not come, or comes too late: it is lost."""

    deadline: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="seconds that a receiver waits for a message; default: for ever",
    )
    on_crash: Literal["end", "ban"] = Field(
        "end",
        description="a lost message ends the run, as without any handling of faults; or zeros take"
        " its place and its sender is banned, whatever the defense says",
    )


class Seeds(Frozen):
    """One seed for each thing that is drawn; each changes what it names and nothing else."""

    model: int = Field(0, ge=0, lt=2**32)
    data: int = Field(0, ge=0, lt=2**32)
    threat: int = Field(0, ge=0, lt=2**32)


class Component(Frozen):
    """An attack or a defense by name, with its parameters."""

    name: str
    params: dict[str, Any] = {}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name` or `name:key=value,key=value`; values are YAML, keys may be dotted.

        Raises:
            ConfigError: a part is not `key=value`, or a key is given twice.
        """
        name, _, rest = text.partition(":")
        params: dict[str, Any] = {}
        for part in _split(rest):
            key, equals, value = part.partition("=")
            if not (key.strip() and equals and value.strip()):
                raise ConfigError(f"{text!r}: {part!r} is not key=value")
            _insert(params, key.strip().split("."), parse_value(value, text), text)
        if not name.strip():
            raise ConfigError(f"{text!r} names nothing; write name or name:key=value")
        return cls(name=name.strip(), params=params)

    def label(self) -> str:
        """Return the name with its parameters, as `parse` reads it."""
        flat = {key: _inline(value) for key, value in flatten(self.params).items()}
        return ":".join([self.name] + [",".join(f"{k}={v}" for k, v in flat.items())] * bool(flat))


class Scenario(Frozen):
    """Everything of a cell but its attack and its defense."""

    track: str = "custom"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    grid: GridConfig = GridConfig()
    train: TrainConfig = TrainConfig()
    threat: ThreatConfig = ThreatConfig()
    faults: FaultConfig = FaultConfig()
    seeds: Seeds = Seeds()
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def open_stages(self) -> range:
        """The stages that may hold attackers."""
        return range(self.threat.honest_first, self.grid.stages - self.threat.honest_last)

    @property
    def attackers_per_stage(self) -> int:
        """Number of malicious replicas in each open stage (rounded down)."""
        return math.floor(self.threat.fraction * self.grid.replicas + 1e-9)

    @property
    def attack_start(self) -> int:
        """First step at which an attacker may act."""
        return self.train.warmup_steps if self.threat.start is None else self.threat.start

    @property
    def honest(self) -> Scenario:
        """The same without a threat: cells that agree in it fork from one honest warm-up."""
        seeds = self.seeds.model_copy(update={"threat": 0})
        update = {"threat": ThreatConfig(), "faults": FaultConfig(), "seeds": seeds}
        return self.model_copy(update=update)

    def check_threat(self) -> None:
        """Refuse a grid on which the threat cannot be placed.

        Raises:
            ConfigError: no open stage, no attacker, half of a stage malicious, or a start outside
                of the steps that are attacked.
        """
        replicas, threat = self.grid.replicas, self.threat
        if not self.open_stages:
            raise ConfigError(
                f"no stage is open to attackers: {self.grid.stages} stages, of which the first "
                f"{threat.honest_first} and the last {threat.honest_last} are honest"
            )
        silent = {"activation": self.grid.stages - 1, "gradient": 0}.get(threat.mode)
        if silent is not None and silent in self.open_stages:
            side = "first" if silent == 0 else "last"
            raise ConfigError(
                f"attackers at the {side} stage send no {threat.mode}: "
                f"threat.honest_{side} must be at least 1, or threat.mode both"
            )
        malicious = 1 if threat.schedule == "single" else self.attackers_per_stage
        if malicious == 0:
            raise ConfigError(
                f"fraction {threat.fraction} of {replicas} replicas is not one attacker; "
                f"at least {1 / replicas:.3g} is"
            )
        if 2 * malicious >= replicas and not threat.allow_majority:
            raise ConfigError(
                f"{malicious} of {replicas} replicas of a stage would be malicious: "
                "fewer than half are allowed, unless threat.allow_majority is true"
            )
        if not self.train.warmup_steps <= self.attack_start < self.train.steps:
            raise ConfigError(
                f"threat.start {self.attack_start} must be at least warmup_steps "
                f"{self.train.warmup_steps} and below steps {self.train.steps}"
            )
        last = self.attack_start + (threat.waves - 1) * threat.gap
        if threat.schedule == "waves" and last >= self.train.steps:
            raise ConfigError(
                f"the last of {threat.waves} waves would start at step {last}, after the last of "
                f"{self.train.steps} steps; lower threat.waves or threat.gap"
            )


def _component(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return Component.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


Named = Annotated[
    Component, BeforeValidator(_component), PlainSerializer(lambda c: c.label(), return_type=str)
]
"""A component as `name`, "name:key=value" or `{name: ..., params: {...}}`."""


class Cell(Frozen):
    """One attack against one defense in one scenario with one set of seeds."""

    scenario: Scenario
    attack: Component
    defense: Component
    tuned: dict[str, Any] = Field({}, description="the track's own settings of this defense")
    aggregator: Component = Field(
        Component(name="mean"),
        description="what a stage takes for the mean of its weight gradients",
    )

    @property
    def label(self) -> str:
        """Short name: `attack-vs-defense`, and the aggregator if it is not the mean."""
        robust = [] if self.aggregator.name == "mean" else [self.aggregator.name]
        return "+".join([f"{self.attack.name}-vs-{self.defense.name}", *robust])

    @property
    def protection(self) -> str:
        """Defense and aggregator with their parameters, as tables name them."""
        robust = [] if self.aggregator.name == "mean" else [self.aggregator.label()]
        return " + ".join([self.defense.label(), *robust])

    @property
    def resolved_defense(self) -> Component:
        """The defense with the track's settings under the given ones.

        Given `values` name another set of settings: then the track's are left out.
        """
        if "values" in self.defense.params:
            return self.defense
        params = merge(_spread(self.tuned, self.defense.params), self.defense.params)
        return Component(name=self.defense.name, params=params)

    @property
    def is_baseline(self) -> bool:
        """True for the run with no attack and no defense that all others are compared with."""
        return (self.attack.name, self.defense.name, self.aggregator.name) == (
            "none",
            "none",
            "mean",
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into one with dotted keys, in order."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over` laid on it, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _spread(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `under` without what a plain value in `over` replaces as a whole."""
    return {k: v for k, v in under.items() if k not in over or isinstance(over[k], Mapping)}


def parse_value(text: str, where: str) -> Any:
    """Read a YAML value from the command line; `where` is what the user typed.

    Raises:
        ConfigError: it is none.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2020-13-45
        raise ConfigError(f"{where!r}: {text!r} is not a YAML value") from error


def set_dotted(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` in nested mappings, for `--set a.b.c=value`."""
    _insert(tree, key.split("."), value, key)


def build(model: type[M], values: Mapping[str, Any], what: str) -> M:
    """Validate `values` as `model`, and say all that is wrong in one line.

    Raises:
        ConfigError: with the place, the reason and, for a wrong key, the nearest right ones.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            f"{what}: {'; '.join(_explain(model, e) for e in error.errors())}"
        ) from None


def check(model: type[BaseModel], values: Mapping[str, Any], what: str) -> None:
    """Check keys and values one by one; `build` sees how they fit once they are merged.

    Raises:
        ConfigError: as `build` does.
    """
    try:
        model.model_validate(values)
    except ValidationError as error:
        wrong = [_explain(model, e) for e in error.errors() if e["type"] != "value_error"]
        if wrong:
            raise ConfigError(f"{what}: {'; '.join(wrong)}") from None


def _explain(model: type[BaseModel], error: Any) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        known = _keys(model, place[:-1])
        return f"unknown key {'.'.join(place)!r}{nearest(place[-1], known) if known else ''}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{'.'.join(place) or 'value'}: {error['msg']} (got {error['input']!r})"


def _keys(model: Any, place: list[str]) -> list[str]:
    """Return the keys that `model` has at `place`."""
    for part in place:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _inline(value: Any) -> str:
    """Return a value on one line, so that `_split` and YAML read the same value back."""
    import yaml

    quoted = isinstance(value, str) and not set(value).isdisjoint(",[]{}'\"")
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        default_style='"' if quoted else None,
        width=float("inf"),
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _split(text: str) -> list[str]:
    """Split at commas that stand outside of brackets, braces and quotes, as YAML has them."""
    parts, depth, quote, escaped = [""], 0, "", False
    last = "="  # what stands before, blanks left out: a quote in a word is a letter
    for before, char in pairwise(f"={text}"):
        if quote:
            closes = char == quote and not escaped
            escaped = char == "\\" and quote == '"' and not escaped
            quote = "" if closes else quote  # two in a row: closed and opened again
        elif char in "'\"" and (
            last in ("[{," if depth else "=") or (last, before) == (":", " ") or last == char
        ):
            quote = char
        elif char == "," and depth == 0:
            parts.append("")
            last = char
            continue
        else:
            depth += (char in "[{") - (char in "]}")
        parts[-1] += char
        last = last if char.isspace() else char
    return parts if text.strip() else []


def _insert(tree: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{text!r}: {key!r} is given twice")
    if keys[-1] in tree:
        raise ConfigError(f"{text!r}: {keys[-1]!r} is given twice")
    tree[keys[-1]] = value
