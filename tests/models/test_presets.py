"""Presets: the published shapes have the published sizes, and what cannot be built is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sentinel_bench.config import ModelConfig, Scenario
from sentinel_bench.errors import ConfigError
from sentinel_bench.models.build import model_config
from sentinel_bench.models.families import FAMILIES
from sentinel_bench.models.presets import PRESETS, resolve


@pytest.mark.parametrize(
    "preset, stages, tokens, parameters, extra",
    [  # extra: the copy of the embeddings that is the head of a model whose embeddings are tied
        ("nanogpt-0.25b", 12, 1024, 278_364_672, 250_680 * 768),
        ("llama-4-0.4b", 16, 1024, 443_957_760, 0),
        ("deepseek-v3-1b", 15, 1024, 967_989_760, 0),
        ("gpt2-xl", 6, 1024, 1_557_611_200, 50_257 * 1600),
        ("opt-350m", 6, 2048, 331_196_416, 50_272 * 512),
        ("bloom-560m", 6, 2048, 559_214_592, 250_880 * 1024),
        ("bloom-7b", 6, 2048, 7_069_016_064, 250_880 * 4096),
    ],
)
def test_published_models_have_the_published_number_of_parameters(
    preset: str, stages: int, tokens: int, parameters: int, extra: int
) -> None:
    scenario = Scenario(
        model={"preset": preset}, grid={"stages": stages}, train={"seq_len": tokens}
    )
    config = model_config(scenario, 50_257)
    config.tie_word_embeddings = False
    with torch.device("meta"):
        model = FAMILIES[config.model_type].model(config)
    assert sum(p.numel() for p in model.parameters()) == parameters + extra


def test_every_preset_is_of_a_family_and_says_where_its_shape_comes_from() -> None:
    for name, shape in PRESETS.items():
        assert shape.family in FAMILIES
        assert shape.summary and shape.source
        assert resolve(ModelConfig(preset=name)) == shape


def test_sizes_that_follow_from_others_follow_from_changed_ones_too() -> None:
    assert resolve(ModelConfig(preset="bloom-tiny", hidden_size=32)).intermediate_size == 128
    assert resolve(ModelConfig(preset="gpt2-tiny", heads=8)).kv_heads == 8
    assert resolve(ModelConfig(preset="llama4-tiny", heads=8)).kv_heads == 2


@pytest.mark.parametrize(
    "model, message",
    [
        ({"preset": "gpt2-tiny", "kv_heads": 2}, "leave model.kv_heads out"),
        ({"preset": "bloom-tiny", "intermediate_size": 100}, "always 4 times its hidden_size"),
        ({"preset": "gpt-2-tiny"}, "did you mean gpt2-tiny"),
    ],
)
def test_a_shape_that_its_family_does_not_have_is_refused(
    model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(ModelConfig(**model))
