"""The training loop of one process: all stages in sequence, replicas stacked as one batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from sentinel_bench.api import Aggregator, Direction, LinearCheck, Recovery
from sentinel_bench.config import Scenario, TrainConfig
from sentinel_bench.data.batches import Batches
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline.boundary import Boundary, echo
from sentinel_bench.pipeline.claims import Work, check_linears
from sentinel_bench.pipeline.copies import Copies
from sentinel_bench.pipeline.cost import aside
from sentinel_bench.pipeline.exchange import Contributed, Exchange, LiveExchange
from sentinel_bench.pipeline.loss import rank_loss
from sentinel_bench.pipeline.recovery import Pass, run
from sentinel_bench.pipeline.stages import split
from sentinel_bench.pipeline.weights import (
    PrivateModel,
    StageWork,
    add_to_gradients,
    flat,
    set_gradients,
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
        self._copies: Copies | None = None
        self._fed: list[Tensor] = []
        """What each stage was fed in this pass."""
        self._labels: Tensor | None = None
        self._aggregator: Aggregator[Any] | None = None

    def connect(self, exchange: Exchange | None) -> None:
        """Put an exchange behind all boundaries; None makes them plain wires.

        A defense whose stages keep copies of blocks has them made here, of the stages as they are.
        """
        self._exchange = exchange
        self._copies = self._copied(exchange)
        if exchange is not None:
            exchange.redo = self.redo if self._copies is None else self._copies.redo
            exchange.check_linears = self.check_linears if self._copies is None else None
        for boundary in self._boundaries:
            boundary.exchange = exchange

    def aggregate_with(self, aggregator: Aggregator[Any] | None) -> None:
        """Combine the weight gradients of replicas by a robust rule; None takes their mean."""
        self._aggregator = aggregator
        if isinstance(self._exchange, LiveExchange):
            self._exchange.keeps = aggregator is not None

    def step(self, step: int) -> StepResult:
        """Train one step on the data of that step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.scenario.train, step)
        inputs, targets = (self._tensor(a) for a in self._batches.train(step))
        done, recovery = run(self._stages, partial(self._forward_backward, inputs, targets))
        limit = self.scenario.train.grad_clip
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        nothing = recovery.skip or len(recovery.still) == len(self._stages)
        everybody = done.excluded == self.scenario.grid.replicas
        skipped = nothing or everybody or (self._guarded and not bool(norm.isfinite()))
        if not skipped:
            self._optimizer.step()
            if self._copies is not None and self._aggregator is not None:
                self._copies.follow()
            elif self._copies is not None:
                self._copies.step(recovery.still, self._scale(done.excluded), norm, limit)
        self._optimizer.zero_grad(set_to_none=True)
        # the numbers wait for the device
        return StepResult(float(done.loss), float(norm), done.excluded, skipped)

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

    def redo(
        self, stage: int, direction: Direction, of: Sequence[int], received: Tensor | None
    ) -> Tensor:
        """Do the work of replicas `of` of a stage a second time.

        Args:
            stage, direction: whose work, in the step that is running.
            of: replicas, at least one.
            received: `[replicas, batch, tokens, hidden]`, gradients that the stage received, each
                of the replica's own mean loss; not looked at for activations and at the last stage.

        Returns:
            What they should have sent in this step, from what they received:
            `[n, batch, tokens, hidden]`, gradients of each replica's own mean loss.
        """
        return self._work(stage, direction, of, received).run()[0]

    def check_linears(
        self,
        stage: int,
        direction: Direction,
        of: Sequence[int],
        received: Tensor | None,
        lies: Mapping[int, Tensor],
        projections: int,
        seed: int,
    ) -> LinearCheck:
        """Test what replicas `of` of a stage claim of their linear layers in the step that runs.

        Args:
            stage, direction, of, received: see `redo`.
            lies: replica to what it sent, `[batch, tokens, hidden]`, of those who tampered with it.
            projections: how many random vectors test each claim.
            seed: of these vectors.
        """
        work = self._work(stage, direction, of, received)
        return check_linears(work, of, lies, projections, seed)

    def _work(
        self, stage: int, direction: Direction, of: Sequence[int], received: Tensor | None
    ) -> Work:
        """Return the work of replicas `of`, to be done a second time; see `redo`."""

        def rows(x: Tensor) -> Tensor:
            return x.view(self.scenario.grid.replicas, -1, *x.shape[1:])[list(of)].flatten(0, 1)

        def seed(out: Tensor) -> tuple[Tensor, Tensor | None]:
            if stage < len(self._stages) - 1:
                assert received is not None
                return out, received[list(of)].flatten(0, 1)
            assert self._labels is not None
            excluded = self._excluded()
            loss = rank_loss(out, rows(self._labels), [excluded[r] for r in of])
            return loss * len(of), None

        forward = direction == "activation"
        return Work(
            stage=self._stages[stage],
            fed=rows(self._fed[stage]).requires_grad_(not forward),
            replicas=len(of),
            autocast=self._autocast,
            seed=None if forward else seed,
        )

    def resync(self, step: int) -> list[tuple[int, float]]:
        """Replace copies of blocks that have drifted; return stages and relative distances."""
        return [] if self._copies is None else self._copies.resync(step)

    def inject(self) -> None:
        """Let attackers change the weights that they hold after a step."""
        exchange = self._exchange
        if exchange is None:
            return
        replicas = self.scenario.grid.replicas
        some = exchange.tamperer.inject_stages if isinstance(exchange, LiveExchange) else []
        for index in range(len(self._stages)) if exchange.weighs else some:
            before = flat(trainable(self._stages[index]))
            after = exchange.hold(index, before, replicas, partial(self._private, index))
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
    def bytes_of_stages(self) -> list[int]:
        """Return the bytes of the weights of each stage."""
        return [sum(p.nbytes for p in stage.parameters()) for stage in self._stages]

    @property
    def signal_shape(self) -> tuple[int, int, int]:
        """Return batch, tokens and hidden of one worker's signal."""
        train = self.scenario.train
        return train.batch_size, train.seq_len, self.model.config.hidden_size

    @property
    def _guarded(self) -> bool:
        """True if a defense runs: it also drops a step whose gradients are not finite."""
        return isinstance(self._exchange, LiveExchange) and not self._exchange.inspector.passive

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Pass:
        """Do one pass; an alarm in its forward part can save the backward one."""
        replicas = self.scenario.grid.replicas
        taint = torch.zeros(replicas, device=inputs.device, requires_grad=True)
        fed = self._fed = []
        self._labels = targets
        if self._copies is not None:
            self._copies.begin(fed, targets)
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
        counted = replicas - sum(early)
        shown = loss.detach() * (replicas / counted if counted else torch.nan)
        again = self._settle()
        if again is not None:
            return Pass(shown, 0, again)
        self._exclude_copies(early)
        total.backward()  # type: ignore[no-untyped-call]
        excluded = self._excluded()
        again = self._settle()
        if again is not None:
            self._optimizer.zero_grad(set_to_none=True)
            return Pass(shown, 0, again)
        if excluded != early:
            self._redo_late(fed, targets, excluded)
            self._exclude_copies(excluded)
        self._combine(fed, targets, excluded)
        left_out = sum(excluded)
        if 0 < left_out < replicas:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad *= self._scale(left_out)
        return Pass(shown, left_out, None)

    def _copied(self, exchange: Exchange | None) -> Copies | None:
        """Return copies of the stages, if the defense behind an exchange has them kept."""
        if not isinstance(exchange, LiveExchange) or exchange.inspector.redundancy is None:
            return None
        return Copies(
            self._stages,
            self._optimizer,
            exchange.inspector.redundancy,
            self.scenario.grid.replicas,
            self._autocast,
            partial(exchange.arrived, direction="gradient"),
        )

    def _exclude_copies(self, excluded: list[bool]) -> None:
        if self._copies is not None:
            self._copies.exclude(excluded)

    def _settle(self) -> Recovery | None:
        """Ask what becomes of this pass; None: it counts."""
        return self._exchange.settle() if isinstance(self._exchange, LiveExchange) else None

    def _scale(self, left_out: int) -> float:
        """Return the factor that makes a mean over all replicas one over those that count."""
        replicas = self.scenario.grid.replicas
        return replicas / (replicas - left_out)

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
            parameters = [p for p in self._stages[index].parameters() if p.grad is not None]
            if not parameters:  # bypassed
                continue
            with self._autocast():
                out = self._stages[index](fed[index])
            if index == len(self._stages) - 1:
                out, grad = rank_loss(out, targets, excluded), None
            else:
                grad = self._boundaries[index].passed.masked_fill(~rows, 0.0)
            fresh = torch.autograd.grad(out, parameters, grad)
            for parameter, value in zip(parameters, fresh, strict=True):
                parameter.grad = value

    def _combine(self, fed: list[Tensor], targets: Tensor, excluded: list[bool]) -> None:
        """Let attackers contribute to the weight gradients, and a robust rule replace their mean.

        The mean is there already: what an attacker sends beside its honest gradient is added to it,
        and what is dropped is taken out. Only a robust rule needs the gradients of all replicas;
        those left out are NaN to it.
        """
        exchange, replicas = self._exchange, len(excluded)
        if exchange is None or all(excluded):
            return
        live = isinstance(exchange, LiveExchange)
        some = exchange.tamperer.update_stages if isinstance(exchange, LiveExchange) else []
        still = exchange.recovery.still if isinstance(exchange, LiveExchange) else frozenset()
        robust = live and self._aggregator is not None
        for index in range(len(self._stages)) if robust or exchange.weighs else some:
            if index in still:
                continue
            last = index == len(self._stages) - 1
            work = StageWork(
                stages=self._stages[index:],
                fed=fed[index],
                passed=None if last else self._boundaries[index].passed,
                labels=targets,
                replicas=replicas,
                autocast=self._autocast(),
                vocabulary=self.vocabulary,
            )
            given = exchange.contribute(index, excluded, work)
            if robust:
                self._robust_mean(index, excluded, given, work)
            else:
                self._correct_mean(index, excluded, given, work)

    def _correct_mean(
        self, index: int, excluded: list[bool], given: Contributed, work: StageWork
    ) -> None:
        """Put what attackers contribute into the mean of a stage, and take out what is dropped."""
        stage, replicas = self._stages[index], len(excluded)
        for replica, contribution in given.sent.items():
            if not given.dropped[replica]:
                add_to_gradients(stage, (contribution - work.gradient(replica)) / replicas)
        dropped = [r for r in range(replicas) if given.dropped[r]]
        if not dropped:
            return
        kept = replicas - sum(excluded)
        if len(dropped) == kept:  # nobody is left: the weights stay as they are
            stage.zero_grad(set_to_none=True)
            return
        for replica in dropped:
            add_to_gradients(stage, -work.gradient(replica) / replicas)
        for parameter in trainable(stage):
            if parameter.grad is not None:
                parameter.grad *= kept / (kept - len(dropped))

    def _robust_mean(
        self, index: int, excluded: list[bool], given: Contributed, work: StageWork
    ) -> None:
        """Replace the mean of a stage by a robust one."""
        assert self._aggregator is not None
        replicas = len(excluded)
        out = [e or d for e, d in zip(excluded, given.dropped, strict=True)]
        with aside():
            rows = {
                r: given.sent[r] if r in given.sent else work.gradient(r)
                for r in range(replicas)
                if not out[r]
            }
        if not rows:
            self._stages[index].zero_grad(set_to_none=True)
            return
        missing = torch.full_like(next(iter(rows.values())), torch.nan)
        stacked = torch.stack([rows.get(r, missing) for r in range(replicas)])
        share = 1 - sum(excluded) / replicas  # the sum over all, as the mean has it so far
        combined = self._aggregator(stacked, self.scenario.attackers_per_stage)
        set_gradients(self._stages[index], combined * share)

    def _private(self, index: int, replica: int) -> PrivateModel:
        return PrivateModel(self._stages, index, replica, self._batches, self.vocabulary)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.scenario.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        device = self.scenario.device
        return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
