"""Builds the Hugging Face model of a scenario from its config, with weights from the model seed."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sentinel_bench.config import Scenario
from sentinel_bench.models.presets import layers_per_stage, resolve


def build_model(scenario: Scenario, vocab_size: int, device: str | None = None) -> LlamaForCausalLM:
    """Return a new fp32 causal LM; its weights depend on the model seed alone.

    The global random state is left as it was.
    """
    shape = resolve(scenario.model)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=sum(layers_per_stage(scenario)),
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=scenario.train.seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(scenario.seeds.model)
        model = LlamaForCausalLM(config)
    return model.to(device or scenario.device).train()
