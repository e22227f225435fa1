"""Shapes of the models, by name. No torch here: `list models` reads it."""

from __future__ import annotations

from typing import Any, Literal

from sentinel_bench.config import Frozen, ModelConfig, Scenario
from sentinel_bench.errors import ConfigError, nearest

FamilyName = Literal["llama", "gpt2", "opt", "bloom", "deepseek_v3", "llama4_text"]
_GROUPED: tuple[FamilyName, ...] = ("llama", "llama4_text")
"""Families in which several heads can share keys and values."""
_TABLE13 = "SENTINEL, arXiv 2603.03592, Table 13"
_OURS = {"source": "ours", "layers": None, "hidden_size": 64, "heads": 4}


class Shape(Frozen):
    """The shape of a model.

    Attributes:
        family: architecture, as transformers calls it; see `models/families.py`.
        intermediate_size: of the feed-forward part; of each expert with `llama4_text`, of the dense
            layers with `deepseek_v3`.
        layers: None means one layer a stage.
        kv_heads: heads of keys and values; as many as `heads` where a family has no groups.
        rope_theta: base of rotary positions, where a family has them.
        vocabulary: tokens that the model knows, if the corpus has fewer.
        extra: what else the configuration says, in the words of transformers.
    """

    summary: str
    source: str
    family: FamilyName = "llama"
    hidden_size: int
    intermediate_size: int
    layers: int | None
    heads: int
    kv_heads: int
    rope_theta: float = 10_000.0
    vocabulary: int = 0
    extra: dict[str, Any] = {}


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
    "gpt2-tiny": Shape(
        summary="GPT-2 of the size of llama-tiny",
        family="gpt2", intermediate_size=256, kv_heads=4, **_OURS,
    ),
    "opt-tiny": Shape(
        summary="OPT of the size of llama-tiny, built like OPT-350M",
        family="opt", intermediate_size=256, kv_heads=4, **_OURS,
        extra={"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "bloom-tiny": Shape(
        summary="BLOOM of the size of llama-tiny",
        family="bloom", intermediate_size=256, kv_heads=4, **_OURS,
    ),
    "deepseek-tiny": Shape(
        summary="DeepSeek V3 of the size of llama-tiny: one dense layer, then 4 experts, 2 a token",
        family="deepseek_v3", intermediate_size=176, kv_heads=4, **_OURS,
        extra={
            "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "llama4-tiny": Shape(
        summary="Llama 4 of the size of llama-tiny: 4 experts in each layer, 1 a token",
        family="llama4_text", intermediate_size=64, kv_heads=2, **_OURS,
        extra={"num_local_experts": 4, "num_experts_per_tok": 1},
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
    "nanogpt-0.25b": Shape(
        summary="the published NanoGPT; for GPUs",
        source=f"{_TABLE13} (the printed 278,364,672 parameters are those of a GPT-2 with biases, "
        "tied embeddings, 1,024 positions and the 250,680 tokens of BLOOM's tokenizer; untied it "
        "has a second matrix of these)",
        family="gpt2", hidden_size=768, intermediate_size=3072, layers=12, heads=12, kv_heads=12,
        vocabulary=250_680,
    ),
    "llama-4-0.4b": Shape(
        summary="the published Llama 4 with 8 experts; for GPUs",
        source=f"{_TABLE13} (the width of an expert follows from the printed multiplier, and "
        "with experts in every layer and Llama 4's 202,048 tokens all of the printed 443,957,760 "
        "parameters come out; not printed: which layers have positions, norms of queries and keys: "
        "those of Llama 4 Scout)",
        family="llama4_text", hidden_size=512, intermediate_size=1024, layers=16, heads=32,
        kv_heads=8, rope_theta=500_000.0, vocabulary=202_048,
        extra={"num_local_experts": 8, "num_experts_per_tok": 1},
    ),
    "deepseek-v3-1b": Shape(
        summary="the published DeepSeek V3 with 8 experts; for GPUs",
        source=f"{_TABLE13} (not printed: widths, latent sizes, tokens and the one dense layer, "
        "which are those of TorchTitan's 16B model and give the printed 967,989,760 parameters; "
        "rope_theta and the scores of the experts are DeepSeek V3's, nothing balances them)",
        family="deepseek_v3", hidden_size=1024, intermediate_size=10_944, layers=15, heads=16,
        kv_heads=16, vocabulary=102_400,
        extra={
            "moe_intermediate_size": 1408, "n_routed_experts": 8, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    "gpt2-xl": Shape(
        summary="GPT2-1.5B, to be fine-tuned (model.pretrained); for GPUs",
        source="hub openai-community/gpt2-xl",
        family="gpt2", hidden_size=1600, intermediate_size=6400, layers=48, heads=25, kv_heads=25,
        vocabulary=50_257,
    ),
    "opt-350m": Shape(
        summary="OPT-350M, to be fine-tuned (model.pretrained); for GPUs",
        source="hub facebook/opt-350m",
        family="opt", hidden_size=1024, intermediate_size=4096, layers=24, heads=16, kv_heads=16,
        vocabulary=50_272, extra={"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "bloom-560m": Shape(
        summary="BLOOM-560M, to be fine-tuned (model.pretrained); for GPUs",
        source="hub bigscience/bloom-560m",
        family="bloom", hidden_size=1024, intermediate_size=4096, layers=24, heads=16, kv_heads=16,
        vocabulary=250_880,
    ),
    "bloom-7b": Shape(
        summary="BLOOM-7B, to be fine-tuned (model.pretrained); for GPUs",
        source="hub bigscience/bloom-7b1",
        family="bloom", hidden_size=4096, intermediate_size=16_384, layers=30, heads=32,
        kv_heads=32, vocabulary=250_880,
    ),
}  # fmt: skip


def resolve(config: ModelConfig) -> Shape:
    """Return the preset with the fields that `config` sets laid on it.

    Raises:
        ConfigError: unknown preset, or a shape that cannot be built.
    """
    preset = PRESETS.get(config.preset)
    if preset is None:
        raise ConfigError(f"unknown model {config.preset!r}{nearest(config.preset, PRESETS)}")
    sizes = {"hidden_size", "intermediate_size", "layers", "heads", "kv_heads"}
    given = config.model_dump(exclude_none=True, include=sizes)
    shape = preset.model_copy(update={**_derived(preset, given), **given})
    if shape.hidden_size % (2 * shape.heads):
        raise ConfigError(
            f"model: hidden_size {shape.hidden_size} must be an even multiple of "
            f"heads {shape.heads}"
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"model: heads {shape.heads} must be a multiple of kv_heads {shape.kv_heads}"
        )
    if shape.family not in _GROUPED and shape.kv_heads != shape.heads:
        raise ConfigError(
            f"model: {config.preset} has as many kv_heads as heads ({shape.heads}); "
            "leave model.kv_heads out"
        )
    if shape.family == "bloom" and shape.intermediate_size != 4 * shape.hidden_size:
        raise ConfigError(
            f"model: the intermediate_size of {config.preset} is always 4 times its hidden_size "
            f"({4 * shape.hidden_size}); leave model.intermediate_size out"
        )
    return shape


def _derived(preset: Shape, given: dict[str, int]) -> dict[str, int]:
    """Return the sizes that follow from `given` ones in the family of a preset."""
    derived = {}
    if preset.family not in _GROUPED and "heads" in given:
        derived["kv_heads"] = given["heads"]
    if preset.family == "bloom" and "hidden_size" in given:
        derived["intermediate_size"] = 4 * given["hidden_size"]
    return derived


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
