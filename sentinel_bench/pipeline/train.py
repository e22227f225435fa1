"""The training loop of one process: all stages in sequence, replicas stacked as one batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from sentinel_bench.api import Direction
from sentinel_bench.config import Scenario, TrainConfig
from sentinel_bench.data.batches import Batches
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline.boundary import Boundary, echo
from sentinel_bench.pipeline.exchange import Exchange, LiveExchange
from sentinel_bench.pipeline.stages import split
from sentinel_bench.pipeline.weights import (
    PrivateModel,
    StageWork,
    add_to_gradients,
    flat,
    set_weights,
    trainable,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step did."""

    loss: float
    grad_norm: float
    excluded: int
    skipped: bool


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, flat, then linear decay over the last share."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    decay = max(1, round(config.lr_decay_ratio * config.steps))
    left = min(1.0, max(0.0, (config.steps - step) / decay))
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return the optimizer of a scenario."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class Trainer:
    """A model cut into stages, its boundaries, and its optimizer.

    Args:
        scenario: the settings.
        batches: where the data comes from.
        vocab_size: tokens that the model knows.
    """

    def __init__(self, scenario: Scenario, batches: Batches, vocab_size: int) -> None:
        self.scenario = scenario
        self._batches = batches
        self.model = build_model(scenario, vocab_size)
        self._stages = split(self.model, layers_per_stage(scenario))
        replicas = scenario.grid.replicas
        self._boundaries = [Boundary(s, replicas) for s in range(len(self._stages) - 1)]
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self.model, scenario.train)
        self._exchange: Exchange | None = None
        self._fed: list[Tensor] = []
        """What each stage was fed in this step."""
        self._labels: Tensor | None = None

    def connect(self, exchange: Exchange | None) -> None:
        """Put an exchange behind all boundaries; None makes them plain wires."""
        self._exchange = exchange
        if exchange is not None:
            exchange.redo = self.redo
        for boundary in self._boundaries:
            boundary.exchange = exchange

    def step(self, step: int) -> StepResult:
        """Train one step on the data of that step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.scenario.train, step)
        inputs, targets = (self._tensor(a) for a in self._batches.train(step))
        loss, excluded = self._forward_backward(step, inputs, targets)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.scenario.train.grad_clip)
        everybody = excluded == self.scenario.grid.replicas
        skipped = everybody or (self._guarded and not bool(norm.isfinite()))
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(float(loss), float(norm), excluded, skipped)  # waits for the device

    @torch.no_grad()
    def evaluate(self) -> tuple[float, int]:
        """Return the held-out loss in nats per token of the honest model, and the token count."""
        total, tokens = 0.0, 0
        for inputs, targets in self._batches.held_out(self.scenario.train.eval_sequences):
            ids, labels = self._tensor(inputs), self._tensor(targets)
            with self._autocast():
                h = ids
                for stage in self._stages:
                    h = stage(h)
            losses = F.cross_entropy(h.float().flatten(0, 1), labels.flatten(), reduction="sum")
            total += float(losses)
            tokens += labels.numel()
        return total / tokens, tokens

    def redo(self, stage: int, direction: Direction, of: Sequence[int]) -> Tensor:
        """Do the work of replicas `of` of a stage a second time.

        Returns:
            What they should have sent in this step, from what they received:
            `[n, batch, tokens, hidden]`, gradients of each replica's own mean loss.
        """
        replicas = self.scenario.grid.replicas

        def rows(x: Tensor) -> Tensor:
            return x.view(replicas, -1, *x.shape[1:])[list(of)].flatten(0, 1)

        fed = rows(self._fed[stage])
        forward = direction == "activation"
        with torch.set_grad_enabled(not forward):
            fed.requires_grad_(not forward)
            with self._autocast():
                out = self._stages[stage](fed)
            if not forward:
                if stage == len(self._stages) - 1:
                    assert self._labels is not None
                    total = rank_loss(out, rows(self._labels), [False] * len(of)) * len(of)
                    (out,) = torch.autograd.grad(total, fed)
                else:
                    passed = rows(self._boundaries[stage].passed) * replicas
                    (out,) = torch.autograd.grad(out, fed, passed)
        return out.view(len(of), -1, *out.shape[1:])

    def inject(self, step: int) -> None:
        """Let attackers change the weights of their stages after a step."""
        if not isinstance(self._exchange, LiveExchange):
            return
        tamperer = self._exchange.tamperer
        for index in tamperer.inject_stages:
            before = flat(trainable(self._stages[index]))
            after = tamperer.inject(index, step, before, partial(self._private, index))
            if after is not before:
                set_weights(self._stages[index], after)

    @torch.no_grad()
    def success(self, trigger: Sequence[int], target: int) -> float:
        """Return how often `target` follows `trigger` at the end of a held-out sequence, 0 to 1."""
        hits = count = 0
        for inputs, _ in self._batches.held_out(self.scenario.train.eval_sequences):
            ids = self._tensor(inputs).clone()
            tokens = torch.tensor(trigger, device=ids.device)[-ids.shape[1] :]
            ids[:, -len(tokens) :] = tokens
            with self._autocast():
                h = ids
                for stage in self._stages:
                    h = stage(h)
            hits += int((h[:, -1].argmax(-1) == target).sum())
            count += len(ids)
        return hits / count

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the weights and of the optimizer, to fork from."""
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        )

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a snapshot, which stays as it is."""
        self.model.load_state_dict(snapshot["model"])
        self._optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model knows."""
        return int(self.model.config.vocab_size)

    @property
    def signal_shape(self) -> tuple[int, int, int]:
        """Return batch, tokens and hidden of one worker's signal."""
        train = self.scenario.train
        return train.batch_size, train.seq_len, self.model.config.hidden_size

    @property
    def _guarded(self) -> bool:
        """True if a defense runs: it also drops a step whose gradients are not finite."""
        return isinstance(self._exchange, LiveExchange) and not self._exchange.inspector.passive

    def _forward_backward(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the loss and how many ranks were left out of the weight gradients."""
        replicas = self.scenario.grid.replicas
        taint = torch.zeros(replicas, device=inputs.device, requires_grad=True)
        fed = self._fed = []
        self._labels = targets
        h, rode = inputs, taint
        with self._autocast():
            for stage, boundary in zip(self._stages, [*self._boundaries, None], strict=True):
                fed.append(h.detach())
                h = stage(h)
                if boundary is not None:
                    h, rode = boundary(h, rode)
        early = self._excluded()
        loss = rank_loss(h, targets, early)
        total = loss if rode is taint else loss + echo(rode)
        total.backward()  # type: ignore[no-untyped-call]
        excluded = self._excluded()
        if excluded != early:
            self._redo_late(fed, targets, excluded)
        self._tamper_updates(step, fed, targets, excluded)
        left_out = sum(excluded)
        if 0 < left_out < replicas:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad *= replicas / (replicas - left_out)
        counted = replicas - sum(early)
        return loss.detach() * (replicas / counted if counted else torch.nan), left_out

    def _excluded(self) -> list[bool]:
        if isinstance(self._exchange, LiveExchange):
            return self._exchange.inspector.excluded()
        return [False] * self.scenario.grid.replicas

    def _redo_late(self, fed: list[Tensor], targets: Tensor, excluded: list[bool]) -> None:
        """Take ranks that were tainted late out of the weight gradients downstream of the lie.

        When a lie is found in the backward pass, the stages downstream of it have already counted
        the rank: their weight gradients are computed again without it, from what each stage was
        `fed`. Upstream its gradient was replaced by zeros. Rare, so nothing is kept for it but the
        inputs: to retain the graph of every step would slow all of them down.
        """
        assert isinstance(self._exchange, LiveExchange)
        first = min(self._exchange.inspector.late.values())
        keep = torch.tensor([not e for e in excluded], device=targets.device)
        rows = keep.repeat_interleave(len(targets) // len(excluded)).view(-1, 1, 1)
        for index in range(first, len(self._stages)):
            parameters = [p for p in self._stages[index].parameters() if p.requires_grad]
            with self._autocast():
                out = self._stages[index](fed[index])
            if index == len(self._stages) - 1:
                out, grad = rank_loss(out, targets, excluded), None
            else:
                grad = self._boundaries[index].passed.masked_fill(~rows, 0.0)
            fresh = torch.autograd.grad(out, parameters, grad)
            for parameter, value in zip(parameters, fresh, strict=True):
                parameter.grad = value

    def _tamper_updates(
        self, step: int, fed: list[Tensor], targets: Tensor, excluded: list[bool]
    ) -> None:
        """Let attackers contribute other weight gradients to the average of their stages."""
        if not isinstance(self._exchange, LiveExchange):
            return
        for index in self._exchange.tamperer.update_stages:
            last = index == len(self._stages) - 1
            work = StageWork(
                stages=self._stages[index:],
                fed=fed[index],
                passed=None if last else self._boundaries[index].passed,
                labels=targets,
                replicas=len(excluded),
                autocast=self._autocast(),
                vocabulary=self.vocabulary,
            )
            added = self._exchange.tamperer.contribute(index, step, excluded, work)
            if added is not None:
                add_to_gradients(self._stages[index], added / len(excluded))

    def _private(self, index: int, replica: int) -> PrivateModel:
        return PrivateModel(self._stages, index, replica, self._batches, self.vocabulary)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.scenario.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        device = self.scenario.device
        return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


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
