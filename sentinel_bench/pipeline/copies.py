"""The copies of blocks that their neighbours keep, train in step, and check them with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from sentinel_bench.api import Direction, Redundancy
from sentinel_bench.pipeline.loss import rank_loss
from sentinel_bench.pipeline.stages import Stage
from sentinel_bench.pipeline.weights import trainable

MOMENTS = 2
"""Numbers that AdamW keeps of each weight."""


class Copies:
    """A copy of each stage with an optimizer of its own, equal to the stage when it is made.

    A copy is run on what its stage was fed, and its gradients come from what its stage was sent:
    from messages, which whoever holds the copy has seen, and not from what the worker itself made
    of them. So a corrupted gradient that was let through trains both alike.

    All replicas of a stage hold the same weights, so a majority of them is the stage.

    Args:
        stages: the originals.
        optimizer: of the originals.
        redundancy: when copies are compared, and what is rounding.
        replicas: how many are stacked.
        autocast: returns the precision of the forward pass.
        sent: returns the gradients that a stage was sent in this pass, `[replicas, batch, tokens,
            hidden]`, each of the replica's own mean loss.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        optimizer: torch.optim.Optimizer,
        redundancy: Redundancy,
        replicas: int,
        autocast: Callable[[], torch.autocast],
        sent: Callable[[int], Tensor],
    ) -> None:
        self._originals = stages
        self._trained = optimizer
        # together, so that the copied optimizer belongs to the copied weights
        self._copies, self._optimizer = copy.deepcopy((stages, optimizer))
        self._redundancy = redundancy
        self._replicas = replicas
        self._autocast = autocast
        self._sent = sent
        self.begin({}, torch.empty(0))

    def begin(self, fed: Mapping[int, Sequence[Tensor]], labels: Tensor) -> None:
        """Begin a pass.

        Args:
            fed: what each stage is fed, `[replicas * batch, ...]`, in one microbatch; grows while
                the pass runs.
            labels: `[replicas * batch, tokens]`.
        """
        self._fed = fed
        self._labels = labels
        self._excluded = [False] * self._replicas
        self._runs: dict[int, tuple[Tensor, Tensor]] = {}
        self._found: dict[int, tuple[Tensor | None, list[Tensor]]] = {}

    def exclude(self, excluded: list[bool]) -> None:
        """Leave ranks out of the weight gradients; those that are there are computed again."""
        if excluded != self._excluded:
            self._excluded = excluded
            for stage in self._found:
                del self._runs[stage]
            self._found.clear()

    def redo(
        self, stage: int, direction: Direction, of: Sequence[int], received: Tensor | None
    ) -> Tensor:
        """Return what replicas `of` of a stage should have sent, as its copy computes it.

        `[n, batch, tokens, hidden]`, gradients of each replica's own mean loss. The copy does the
        work of all replicas, once a pass.
        """
        if direction == "activation":
            whole = self._run(stage)[1].detach()
        else:
            gradient = self._gradients(stage)[0]
            assert gradient is not None  # the first stage sends none
            whole = gradient * self._replicas
        return whole.view(self._replicas, -1, *whole.shape[1:])[list(of)]

    def step(self, frozen: Collection[int], scale: float, norm: Tensor, limit: float) -> None:
        """Train the copies as their originals were trained just now.

        Args:
            frozen: stages that were not.
            scale: factor of the weight gradients, for ranks that were left out.
            norm: of all gradients of the originals.
            limit: to which they are clipped.
        """
        trained: list[nn.Parameter] = []
        for stage, module in enumerate(self._copies):
            if stage in frozen:
                continue
            parameters = trainable(module)
            for parameter, grad in zip(parameters, self._gradients(stage)[1], strict=True):
                parameter.grad = grad if scale == 1 else grad * scale
            trained += parameters
        nn.utils.clip_grads_with_norm_(trained, limit, norm)
        self._update()

    def follow(self) -> None:
        """Train the copies with the gradients of their originals, where these are no mean.

        What a robust rule made of the gradients of all replicas is heard from them.
        """
        for stage in range(len(self._copies)):
            for mine, theirs in self._pairs(stage):
                mine.grad = theirs.grad
        self._update()

    @torch.no_grad()
    def resync(self, step: int) -> list[tuple[int, float]]:
        """Compare the copies with their originals, if it is time, and replace those that drifted.

        Returns:
            Stages whose copies were replaced, and their relative L2 distances.
        """
        if (step + 1) % self._redundancy.resync:
            return []
        drifted = []
        for stage in range(len(self._copies)):
            distance = self._distance(stage)
            if not distance <= self._redundancy.rtol:  # NaN too
                self._replace(stage)
                drifted.append((stage, distance))
        return drifted

    def _update(self) -> None:
        for mine, theirs in zip(
            self._optimizer.param_groups, self._trained.param_groups, strict=True
        ):
            mine["lr"] = theirs["lr"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.begin({}, self._labels)

    def _run(self, stage: int) -> tuple[Tensor, Tensor]:
        """Return what the copy of a stage is fed, and what it makes of it, with the graph."""
        if stage not in self._runs:
            x = self._fed[stage][0].detach()
            if x.is_floating_point():
                x.requires_grad_()
            with torch.enable_grad(), self._autocast():
                self._runs[stage] = x, self._copies[stage](x)
        return self._runs[stage]

    def _gradients(self, stage: int) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients with respect to input and weights, in the scale of autograd."""
        if stage not in self._found:
            x, out = self._run(stage)
            seed = None
            if stage == len(self._copies) - 1:
                with torch.enable_grad():
                    out = rank_loss(out, self._labels, self._excluded)
            else:
                seed = (self._kept(self._sent(stage)) / self._replicas).flatten(0, 1)
            inputs = [x] if x.requires_grad else []
            found = torch.autograd.grad(out, [*inputs, *trainable(self._copies[stage])], seed)
            weights = list(found[len(inputs) :])
            self._found[stage] = (found[0] if inputs else None, weights)
        return self._found[stage]

    def _kept(self, sent: Tensor) -> Tensor:
        """Return gradients in which those of excluded ranks are zeros."""
        if not any(self._excluded):
            return sent
        mask = torch.tensor(self._excluded, device=sent.device)
        return sent.masked_fill(mask.view(-1, 1, 1, 1), 0.0)

    def _distance(self, stage: int) -> float:
        pairs = list(self._pairs(stage))
        apart = torch.stack([(a - b).norm() for a, b in pairs]).norm()
        return float(apart / torch.stack([b.norm() for _, b in pairs]).norm())

    def _replace(self, stage: int) -> None:
        for mine, theirs in self._pairs(stage):
            mine.copy_(theirs)
            if theirs in self._trained.state:
                self._optimizer.state[mine] = copy.deepcopy(self._trained.state[theirs])

    def _pairs(self, stage: int) -> zip[tuple[nn.Parameter, nn.Parameter]]:
        mine, theirs = self._copies[stage], self._originals[stage]
        return zip(trainable(mine), trainable(theirs), strict=True)


def bytes_of_copies(model: nn.Module) -> int:
    """Return the memory that copies of all stages take from step to step: weights and moments."""
    return (1 + MOMENTS) * sum(p.nbytes for p in trainable(model))
