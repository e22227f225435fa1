"""A Hugging Face model cut into stages that run one after the other.

The stages share their modules with the whole model, so that the model can be evaluated, saved and
compared as a whole. Embeddings are untied: the first and the last stage share nothing. What a model
is made of is said by its family (`models/families.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from sentinel_bench.models.families import Family, family_of


class Stage(nn.Module):
    """A slice of consecutive layers; the first also embeds, the last also normalises and heads.

    Forward takes token ids `[n, tokens]` (first stage) or hidden states `[n, tokens, hidden]`, and
    returns hidden states, or logits `[n, tokens, vocabulary]` (last stage). While it is `bypassed`
    it leaves its layers out.
    """

    def __init__(
        self, family: Family, model: PreTrainedModel, layers: range, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        parts = family.parts(model)
        self.embed = parts.embed if first else None
        self.layers = nn.ModuleList(parts.layers[i] for i in layers)
        self.close = parts.close if last else None
        self._family = family
        self._inputs = parts.inputs
        self.bypassed = False

    def forward(self, x: Tensor) -> Tensor:
        """Run the slice."""
        h = x if self.embed is None else self.embed(x)
        if not self.bypassed:
            inputs = self._inputs(h)
            for layer in self.layers:
                out = layer(h, **inputs)
                h = out[0] if isinstance(out, tuple) else out
        return h if self.close is None else self.close(h)

    @property
    def front(self) -> nn.Module | None:
        """Return the norm between the stage's input and its first linear maps, if there is one."""
        return self._family.front(self.layers[0])

    @property
    def back(self) -> nn.Module | None:
        """Return the norm between the last linear map and what the stage sends, if there is one."""
        return self._family.back(self.layers[-1])


def split(model: PreTrainedModel, layers: Sequence[int]) -> list[Stage]:
    """Cut `model` into `len(layers)` stages with that many layers each."""
    family, stages, start = family_of(model), [], 0
    for index, count in enumerate(layers):
        stages.append(
            Stage(
                family,
                model,
                range(start, start + count),
                first=index == 0,
                last=index == len(layers) - 1,
            )
        )
        start += count
    return stages
