"""Shapes of the models, by name. No torch here: `list models` reads it."""

from __future__ import annotations

from sentinel_bench.config import Frozen, ModelConfig, Scenario
from sentinel_bench.errors import ConfigError, nearest


class Shape(Frozen):
    """The shape of a Llama-like model; `layers` None means one layer a stage."""

    summary: str
    source: str
    hidden_size: int
    intermediate_size: int
    layers: int | None
    heads: int
    kv_heads: int
    rope_theta: float


PRESETS: dict[str, Shape] = {
    "llama-tiny": Shape(
        summary="one small layer a stage; trains in a minute on two cores",
        source="ours",
        hidden_size=64,
        intermediate_size=176,
        layers=None,
        heads=4,
        kv_heads=2,
        rope_theta=10_000.0,
    ),
    "llama-3-0.6b": Shape(
        summary="the published main model; for GPUs",
        source="SENTINEL, arXiv 2603.03592, Table 13 (feed-forward width, which is not printed, "
        "is the one that gives the printed 574,391,296 parameters at 128,256 tokens)",
        hidden_size=1024,
        intermediate_size=5488,
        layers=16,
        heads=32,
        kv_heads=8,
        rope_theta=500_000.0,
    ),
}


def resolve(config: ModelConfig) -> Shape:
    """Return the preset with the fields that `config` sets laid on it.

    Raises:
        ConfigError: unknown preset, or a shape that cannot be built.
    """
    preset = PRESETS.get(config.preset)
    if preset is None:
        raise ConfigError(f"unknown model {config.preset!r}{nearest(config.preset, PRESETS)}")
    given = config.model_dump(exclude_none=True, exclude={"preset", "init"})
    shape = preset.model_copy(update=given)
    if shape.hidden_size % (2 * shape.heads):
        raise ConfigError(
            f"model: hidden_size {shape.hidden_size} must be an even multiple of "
            f"heads {shape.heads}"
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"model: heads {shape.heads} must be a multiple of kv_heads {shape.kv_heads}"
        )
    return shape


def layers_per_stage(scenario: Scenario) -> list[int]:
    """Return how many layers each stage holds: spread evenly, the first stages take the rest.

    Raises:
        ConfigError: more stages than layers, or an unknown preset.
    """
    stages = scenario.grid.stages
    layers = resolve(scenario.model).layers or stages
    if stages > layers:
        raise ConfigError(
            f"{stages} stages are more than the {layers} layers of {scenario.model.preset}; "
            "lower grid.stages or raise model.layers"
        )
    return [layers // stages + (s < layers % stages) for s in range(stages)]
