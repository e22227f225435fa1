"""Builds the Hugging Face model of a scenario from its config, with weights from the model seed.

First weights, `model.init`:

* `scaled`: token embeddings from N(0, 1), linear maps with standard deviation 0.02 at 1,024 hidden
  units and in proportion to 1 / sqrt(hidden) at others, so that a signal of the tiny model has the
  size of one of the large. TorchTitan, on which SENTINEL was simulated, has the same embeddings and
  the same 0.02 (and refinements that are left out here).
* `huggingface`: the default of LlamaConfig, 0.02 everywhere. Signals of a tiny model then start at
  2 % of that size and drift all through a short training (docs/log.md has the figures).
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sentinel_bench.config import Scenario
from sentinel_bench.models.presets import layers_per_stage, resolve


def build_model(scenario: Scenario, vocab_size: int, device: str | None = None) -> LlamaForCausalLM:
    """Return a new fp32 causal LM; its weights depend on the model seed alone.

    The global random state is left as it was.
    """
    config = llama_config(scenario, vocab_size)
    gpus = range(torch.cuda.device_count())  # manual_seed seeds these too
    with torch.random.fork_rng(devices=gpus), torch.device("cpu"):
        torch.manual_seed(scenario.seeds.model)
        model = LlamaForCausalLM(config)
        if scenario.model.init == "scaled":
            torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model.to(device or scenario.device).train()


def llama_config(scenario: Scenario, vocab_size: int) -> LlamaConfig:
    """Return the shape of a scenario's model as Hugging Face's config."""
    shape = resolve(scenario.model)
    scaled = scenario.model.init == "scaled"
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=sum(layers_per_stage(scenario)),
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=scenario.train.seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=0.02 * (math.sqrt(1024 / shape.hidden_size) if scaled else 1.0),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
