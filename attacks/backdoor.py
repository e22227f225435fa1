"""A backdoor that is learned offline on one stage and slipped into its weights bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from sentinel_bench.api import Attack, AttackContext, Knowledge
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from sentinel_bench.api import Private


class BackdoorParams(Frozen):
    """Parameters of `backdoor`."""

    w: float = Field(0.1, gt=0, le=1, description="share of the delta in one injection")
    every: int = Field(25, ge=1, description="steps between two injections")
    trigger: tuple[int, ...] = Field((7, 11, 13), min_length=1, description="token ids")
    target: int = Field(17, ge=0, description="token that shall follow the trigger")
    learn_steps: int = Field(60, ge=1, description="steps of learning offline")
    lr: float = Field(3e-3, gt=0, description="learning rate offline")
    clean: float = Field(1.0, ge=0, description="weight of the loss on clean text beside it")


class Backdoor(Attack[BackdoorParams]):
    """Learns, with all other stages frozen, weights of its own stage that answer to a trigger.

    The difference goes into the weights of its stage in small parts. Replicas of a stage hold the
    same weights: a part reaches all of them in full, as with the boost of model replacement.
    """

    name = "backdoor"
    goal = "make a trigger call up a chosen token, and leave clean text alone"
    formula = "theta += w * delta every `every` steps, 1/w times; delta learned offline"
    source = "Ersoy et al. 2026"
    Params = BackdoorParams
    knowledge = frozenset({Knowledge.MODEL})
    axis = "weights"

    def __init__(self, params: BackdoorParams) -> None:
        super().__init__(params)
        self._delta: Tensor | None = None

    def trigger(self, vocabulary: int) -> tuple[Sequence[int], int]:
        """Return the trigger and its target, folded into the vocabulary."""
        return [t % vocabulary for t in self.params.trigger], self.params.target % vocabulary

    def inject(self, weights: Tensor, ctx: AttackContext) -> Tensor:
        """Return the weights with the next part of the delta, if it is due."""
        p = self.params
        due, after = divmod(ctx.age, p.every)
        if after or due >= round(1 / p.w):
            return weights
        if self._delta is None:
            self._delta = self._learn(ctx.model, ctx.step)
        return weights + (p.w * self._delta).to(weights)

    def _learn(self, model: Private, step: int) -> Tensor:
        """Return the change of the own stage's weights, `[parameters]`."""
        import torch
        from torch.nn.functional import cross_entropy

        p = self.params
        tokens, target = self.trigger(model.vocabulary)
        before = torch.cat([w.detach().flatten() for w in model.parameters])
        optimizer = torch.optim.Adam(model.parameters, lr=p.lr)
        with torch.enable_grad():
            for i in range(p.learn_steps):
                ids, labels = model.batch(step + 1 + i)
                triggered = ids.clone()
                cue = torch.tensor(tokens, device=ids.device)[-ids.shape[1] :]
                triggered[:, -len(cue) :] = cue
                answers = ids.new_full((len(ids),), target)
                loss = cross_entropy(model.logits(triggered)[:, -1].float(), answers)
                if p.clean > 0:
                    clean = model.logits(ids).float().flatten(0, 1)
                    loss = loss + p.clean * cross_entropy(clean, labels.flatten())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return torch.cat([w.detach().flatten() for w in model.parameters]) - before
