"""What a stage makes of the weight gradients of its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sentinel_bench.pipeline.cost import aside
from sentinel_bench.pipeline.exchange import Contributed
from sentinel_bench.pipeline.weights import StageWork, add_to_gradients, set_gradients


def correct_mean(
    stage: nn.Module, excluded: Sequence[bool], given: Contributed, work: StageWork
) -> None:
    """Put what attackers contribute into the mean of a stage, and leave out what is dropped.

    Args:
        stage: its gradients are the sum of those of all ranks that are not excluded, over the
            number of all.
        excluded: `[replicas]`.
        given: what workers contribute.
        work: gives the gradients of single replicas.
    """
    replicas, kept = len(excluded), len(excluded) - sum(excluded)
    remaining = [r for r in range(replicas) if not (excluded[r] or given.dropped[r])]
    if not remaining:  # the weights stay as they are
        stage.zero_grad(set_to_none=True)
        return
    if len(remaining) < kept:
        with aside():  # not by taking the others out of the sum: they may be as large as they like
            mean = work.redo(remaining).update
        set_gradients(stage, mean * (kept / replicas))
    share = kept / (replicas * len(remaining))
    for replica, contribution in given.sent.items():
        if replica in remaining:
            add_to_gradients(stage, (contribution - work.gradient(replica)) * share)


def robust_mean(
    stage: nn.Module,
    excluded: Sequence[bool],
    given: Contributed,
    work: StageWork,
    rule: Callable[[Tensor], Tensor],
) -> None:
    """Replace the mean of a stage by a robust one; `rule` takes `[replicas, parameters]`.

    Rows of ranks that are left out are NaN.
    """
    replicas = len(excluded)
    out = [e or d for e, d in zip(excluded, given.dropped, strict=True)]
    with aside():
        rows = {
            r: given.sent[r] if r in given.sent else work.gradient(r)
            for r in range(replicas)
            if not out[r]
        }
    if not rows:
        stage.zero_grad(set_to_none=True)
        return
    missing = torch.full_like(next(iter(rows.values())), torch.nan)
    stacked = torch.stack([rows.get(r, missing) for r in range(replicas)])
    share = 1 - sum(excluded) / replicas  # the sum over all, as the mean has it so far
    set_gradients(stage, rule(stacked) * share)
