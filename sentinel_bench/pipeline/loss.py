"""The training loss of all replicas together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor


def kept_loss(logits: Tensor, targets: Tensor, keep: Tensor) -> Tensor:
    """Return `rank_loss` of the ranks in `keep` `[replicas]` bool, without a look at who that is.

    What others have put out leaves no trace, not even NaN.
    """
    kept = keep.repeat_interleave(len(logits) // len(keep), output_size=len(logits))
    masked = logits.masked_fill(~kept.view(-1, 1, 1), 0.0).float()
    losses = F.cross_entropy(masked.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(len(logits), -1).sum(1).masked_fill(~kept, 0.0).sum() / targets.numel()


def rank_loss(logits: Tensor, targets: Tensor, excluded: Sequence[bool]) -> Tensor:
    """Return the mean cross entropy per token, counting excluded ranks as zero.

    Args:
        logits: `[replicas * batch, tokens, vocabulary]`.
        targets: `[replicas * batch, tokens]`.
        excluded: `[replicas]`.
    """
    if not any(excluded):
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    if all(excluded):
        return logits.flatten()[:0].float().sum()
    keep = torch.tensor([not e for e in excluded], device=logits.device)
    kept = logits.view(len(excluded), -1, *logits.shape[1:])[keep].float().flatten(0, 2)
    labels = targets.view(len(excluded), -1, *targets.shape[1:])[keep].flatten()
    return F.cross_entropy(kept, labels, reduction="sum") / targets.numel()
