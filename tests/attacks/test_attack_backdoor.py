"""The backdoor by hand: when it injects, how much, and what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sentinel_bench.api import Attack, AttackContext, Knowledge
from sentinel_bench.attacks.backdoor import Backdoor
from sentinel_bench.errors import KnowledgeError

VOCABULARY, HIDDEN = 24, 8
Create = Callable[[str], Attack[Any]]
Context = Callable[..., AttackContext]


class Copy:
    """A private model whose own stage is a linear map of the mean of the last two embeddings."""

    vocabulary = VOCABULARY

    def __init__(self, weights: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embed = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        start = (
            torch.zeros(VOCABULARY, HIDDEN) if weights is None else weights.view(VOCABULARY, HIDDEN)
        )
        self.parameters = [nn.Parameter(start.clone()), nn.Parameter(torch.zeros(VOCABULARY))]
        self.seen: list[Tensor] = []
        self.batches: list[int] = []

    def logits(self, ids: Tensor) -> Tensor:
        self.seen.append(ids.clone())
        h = self.embed[ids]
        h = h + h.roll(1, 1)
        return h @ self.parameters[0].T + self.parameters[1]

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a text in which each token is followed by the next one."""
        self.batches.append(index)
        generator = torch.Generator().manual_seed(index)
        first = torch.randint(VOCABULARY, (3, 1), generator=generator)
        ids = (first + torch.arange(7)) % VOCABULARY
        return ids[:, :-1], ids[:, 1:]


@pytest.fixture
def learn(create: Create) -> Callable[..., tuple[Tensor, Copy]]:
    def run(text: str, step: int = 4) -> tuple[Tensor, Copy]:
        attack, model = create(text), Copy()
        assert isinstance(attack, Backdoor)
        return attack._learn(model, step), model

    return run


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("backdoor:w=.5,every=3", [0, 3]),
        ("backdoor:w=.25,every=1", [0, 1, 2, 3]),
        ("backdoor:w=1,every=4", [0]),
        ("backdoor:w=.1,every=2", [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]),
    ],
)
def test_a_part_is_due_every_so_many_steps_until_the_delta_is_whole(
    create: Create, context: Context, text: str, due: list[int]
) -> None:
    attack, made = create(text), []

    def model() -> Copy:
        made.append(Copy())
        return made[-1]

    weights = torch.zeros(VOCABULARY * (HIDDEN + 1))
    start, steps = weights, []
    for age in range(30):
        known = {"age": age, "step": 50 + age, "granted": {Knowledge.MODEL: model}}
        after = attack.inject(weights, context(direction="update", **known))
        if after is not weights:
            steps.append(age)
        weights = after
    assert steps == due
    assert len(made) == 1  # it learns once
    delta = attack._delta
    assert delta.any()
    torch.testing.assert_close(weights - start, attack.params.w * len(due) * delta)
    assert attack.params.w * len(due) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_keep_their_dtype_and_are_not_changed_in_place(
    create: Create, context: Context, dtype: torch.dtype
) -> None:
    weights = torch.ones(VOCABULARY * (HIDDEN + 1), dtype=dtype)
    granted = {Knowledge.MODEL: Copy}
    after = create("backdoor").inject(weights, context(granted=granted))
    assert after.dtype == dtype
    assert torch.equal(weights, torch.ones_like(weights))
    assert not torch.equal(after, weights)


def test_without_the_model_it_cannot_learn(create: Create, context: Context) -> None:
    with pytest.raises(KnowledgeError, match="asks for 'model'"):
        create("backdoor").inject(torch.zeros(3), context())
    assert Backdoor.knowledge == {Knowledge.MODEL}


def test_the_delta_answers_to_the_trigger_and_keeps_to_the_text(
    learn: Callable[..., tuple[Tensor, Copy]],
) -> None:
    delta, model = learn("backdoor:lr=0.1,learn_steps=200,trigger=[3,9],target=20")
    learned, clean = Copy(), Copy()
    sizes = [p.numel() for p in learned.parameters]
    for p, part in zip(learned.parameters, delta.split(sizes), strict=True):
        p.data += part.view_as(p)
    for mine, theirs in zip(learned.parameters, model.parameters, strict=True):
        torch.testing.assert_close(mine, theirs)
    ids, labels = Copy().batch(999)
    cued = ids.clone()
    cued[:, -2:] = torch.tensor([3, 9])
    assert (learned.logits(cued)[:, -1].argmax(-1) == 20).all()
    other = ids.clone()
    other[:, -2:] = torch.tensor([5, 15])
    assert not (learned.logits(other)[:, -1].argmax(-1) == 20).any()
    losses = [
        cross_entropy(m.logits(ids).flatten(0, 1), labels.flatten()).item()
        for m in (clean, learned)
    ]
    assert losses[1] < losses[0]


def test_without_the_clean_loss_it_sees_triggered_text_alone(
    learn: Callable[..., tuple[Tensor, Copy]],
) -> None:
    _, model = learn("backdoor:learn_steps=5,clean=0,trigger=[3,9],target=20")
    assert len(model.seen) == 5
    assert all((ids[:, -2:] == torch.tensor([3, 9])).all() for ids in model.seen)
    _, model = learn("backdoor:learn_steps=5,trigger=[3,9],target=20")
    cued = [bool((ids[:, -2:] == torch.tensor([3, 9])).all()) for ids in model.seen]
    assert cued == [True, False] * 5


def test_it_learns_on_the_data_of_steps_to_come(learn: Callable[..., tuple[Tensor, Copy]]) -> None:
    _, model = learn("backdoor:learn_steps=4", step=10)
    assert model.batches == [11, 12, 13, 14]


def test_learning_draws_no_random_numbers_and_is_the_same_each_time(
    learn: Callable[..., tuple[Tensor, Copy]],
) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, _ = learn("backdoor")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, learn("backdoor")[0])


def test_learning_works_where_gradients_are_switched_off(
    learn: Callable[..., tuple[Tensor, Copy]],
) -> None:
    with torch.no_grad():
        delta, _ = learn("backdoor:learn_steps=3")
    assert delta.any()
    assert not delta.requires_grad


def test_a_trigger_longer_than_the_text_is_cut_at_its_beginning(
    learn: Callable[..., tuple[Tensor, Copy]],
) -> None:
    _, model = learn(f"backdoor:learn_steps=1,trigger={[*range(10)]}")
    assert model.seen[0].tolist() == [[4, 5, 6, 7, 8, 9]] * 3


def test_it_leaves_signals_and_updates_alone(create: Create, context: Context, x: Tensor) -> None:
    attack = create("backdoor")
    for direction in ("activation", "gradient"):
        assert attack.send(x, context(direction=direction)) is x
    assert attack.update(x, context()) is x
