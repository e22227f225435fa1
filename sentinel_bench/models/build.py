"""Builds the Hugging Face model of a scenario, with weights from the model seed or pretrained ones.

First weights, `model.init`:

* `scaled`: token embeddings from N(0, 1), linear maps with standard deviation 0.02 at 1,024 hidden
  units and in proportion to 1 / sqrt(hidden) at others, so that a signal of the tiny model has the
  size of one of the large. TorchTitan, on which SENTINEL was simulated, has the same embeddings and
  the same 0.02 (and refinements that are left out here). The head of a model whose embeddings are
  tied elsewhere starts as a copy of the small embeddings, and not of these.
* `huggingface`: the default of the configuration, 0.02 everywhere. Signals of a tiny model then
  start at 2 % of that size and drift all through a short training (docs/log.md has the figures).
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from sentinel_bench.config import Scenario
from sentinel_bench.models import pretrained
from sentinel_bench.models.families import FAMILIES, untie
from sentinel_bench.models.presets import layers_per_stage, resolve


def build_model(scenario: Scenario, vocab_size: int, device: str | None = None) -> PreTrainedModel:
    """Return a new fp32 causal LM without tied embeddings and without dropout.

    Its weights depend on the model seed alone, or are the pretrained ones. The global random state
    is left as it was.

    Raises:
        ConfigError: the pretrained weights cannot be read, or do not fit the scenario.
    """
    gpus = range(torch.cuda.device_count())  # manual_seed seeds these too
    with torch.random.fork_rng(devices=gpus), torch.device("cpu"):
        torch.manual_seed(scenario.seeds.model)
        if scenario.model.pretrained is None:
            model = _new(scenario, vocab_size)
        else:
            model = pretrained.load(scenario, vocab_size)
            untie(model)
    FAMILIES[resolve(scenario.model).family].prepare(model)
    return model.to(device or scenario.device).train()


def model_config(scenario: Scenario, vocab_size: int) -> PreTrainedConfig:
    """Return the shape of a scenario's model as Hugging Face's configuration."""
    shape = resolve(scenario.model)
    family = FAMILIES[shape.family]
    scaled = scenario.model.init == "scaled"
    return family.config(
        vocab_size=max(vocab_size, shape.vocabulary),
        initializer_range=0.02 * (math.sqrt(1024 / shape.hidden_size) if scaled else 1.0),
        tie_word_embeddings=family.config().tie_word_embeddings,
        use_cache=False,
        **family.sizes(shape, sum(layers_per_stage(scenario))),
        **family.free(shape, scenario.train.seq_len),
        **family.fixed,
        **family.runs,
    )


def _new(scenario: Scenario, vocab_size: int) -> PreTrainedModel:
    """Return a model with first weights, drawn from the global random state."""
    config = model_config(scenario, vocab_size)
    model = FAMILIES[resolve(scenario.model).family].model(config)
    untie(model)
    if scenario.model.init == "scaled":
        torch.nn.init.normal_(model.get_input_embeddings().weight)
    return model
