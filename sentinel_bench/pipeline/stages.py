"""A Hugging Face Llama cut into stages that run one after the other.

The stages share their modules with the whole model, so that the model can be evaluated, saved and
compared as a whole. Embeddings are untied: the first and the last stage share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM


class Stage(nn.Module):
    """A slice of consecutive layers; the first also embeds, the last also normalises and heads.

    Forward takes token ids `[n, tokens]` (first stage) or hidden states `[n, tokens, hidden]`, and
    returns hidden states, or logits `[n, tokens, vocabulary]` (last stage). While it is `bypassed`
    it leaves its layers out.
    """

    def __init__(self, model: LlamaForCausalLM, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        self.norm = model.model.norm if last else None
        self.head = model.lm_head if last else None
        self._rotary = [model.model.rotary_emb]  # in a list: shared, not a submodule of each stage
        self._positions: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.bypassed = False

    def forward(self, x: Tensor) -> Tensor:
        """Run the slice."""
        h = x if self.embed is None else self.embed(x)
        if not self.bypassed:
            positions = self._position_embeddings(h)
            for layer in self.layers:
                h = layer(h, attention_mask=None, position_embeddings=positions)
        if self.norm is not None and self.head is not None:
            h = self.head(self.norm(h))
        return h

    def _position_embeddings(self, h: Tensor) -> tuple[Tensor, Tensor]:
        key = (h.shape[1], h.dtype)
        if key not in self._positions:
            ids = torch.arange(h.shape[1], device=h.device)[None]
            with torch.no_grad():
                self._positions[key] = self._rotary[0](h, position_ids=ids)
        return self._positions[key]


def split(model: LlamaForCausalLM, layers: Sequence[int]) -> list[Stage]:
    """Cut `model` into `len(layers)` stages with that many layers each."""
    stages, start = [], 0
    for index, count in enumerate(layers):
        stages.append(
            Stage(
                model,
                range(start, start + count),
                first=index == 0,
                last=index == len(layers) - 1,
            )
        )
        start += count
    return stages
