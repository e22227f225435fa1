"""The training loop of one process: all stages in sequence, replicas stacked as one batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from sentinel_bench.api import Direction, LinearCheck, Recovery
from sentinel_bench.config import Scenario, TrainConfig
from sentinel_bench.data.batches import Batches, Pair
from sentinel_bench.errors import RunError
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline.boundary import Boundary, Side, echo
from sentinel_bench.pipeline.claims import Work, check_linears
from sentinel_bench.pipeline.copies import Copies
from sentinel_bench.pipeline.deferred import DeferredInspector
from sentinel_bench.pipeline.exchange import Exchange, LiveExchange
from sentinel_bench.pipeline.loss import kept_loss, rank_loss
from sentinel_bench.pipeline.mean import correct_mean, robust_mean
from sentinel_bench.pipeline.recovery import Pass, run
from sentinel_bench.pipeline.segment import Segment
from sentinel_bench.pipeline.stages import split
from sentinel_bench.pipeline.team import Alone, Team, join_rows, split_rows
from sentinel_bench.pipeline.weights import (
    PrivateModel,
    StageWork,
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
    """Return the rate of a step: linear warm-up, flat, then decay over the last share."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    decay = max(1, round(config.lr_decay_ratio * config.steps))
    left = min(1.0, max(0.0, (config.steps - step) / decay))
    if config.lr_decay_type == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)


def autocast(scenario: Scenario) -> torch.autocast:
    """Return the precision of a scenario's forward pass, to be entered."""
    device, precision = scenario.device, scenario.train.precision
    bf16 = precision == "bf16" or (precision == "auto" and device == "cuda")
    return torch.autocast(device, dtype=torch.bfloat16, enabled=bf16)


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


def clip_gradients(
    parameters: Sequence[nn.Parameter], limit: float, team: Team, loss: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scale gradients so that their norm over all processes is at most `limit`.

    Returns:
        The norm, and the loss, which is None where the last stage is not.
    """
    own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm, loss = team.norm_and_loss(own, loss)
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm, loss


class Trainer:
    """A model cut into stages, its boundaries, and its optimizer.

    Args:
        scenario: the settings.
        batches: where the data comes from.
        vocab_size: tokens that the model knows.
        team: the processes that train together; None: this one alone.
    """

    def __init__(
        self, scenario: Scenario, batches: Batches, vocab_size: int, team: Team | None = None
    ) -> None:
        grid = scenario.grid
        self.scenario = scenario
        self.team: Team = Alone(grid.stages, grid.replicas) if team is None else team
        self._batches = batches
        self._microbatches = scenario.train.microbatches
        here = [index for segment in self.team.segments for index in segment]
        self._whole_model = len(here) == grid.stages
        model = build_model(scenario, vocab_size, None if self._whole_model else "cpu")
        self.config = model.config
        stages = split(model, layers_per_stage(scenario))
        self._stages = {index: stages[index].to(scenario.device) for index in here}
        self.model: nn.Module = model if self._whole_model else nn.ModuleList(self._stages.values())
        self._boundaries = _boundaries(grid.stages, grid.replicas, self.team)
        self._fed: dict[int, list[Tensor]] = {}
        """What each stage was fed in this pass, one tensor for each microbatch."""
        self._segments = [
            Segment(
                {i: self._stages[i] for i in segment},
                self._boundaries,
                grid.replicas,
                self.config.hidden_size,
                self._fed,
                self._autocast,
            )
            for segment in self.team.segments
        ]
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self.model, scenario.train)
        self._exchange: Exchange | None = None
        self._copies: Copies | None = None
        self._labels = torch.empty(0)
        """Of all replicas in this step."""
        self._early: list[Any] = []
        """Ranks left out of the loss of each microbatch."""
        self._losses: list[Tensor] = []
        self._aggregator: Callable[[Tensor], Tensor] | None = None
        self._engine = self.team.engine(self._segments, self._loss, scenario)

    def connect(self, exchange: Exchange | None) -> None:
        """Put an exchange behind all boundaries; None makes them plain wires.

        A defense whose stages keep copies of blocks has them made here, of the stages as they are.
        """
        self._exchange = exchange
        self._copies = self._copied(exchange)
        if exchange is not None:
            exchange.redo = self.redo if self._copies is None else self._copies.redo
            exchange.check_linears = self.check_linears if self._copies is None else None
        for boundary in self._boundaries.values():
            boundary.exchange = exchange

    def aggregate_with(self, aggregator: Callable[[Tensor], Tensor] | None) -> None:
        """Combine the weight gradients of replicas by a robust rule; None takes their mean.

        The rule takes `[replicas, parameters]`, NaN for a rank that is left out.
        """
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
        norm, loss = clip_gradients(self._parameters, limit, self.team, done.loss)
        nothing = recovery.skip or len(recovery.still) == self.scenario.grid.stages
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
        return StepResult(float(loss), float(norm), done.excluded, skipped)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, int]:
        """Return the held-out loss in nats per token of the honest model, and the token count."""
        total, tokens = 0.0, 0
        for inputs, targets in self._held_out():
            labels = self._tensor(targets)
            logits = self._logits(self._tensor(inputs))
            if logits is not None:
                total += float(
                    F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
                )
                tokens += labels.numel()
        total, tokens = (
            sum(parts) for parts in zip(*self.team.share((total, tokens)), strict=True)
        )
        return total / tokens, tokens

    def redo(
        self,
        stage: int,
        direction: Direction,
        of: Sequence[int],
        received: Tensor | None,
        microbatch: int = 0,
    ) -> Tensor:
        """Do the work of replicas `of` of a stage a second time.

        Args:
            stage, direction: whose work, in the step that is running.
            of: replicas, at least one.
            received: `[replicas, batch, tokens, hidden]`, gradients that the stage received, each
                of the replica's own mean loss; not looked at for activations and at the last stage.
            microbatch: which part of the step's batch.

        Returns:
            What they should have sent in this step, from what they received:
            `[n, batch, tokens, hidden]`, gradients of each replica's own mean loss.
        """
        return self._work(stage, direction, of, received, microbatch).run()[0]

    def check_linears(
        self,
        stage: int,
        direction: Direction,
        of: Sequence[int],
        received: Tensor | None,
        lies: Mapping[int, Tensor],
        projections: int,
        seed: int,
        microbatch: int = 0,
    ) -> LinearCheck:
        """Test what replicas `of` of a stage claim of their linear layers in the step that runs.

        Args:
            stage, direction, of, received, microbatch: see `redo`.
            lies: replica to what it sent, `[batch, tokens, hidden]`, of those who tampered with it.
            projections: how many random vectors test each claim.
            seed: of these vectors.
        """
        work = self._work(stage, direction, of, received, microbatch)
        return check_linears(work, of, lies, projections, seed)

    def _work(
        self,
        stage: int,
        direction: Direction,
        of: Sequence[int],
        received: Tensor | None,
        microbatch: int,
    ) -> Work:
        """Return the work of replicas `of`, to be done a second time; see `redo`."""
        replicas = self.scenario.grid.replicas
        labels = split_rows(self._labels, replicas, self._microbatches)[microbatch]

        def rows(x: Tensor) -> Tensor:
            return x.view(replicas, -1, *x.shape[1:])[list(of)].flatten(0, 1)

        def seed(out: Tensor) -> tuple[Tensor, Tensor | None]:
            if stage < self.scenario.grid.stages - 1:
                assert received is not None
                return out, received[list(of)].flatten(0, 1)
            excluded = self._excluded(microbatch)
            loss = rank_loss(out, rows(labels), [excluded[r] for r in of])
            return loss * len(of), None

        forward = direction == "activation"
        return Work(
            stage=self._stages[stage],
            fed=rows(self._everybodys(self._fed[stage][microbatch])).requires_grad_(not forward),
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
        for index, stage in self._stages.items():
            if not exchange.weighs and index not in some:
                continue
            before = flat(trainable(stage))
            after = exchange.hold(index, before, replicas, partial(self._private, index))
            if after is not before:
                set_weights(stage, after)

    @torch.no_grad()
    def success(self, trigger: Sequence[int], target: int) -> float:
        """Return how often `target` follows `trigger` at the end of a held-out sequence, 0 to 1."""
        hits = count = 0
        for inputs, _ in self._held_out():
            ids = self._tensor(inputs).clone()
            tokens = torch.tensor(trigger, device=ids.device)[-ids.shape[1] :]
            ids[:, -len(tokens) :] = tokens
            logits = self._logits(ids)
            if logits is not None:
                hits += int((logits[:, -1].argmax(-1) == target).sum())
                count += len(ids)
        told = self.team.share((hits, count))
        found: float = sum(h for h, _ in told) / sum(n for _, n in told)
        return found

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
        return int(self.config.vocab_size)

    @property
    def bytes_of_stages(self) -> list[int]:
        """Return the bytes of the weights of each stage; 0 for one that is elsewhere."""
        sizes = {i: sum(p.nbytes for p in s.parameters()) for i, s in self._stages.items()}
        return [sizes.get(i, 0) for i in range(self.scenario.grid.stages)]

    @property
    def signal_shape(self) -> tuple[int, int, int]:
        """Return batch, tokens and hidden of one worker's signal."""
        train = self.scenario.train
        return train.batch_size // train.microbatches, train.seq_len, self.config.hidden_size

    @property
    def _guarded(self) -> bool:
        """True if a defense runs: it also drops a step whose gradients are not finite."""
        return isinstance(self._exchange, LiveExchange) and not self._exchange.inspector.passive

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Pass:
        """Do one pass; an alarm in its forward part can save the backward one."""
        replicas, team = self.scenario.grid.replicas, self.team
        self._begin_pass(targets)
        ids, labels = (
            team.own(x.view(replicas, -1, x.shape[1])).flatten(0, 1) for x in (inputs, targets)
        )
        if self._engine is not None:
            self._engine.run(ids, labels)
        else:
            again = self._in_sequence(ids, labels)
            if again is not None:
                return Pass(self._add_up([]), 0, again)
        self._check_events()
        late = self._agree()
        excluded = self._excluded()
        again = self._settle()
        if again is not None:
            self._optimizer.zero_grad(set_to_none=True)
            return Pass(self._add_up([]), 0, again)
        if any(excluded != early for early in self._early):
            self._redo_late(late, excluded)
            self._exclude_copies(excluded)
        loss = self._add_up([p.grad for p in self._parameters if p.grad is not None])
        self._combine(excluded)
        left_out = sum(excluded)
        if 0 < left_out < replicas:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad *= self._scale(left_out)
        return Pass(loss, left_out, None)

    def _begin_pass(self, targets: Tensor) -> None:
        self._labels = targets
        self._early, self._losses = [], []
        for segment in self._segments:
            segment.begin_pass(rides=self._exchange is not None and self._exchange.taints)
        for boundary in self._boundaries.values():
            boundary.begin_pass()
        if self._copies is not None:
            self._copies.begin(self._fed, targets)

    def _in_sequence(self, ids: Tensor, labels: Tensor) -> Recovery | None:
        """Do the pass in this process; return what becomes of it after the forward part."""
        own, parts = len(self.team.replicas), self._microbatches
        losses = [
            self._loss(self._segments[0](x), y)
            for x, y in zip(
                split_rows(ids, own, parts), split_rows(labels, own, parts), strict=True
            )
        ]
        again = self._settle()
        if again is not None or self._copies is not None:
            self._read_early()
        if again is not None:
            return again
        self._exclude_copies(self._early[0])
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        if parts > 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad /= parts
        return None

    def _loss(self, out: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the loss of the next microbatch; `out` is what the last stage has put out."""
        own, everybody = self.team.replicas, self.scenario.grid.replicas
        keeps = self._keeps(out)
        if keeps is None:
            early = self._excluded(len(self._early))
            self._early.append(early)
            loss = rank_loss(out[0], labels, [early[r] for r in own])
        else:
            self._early.append(~keeps)
            loss = kept_loss(out[0], labels, self.team.own(keeps))
        if len(own) < everybody:
            loss = loss * (len(own) / everybody)
        self._losses.append(loss.detach())
        return loss + echo(out[1]) if len(out) > 1 else loss

    def _read_early(self) -> None:
        self._early = [e.tolist() if isinstance(e, Tensor) else e for e in self._early]

    def _keeps(self, out: Sequence[Tensor]) -> Tensor | None:
        """Return who counts in the loss, `[replicas]` bool, if that stays on the device."""
        exchange = self._exchange
        if not isinstance(exchange, LiveExchange) or len(out) == 1:
            return None
        inspector = exchange.inspector
        return inspector.keeps(out[1]) if isinstance(inspector, DeferredInspector) else None

    def _add_up(self, gradients: list[Tensor]) -> Tensor | None:
        """Add up gradients and loss over all groups; return the loss, None if it is elsewhere."""
        loss = self._shown()
        self.team.add(gradients if loss is None else [*gradients, loss])
        return loss

    def _shown(self) -> Tensor | None:
        """Return the mean loss over the tokens of the ranks that count; None if it is elsewhere.

        Of the replicas that are here, in such a way that those of all groups add up.
        """
        if not self._losses:
            return None
        counted = sum(early.count(False) for early in self._early)
        total = len(self._early) * self.scenario.grid.replicas
        shown = torch.stack(self._losses).mean()
        return shown * (total / counted if counted else torch.nan)

    def _check_events(self) -> None:
        """Refuse a pass in which a message was lost or came twice.

        Raises:
            RunError: the count of a boundary is not that of the microbatches.
        """
        if self._exchange is None or self._exchange.idle:
            return
        for index, boundary in self._boundaries.items():
            if {*boundary.events.values()} != {self._microbatches}:
                raise RunError(
                    f"boundary {index} saw {boundary.events} in one pass, not "
                    f"{self._microbatches} of each: a message was lost or came twice"
                )

    def _agree(self) -> dict[int, int]:
        """Tell all processes who was tainted; return who was late, and the stage of the lie."""
        if not isinstance(self._exchange, LiveExchange):
            return {}
        inspector = self._exchange.inspector
        if isinstance(inspector, DeferredInspector):
            inspector.flush()
            self._read_early()
        late = dict(inspector.late)
        if self.team.several and self._exchange.taints:
            for tainted, others, early in self.team.share((inspector.tainted, late, self._early)):
                for microbatch, ranks in enumerate(tainted):
                    inspector.hear(ranks, microbatch)
                late |= others
                self._early = self._early or early
        return late

    def _copied(self, exchange: Exchange | None) -> Copies | None:
        """Return copies of the stages, if the defense behind an exchange has them kept."""
        if not isinstance(exchange, LiveExchange) or exchange.inspector.redundancy is None:
            return None
        return Copies(
            [*self._stages.values()],
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

    def _excluded(self, microbatch: int | None = None) -> list[bool]:
        if isinstance(self._exchange, LiveExchange):
            return self._exchange.inspector.excluded(microbatch)
        return [False] * self.scenario.grid.replicas

    def _redo_late(self, late: Mapping[int, int], excluded: list[bool]) -> None:
        """Take ranks that were tainted late out of the weight gradients that have counted them.

        When a lie is found in the backward pass, the stages downstream of it have already counted
        the rank: their weight gradients are computed again without it, from what each stage was
        `fed`. Upstream its gradient was replaced by zeros. (Of several microbatches others may have
        been counted anywhere.) Rare, so nothing is kept for it but the inputs: to retain the graph
        of every step would slow all of them down.
        """
        first = min(late.values()) if self._microbatches == 1 else 0
        own = [excluded[r] for r in self.team.replicas]
        targets = self._own_labels()
        keep = torch.tensor([not e for e in own], device=targets.device)
        rows = keep.repeat_interleave(len(targets) // len(own)).view(-1, 1, 1)
        for index, stage in self._stages.items():
            parameters = [p for p in stage.parameters() if p.grad is not None]
            if index < first or not parameters:  # bypassed
                continue
            with self._autocast():
                out = stage(join_rows(self._fed[index], len(own)))
            if index == self.scenario.grid.stages - 1:
                out, grad = rank_loss(out, targets, own) * (len(own) / len(excluded)), None
            else:
                grad = self._passed(index).masked_fill(~rows, 0.0)
            fresh = torch.autograd.grad(out, parameters, grad)
            for parameter, value in zip(parameters, fresh, strict=True):
                parameter.grad = value

    def _combine(self, excluded: list[bool]) -> None:
        """Let attackers contribute to the weight gradients, and a robust rule replace their mean.

        The mean is there already: what an attacker sends beside its honest gradient is added to it,
        and what is dropped is taken out. Only a robust rule needs the gradients of all replicas;
        those left out are NaN to it.
        """
        exchange = self._exchange
        if exchange is None or all(excluded):
            return
        live = exchange if isinstance(exchange, LiveExchange) else None
        some = live.tamperer.update_stages if live else []
        still = live.recovery.still if live else frozenset()
        rule = self._aggregator if live else None
        for index, stage in self._stages.items():
            if index in still or not (rule or exchange.weighs or index in some):
                continue
            work = self._stage_work(index)
            given = exchange.contribute(index, excluded, work)
            if rule:
                robust_mean(stage, excluded, given, work, rule)
            else:
                correct_mean(stage, excluded, given, work)

    def _stage_work(self, index: int) -> StageWork:
        last = index == self.scenario.grid.stages - 1
        own = len(self.team.replicas)
        return StageWork(
            stages=[stage for i, stage in self._stages.items() if i >= index],
            fed=self._everybodys(join_rows(self._fed[index], own)),
            passed=None if last else self._everybodys(self._passed(index)),
            labels=self._labels,
            replicas=self.scenario.grid.replicas,
            autocast=self._autocast(),
            vocabulary=self.vocabulary,
            microbatches=self._microbatches,
        )

    def _passed(self, index: int) -> Tensor:
        """Return the gradient that reached the output of a stage, of the mean over the batch."""
        whole = join_rows(self._boundaries[index].passed, len(self.team.replicas))
        return whole / self._microbatches if self._microbatches > 1 else whole

    def _everybodys(self, x: Tensor) -> Tensor:
        """Return rows of all replicas, `[replicas * batch, ...]`, of those that are here."""
        if not self.team.several:
            return x
        own = x.view(len(self.team.replicas), -1, *x.shape[1:])
        return self.team.gather(own).flatten(0, 1)

    def _own_labels(self) -> Tensor:
        apart = self._labels.view(self.scenario.grid.replicas, -1, self._labels.shape[1])
        return self.team.own(apart).flatten(0, 1)

    def _held_out(self) -> list[Pair]:
        """Return the share of the held-out batches that this group of replicas looks at."""
        group, groups = self.team.column
        return self._batches.held_out(self.scenario.train.eval_sequences)[group::groups]

    def _logits(self, ids: Tensor) -> Tensor | None:
        """Run the model on `[n, tokens]`; None where the last stage is not."""
        h, shape = ids, (*ids.shape, self.config.hidden_size)
        for segment in self.team.segments:
            h = self.team.fetch(h, segment, shape)
            with self._autocast():
                for index in segment:
                    h = self._stages[index](h)
            self.team.pass_on(h, segment)
        return h if self.scenario.grid.stages - 1 in self._stages else None

    def _private(self, index: int, replica: int) -> PrivateModel:
        return PrivateModel(
            [*self._stages.values()], index, replica, self._batches, self.vocabulary
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.scenario.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return autocast(self.scenario)


def _boundaries(stages: int, replicas: int, team: Team) -> dict[int, Boundary]:
    """Return the boundaries that touch a stage which is here."""
    here = {index for segment in team.segments for index in segment}
    found = {}
    for index in range(stages - 1):
        sides: dict[Side, int] = {"up": index, "down": index + 1}
        own = frozenset(side for side, stage in sides.items() if stage in here)
        if own:
            found[index] = Boundary(index, replicas, team, own)
    return found
