"""The architectures that the pipeline can cut, one class each: configuration, and what to cut.

A family says how a `Shape` becomes a configuration of transformers, and takes a built model apart:
what embeds, the layers, what each layer is called with, what closes. `pipeline.stages.Stage` knows
nothing else of a model. To add one: a class here, a line in `FAMILIES`, a preset.

Embeddings are never tied. The first and the last stage are different machines, so where the
architecture has tied embeddings (GPT-2, OPT, BLOOM) the head starts as a copy of them (`untie`).
Dropout is off: defenses do the work of a worker a second time, and compare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from sentinel_bench.models.parts import Alibi, Embedding, Parts, Rotary, causal, chain
from sentinel_bench.models.presets import Shape


class Family(ABC):
    """An architecture of transformers.

    Attributes:
        config: class of its configuration.
        model: class of its causal language model.
        fixed: what its configuration always says here.
        kinds: names in the configuration for hidden size, feed-forward width, layers and heads.
        runs: which of transformers' implementations of attention and experts.
    """

    config: ClassVar[type[PreTrainedConfig]]
    model: ClassVar[type[PreTrainedModel]]
    fixed: ClassVar[Mapping[str, Any]] = {}
    runs: ClassVar[Mapping[str, str]] = {"attn_implementation": "sdpa"}
    kinds: ClassVar[tuple[str, str, str, str]] = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    )  # fmt: skip

    def sizes(self, shape: Shape, layers: int) -> dict[str, Any]:
        """Return what a configuration says of a shape, also to hold a pretrained one against it."""
        values = (shape.hidden_size, shape.intermediate_size, layers, shape.heads)
        return {**dict(zip(self.kinds, values, strict=True)), **shape.extra}

    def free(self, shape: Shape, tokens: int) -> dict[str, Any]:
        """Return what a configuration says that a pretrained model decides by itself."""
        return {"max_position_embeddings": tokens}

    @abstractmethod
    def parts(self, model: Any) -> Parts:
        """Take a model apart."""

    def front(self, layer: Any) -> nn.Module | None:
        """Return the norm before the first linear maps of a layer; None: they read its input."""
        norm: nn.Module = layer.input_layernorm
        return norm

    def back(self, layer: Any) -> nn.Module | None:
        """Return the norm after the last linear map of a layer, if there is one."""
        return None

    def prepare(self, model: Any) -> None:  # noqa: B027 - most have nothing to do
        """Change what the pipeline cannot work with."""


class Llama(Family):
    """Llama 2 and 3: RMS norms, rotary positions, grouped heads."""

    config, model = LlamaConfig, LlamaForCausalLM

    def sizes(self, shape: Shape, layers: int) -> dict[str, Any]:
        """Add the heads of keys and values."""
        return {**super().sizes(shape, layers), "num_key_value_heads": shape.kv_heads}

    def free(self, shape: Shape, tokens: int) -> dict[str, Any]:
        """Add the base of the rotary positions."""
        rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
        return {**super().free(shape, tokens), "rope_parameters": rope}

    def parts(self, model: Any) -> Parts:
        """Take a model apart."""
        inner = model.model
        return Parts(
            inner.embed_tokens,
            inner.layers,
            chain(inner.norm, model.lm_head),
            Rotary(inner.rotary_emb),
        )


class DeepseekV3(Llama):
    """DeepSeek V3: latent attention, experts chosen by sigmoid scores beside shared ones.

    Experts run as grouped products, whose shapes do not depend on what a token chose. (The plain
    loop over experts does linear maps of as many rows as chose one.) Nothing balances the experts.
    """

    config, model = DeepseekV3Config, DeepseekV3ForCausalLM
    fixed: ClassVar = {"num_nextn_predict_layers": 0, "attention_dropout": 0.0}
    runs: ClassVar = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}


class Llama4(Llama):
    """Llama 4, text only: experts beside a shared one, some layers without positions.

    Its attention in chunks is that of all tokens up to 8,192 of them, and is run as such.
    """

    config, model = Llama4TextConfig, Llama4ForCausalLM
    fixed: ClassVar = {"attention_chunk_size": None, "attention_dropout": 0.0}

    def sizes(self, shape: Shape, layers: int) -> dict[str, Any]:
        """Add the size of a head, which does not follow from the others by default."""
        return {**super().sizes(shape, layers), "head_dim": shape.hidden_size // shape.heads}

    def prepare(self, model: Any) -> None:
        """Keep the output of the shared expert: the other experts are added to it in place."""
        for layer in model.model.layers:
            if layer.is_moe_layer:
                layer.feed_forward.shared_expert.register_forward_hook(_cloned)


def _cloned(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.clone()


class GPT2(Family):
    """GPT-2: layer norms, learned positions."""

    config, model = GPT2Config, GPT2LMHeadModel
    fixed: ClassVar = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    kinds = "n_embd", "n_inner", "n_layer", "n_head"

    def free(self, shape: Shape, tokens: int) -> dict[str, Any]:
        """Leave out the special tokens of GPT-2's own vocabulary."""
        special = {"bos_token_id": None, "eos_token_id": None}
        return {**super().free(shape, tokens), **special}

    def parts(self, model: Any) -> Parts:
        """Take a model apart."""
        inner = model.transformer
        embed = Embedding(inner.wte, inner.wpe)
        return Parts(embed, inner.h, chain(inner.ln_f, model.lm_head), causal)

    def front(self, layer: Any) -> nn.Module | None:
        """Return the norm before attention."""
        norm: nn.Module = layer.ln_1
        return norm


class OPT(Family):
    """OPT: as GPT-2, with rectifiers; OPT-350M has its norms after, and narrower embeddings."""

    config, model = OPTConfig, OPTForCausalLM
    fixed: ClassVar = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
    kinds = "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"

    def sizes(self, shape: Shape, layers: int) -> dict[str, Any]:
        """Add the width of the embeddings, by default the hidden size."""
        return {"word_embed_proj_dim": shape.hidden_size, **super().sizes(shape, layers)}

    def free(self, shape: Shape, tokens: int) -> dict[str, Any]:
        """Have no token whose embedding is not trained."""
        return {**super().free(shape, tokens), "pad_token_id": None}

    def parts(self, model: Any) -> Parts:
        """Take a model apart."""
        inner = model.model.decoder
        positions = inner.embed_positions
        embed = Embedding(inner.embed_tokens, positions, positions.offset, inner.project_in)
        close = chain(inner.final_layer_norm, inner.project_out, model.lm_head)
        return Parts(embed, inner.layers, close, causal)

    def front(self, layer: Any) -> nn.Module | None:
        """Return the norm before attention, if norms come first."""
        return layer.self_attn_layer_norm if layer.do_layer_norm_before else None

    def back(self, layer: Any) -> nn.Module | None:
        """Return the last norm, if norms come last."""
        return None if layer.do_layer_norm_before else layer.final_layer_norm


class Bloom(Family):
    """BLOOM: a norm after the embeddings, alibi for positions, feed-forward four times hidden."""

    config, model = BloomConfig, BloomForCausalLM
    fixed: ClassVar = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    kinds = "hidden_size", "", "n_layer", "n_head"
    runs: ClassVar = {"attn_implementation": "eager"}

    def sizes(self, shape: Shape, layers: int) -> dict[str, Any]:
        """Leave the feed-forward width out, which follows; a residual is what came in, unnormed."""
        told = {key: value for key, value in super().sizes(shape, layers).items() if key}
        return {**told, "apply_residual_connection_post_layernorm": False}

    def free(self, shape: Shape, tokens: int) -> dict[str, Any]:
        """Return nothing: there are no positions."""
        return {}

    def parts(self, model: Any) -> Parts:
        """Take a model apart."""
        inner = model.transformer
        embed = chain(inner.word_embeddings, inner.word_embeddings_layernorm)
        return Parts(embed, inner.h, chain(inner.ln_f, model.lm_head), Alibi(inner.num_heads))


FAMILIES: dict[str, Family] = {
    str(family.config.model_type): family
    for family in (Llama(), GPT2(), OPT(), Bloom(), DeepseekV3(), Llama4())
}
"""By the name that transformers has for them (`model_type`), which `Shape.family` uses too."""


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a built model."""
    return FAMILIES[str(model.config.model_type)]


def untie(model: PreTrainedModel) -> None:
    """Give the head of a model with tied embeddings a copy of them, to be trained apart."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
    model.config.tie_word_embeddings = False
