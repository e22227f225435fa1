"""Weight gradients of single replicas, and the weights of a stage as one flat vector.

Replicas are stacked, so training itself never sees the weight gradient of one replica: it is
computed here when somebody asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from sentinel_bench.api import Redone
from sentinel_bench.data.batches import Batches


@dataclass
class StageWork:
    """What a stage has done in this step, to take the weight gradients of its replicas from.

    Args:
        stages: this stage and all after it.
        fed: what the stage was fed, `[replicas * batch, ...]`.
        passed: the gradient that reached its output, in the scale of autograd; None at the last
            stage, which makes the loss.
        labels: `[replicas * batch, tokens]`.
        replicas: how many are stacked.
        autocast: the precision of the forward pass.
        vocabulary: tokens that the model knows.
        microbatches: in which the batch crossed the boundaries; a signal is of the mean loss of its
            own microbatch.
    """

    stages: Sequence[nn.Module]
    fed: Tensor
    passed: Tensor | None
    labels: Tensor
    replicas: int
    autocast: torch.autocast
    vocabulary: int
    microbatches: int = 1
    _known: dict[int, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> Tensor:
        """The labels, `[replicas, batch, tokens]`."""
        return self.labels.view(self.replicas, -1, self.labels.shape[1])

    def gradient(self, replica: int) -> Tensor:
        """Return the weight gradients `[parameters]` of a replica's own mean loss."""
        if replica not in self._known:
            self._known[replica] = self.recompute(replica)
        return self._known[replica]

    def recompute(self, replica: int) -> Tensor:
        """Compute these weight gradients, whether they are known or not."""
        return self.redo([replica]).update

    def redo(self, of: Sequence[int], received: Tensor | None = None) -> Redone:
        """Do the work of replicas `of` as one batch: forward, and backward for both gradients.

        Args:
            of: n replicas.
            received: the gradients that arrived, `[replicas, batch, tokens, hidden]`, each of the
                replica's own mean loss; by default what was let into the backward pass.
        """
        n = len(of)

        def rows(x: Tensor) -> Tensor:
            return x.view(self.replicas, -1, *x.shape[1:])[list(of)].flatten(0, 1)

        fed = rows(self.fed)
        leaf = [fed.requires_grad_()] if fed.is_floating_point() else []
        wanted = [*trainable(self.stages[0]), *leaf]
        with torch.enable_grad():
            with self.autocast:
                out: Tensor = self.stages[0](fed)
            if self.passed is None:
                loss = F.cross_entropy(out.float().flatten(0, 1), rows(self.labels).flatten())
                found = torch.autograd.grad(loss, wanted)
            else:
                own = rows(self.passed) * self.replicas
                if received is not None:
                    own = received[list(of)].flatten(0, 1) / self.microbatches
                found = torch.autograd.grad(out, wanted, own / n)

        def signals(x: Tensor) -> Tensor:
            return x.detach().view(n, -1, *x.shape[1:])

        return Redone(
            activation=None if self.passed is None else signals(out),
            gradient=signals(found[-1] * (n * self.microbatches)) if leaf else None,
            update=flat(found[: len(found) - len(leaf)]),
        )

    def mean(self, excluded: Sequence[bool]) -> tuple[list[int], Tensor]:
        """Return who is not excluded, and the mean `[parameters]` of their weight gradients."""
        counted = [r for r, out in enumerate(excluded) if not out]
        parameters = trainable(self.stages[0])
        total = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        return counted, total * (self.replicas / len(counted))

    @torch.no_grad()
    def losses(self) -> Tensor | None:
        """Return the mean loss of each replica, `[replicas]`; None before the last stage."""
        if self.passed is not None:
            return None
        with self.autocast:
            out = self.stages[0](self.fed)
        losses = F.cross_entropy(out.float().flatten(0, 1), self.labels.flatten(), reduction="none")
        return losses.view(self.replicas, -1).mean(1)

    def relabel(self, replica: int, targets: Tensor) -> Tensor:
        """Return the weight gradients of a replica's mean loss on other targets."""
        with torch.enable_grad():
            with self.autocast:
                h = self._rows(self.fed, replica)
                for stage in self.stages:
                    h = stage(h)
            loss = F.cross_entropy(h.float().flatten(0, 1), targets.flatten())
            return flat(torch.autograd.grad(loss, trainable(self.stages[0])))

    def _rows(self, x: Tensor, replica: int) -> Tensor:
        n = len(x) // self.replicas
        return x[replica * n : (replica + 1) * n]


class PrivateModel:
    """A worker's private copy of the whole model; see `api.Private`."""

    def __init__(
        self, stages: Sequence[nn.Module], own: int, replica: int, batches: Batches, vocabulary: int
    ) -> None:
        self._stages = copy.deepcopy(list(stages))
        for stage in self._stages:
            stage.requires_grad_(False)
        self._stages[own].requires_grad_(True)
        self.parameters: Sequence[Tensor] = trainable(self._stages[own])
        self.vocabulary = vocabulary
        self._replica = replica
        self._batches = batches

    def logits(self, ids: Tensor) -> Tensor:
        """Run the whole model on `[n, tokens]`."""
        h = ids
        for stage in self._stages:
            h = stage(h)
        return h

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets `[batch, tokens]` of the replica's own data at a step."""
        n = self._batches.batch_size
        rows = slice(self._replica * n, (self._replica + 1) * n)
        device = self.parameters[0].device
        inputs, targets = self._batches.train(index)
        return (
            torch.from_numpy(inputs[rows]).to(device),
            torch.from_numpy(targets[rows]).to(device),
        )


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of a module, in the order of a flat vector."""
    return [p for p in module.parameters() if p.requires_grad]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector `[parameters]`."""
    return torch.cat([t.detach().flatten() for t in tensors])


@torch.no_grad()
def add_to_gradients(module: nn.Module, vector: Tensor) -> None:
    """Add a flat vector to the gradients of a module."""
    for parameter, part in _parts(module, vector):
        assert parameter.grad is not None
        parameter.grad += part


def set_gradients(module: nn.Module, vector: Tensor) -> None:
    """Set the gradients of a module from a flat vector."""
    for parameter, part in _parts(module, vector):
        parameter.grad = part.clone()


@torch.no_grad()
def set_weights(module: nn.Module, vector: Tensor) -> None:
    """Set the trainable parameters of a module from a flat vector."""
    for parameter, part in _parts(module, vector):
        parameter.copy_(part)


def _parts(module: nn.Module, vector: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    parameters = trainable(module)
    parts = torch.split(vector, [p.numel() for p in parameters])
    return [(p, part.view_as(p)) for p, part in zip(parameters, parts, strict=True)]
