"""What models are taken apart into: what embeds, layers and their inputs, what closes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

Inputs = Callable[[Tensor], Mapping[str, Any]]
"""From hidden states `[n, tokens, hidden]` to what every layer is called with beside them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model taken apart; the modules stay those of the model.

    Attributes:
        embed: from token ids `[n, tokens]` to hidden states `[n, tokens, hidden]`.
        layers: in order.
        close: from hidden states to logits `[n, tokens, vocabulary]`.
        inputs: what a layer is called with beside the hidden states.
    """

    embed: nn.Module
    layers: Sequence[nn.Module]
    close: nn.Module
    inputs: Inputs


class Rotary:
    """Rotary position embeddings, computed once for each length and precision; causal attention."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[tuple[int, torch.dtype], Any] = {}

    def __call__(self, h: Tensor) -> Mapping[str, Any]:
        """Return the inputs of a layer."""
        key = (h.shape[1], h.dtype)
        if key not in self._known:
            ids = torch.arange(h.shape[1], device=h.device)[None]
            with torch.no_grad():
                self._known[key] = self._module(h, position_ids=ids)
        return {"attention_mask": None, "position_embeddings": self._known[key]}


class Alibi:
    """Attention biases that grow with the distance, and an explicit causal mask."""

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._known: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, h: Tensor) -> Mapping[str, Any]:
        """Return the inputs of a layer; the biases are `[n * heads, 1, tokens]`."""
        key = (h.shape[1], h.dtype)
        if key not in self._known:
            ones = torch.ones(1, h.shape[1], device=h.device)
            least = torch.finfo(h.dtype).min
            mask = torch.full((h.shape[1],) * 2, least, dtype=h.dtype, device=h.device).triu(1)
            biases = build_alibi_tensor(ones, self._heads, h.dtype)
            self._known[key] = biases, mask[None, None]
        biases, mask = self._known[key]
        return {"alibi": biases.repeat(len(h), 1, 1), "attention_mask": mask}


def causal(h: Tensor) -> Mapping[str, Any]:
    """Return the inputs of a layer that needs none: without a mask its attention is causal."""
    return {"attention_mask": None}


class Embedding(nn.Module):
    """Token embeddings, projected to the hidden size if they are narrower, and learned positions.

    Args:
        tokens: embeds ids.
        positions: one row for each position, after the first `offset` rows.
        offset: rows that no position uses.
        project: from the embeddings' width to the hidden size.
    """

    def __init__(
        self,
        tokens: nn.Module,
        positions: nn.Embedding,
        offset: int = 0,
        project: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.project = tokens, positions, project
        self._offset = offset

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids `[n, tokens]`."""
        h: Tensor = self.tokens(ids)
        if self.project is not None:
            h = self.project(h)
        return h + self.positions.weight[self._offset : self._offset + ids.shape[1]]


def chain(*modules: nn.Module | None) -> nn.Sequential:
    """Return modules that run one after the other, without those that are None."""
    return nn.Sequential(*(module for module in modules if module is not None))
