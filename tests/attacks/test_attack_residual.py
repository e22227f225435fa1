"""`identity`, `update-flip` and the mirrors: by hand, and by what they promise to keep."""

import pytest
import torch
from torch import Tensor

ALL = ("identity", "update-flip", "mirror", "mirror-surrogate")
MIRRORS = ("mirror", "mirror-surrogate")


def some(seed: int, *shape: int, change: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return a received and an honest signal as in a residual network."""
    generator = torch.Generator().manual_seed(seed)
    received = torch.randn(shape, generator=generator) * 3 + 1
    return received, received + change * torch.randn(shape, generator=generator)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Per token, in float64."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def across(a: Tensor, r: Tensor) -> Tensor:
    """Return what of each token of `a` is orthogonal to `r`, in float64."""
    a, r = a.double(), r.double()
    return a - (a * r).sum(-1, keepdim=True) / r.square().sum(-1, keepdim=True) * r


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("direction", ["activation", "gradient"])
def test_where_nothing_was_received_it_is_honest(create, context, x, name, direction):
    assert create(name).send(x, context(direction=direction)) is x


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e4, 1e15])
def test_it_is_finite_whatever_the_size_of_what_was_received(create, context, name, dtype, size):
    received, x = some(1, 2, 4, 8)
    received = (received * size).to(dtype)
    received[0, 0] = 0  # one token of zeros
    attack = create(name)
    for r in (received, torch.zeros_like(received), received):
        sent = attack.signal(x.to(dtype), context(received=r))
        assert sent.dtype == dtype
        assert sent.isfinite().all()


def test_identity_sends_what_it_received(create, context):
    received, x = some(1, 2, 4, 8)
    assert torch.equal(create("identity").signal(x, context(received=received)), received)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("update-flip", [0.5, 3.0]),  # (1, 2) - (.5, -1)
        ("update-flip:gain=2", [0.0, 4.0]),
        ("update-flip:gain=0.5", [0.75, 2.5]),
    ],
)
def test_update_flip_takes_the_update_away(create, context, text, expected):
    received, x = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.5, 1.0]]])
    assert create(text).signal(x, context(received=received)).tolist() == [[expected]]


def test_mirror_reflects_each_token_at_what_was_received_for_it(create, context):
    received = torch.tensor([[[3.0, 4.0], [0.0, -2.0]]])
    x = torch.tensor([[[5.0, 0.0], [1.0, 7.0]]])
    # token 0: a = 15 / 25 = .6; a r = (1.8, 2.4); w = (3.2, -2.4); a r - w = (-1.4, 4.8)
    # token 1: a = -14 / 4 = -3.5; a r = (0, 7); w = (1, 0); a r - w = (-1, 7)
    sent = create("mirror").signal(x, context(received=received))
    torch.testing.assert_close(sent, torch.tensor([[[-1.4, 4.8], [-1.0, 7.0]]]))


def test_mirror_negates_a_token_for_which_zeros_were_received(create, context):
    received = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    x = torch.tensor([[[5.0, 1.0], [2.0, 7.0]]])
    sent = create("mirror").signal(x, context(received=received))
    assert sent.tolist() == [[[-5.0, -1.0], [2.0, -7.0]]]


@pytest.mark.parametrize("name", MIRRORS)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_a_mirror_keeps_norm_and_angle_to_what_was_received(create, context, name, size):
    attack = create(name)
    for seed in range(5):
        received, x = some(seed, 3, 40, 16)
        received, x = received * size, x * size
        sent = attack.signal(x, context(received=received))
        norms = [t.double().norm(dim=-1) for t in (sent, x)]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(cosine(sent, received), cosine(x, received), rtol=0, atol=1e-5)
        assert not torch.allclose(sent, x, rtol=0.01, atol=0)


def test_mirror_turns_all_that_is_orthogonal_to_what_was_received(create, context):
    received, x = some(1, 2, 4, 8)
    sent = create("mirror").signal(x, context(received=received))
    torch.testing.assert_close(across(sent, received), -across(x, received), rtol=0, atol=1e-5)


def test_mirror_of_the_mirror_image_is_the_signal(create, context):
    received, x = some(1, 2, 4, 8)
    attack, ctx = create("mirror"), context(received=received)
    torch.testing.assert_close(attack.signal(attack.signal(x, ctx), ctx), x)


# --- mirror-surrogate -----------------------------------------------------------------------------


def predicted(traffic: list[tuple[Tensor, Tensor]], ridge: float, forgetting: float) -> Tensor:
    """Return the relative change predicted for the last of `traffic`, by weighted least squares."""
    hidden = traffic[0][0].shape[-1]
    inputs, changes = [], []
    for age, (received, x) in enumerate(reversed(traffic)):
        r, h = received.double().flatten(0, 1), x.double().flatten(0, 1)
        weight = forgetting ** (age / 2)  # the root: squares are what is summed
        inputs.append(weight * r / r.square().mean(1, keepdim=True).sqrt())
        changes.append(weight * (h - r) / r.norm(dim=1, keepdim=True))
    stacked = torch.cat(inputs)
    penalty = (ridge * stacked.square().sum(0).mean()).sqrt() * torch.eye(hidden).double()
    left = torch.cat([stacked, penalty])
    right = torch.cat([*changes, torch.zeros(hidden, hidden).double()])
    return (inputs[0] @ torch.linalg.lstsq(left, right).solution).view(traffic[0][0].shape)


def test_mirror_surrogate_keeps_what_two_tokens_with_one_input_have_in_common(create, context):
    # One input (1, 0, 0), updates (0, 1, 0) and (0, 0, 1): the prediction for both is a multiple
    # of (0, 1, 1). Update 0 is (0, .5, .5) + (0, .5, -.5), and becomes (0, 0, 1).
    received = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    x = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]])
    sent = create("mirror-surrogate").signal(x, context(received=received))
    torch.testing.assert_close(sent, torch.tensor([[[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]]))


def test_mirror_surrogate_predicts_from_its_past_with_less_and_less_weight(create, context):
    # One input; update (0, 1, 0) a step ago with weight .75, (0, 0, 1) now: the prediction is a
    # multiple of (0, .75, 1), |.|^2 = 1.5625. The update's part along it is (0, .48, .64), and the
    # rest, (0, -.48, .36), is turned.
    received = torch.tensor([[[2.0, 0.0, 0.0]]])
    attack, ctx = create("mirror-surrogate:forgetting=0.75"), context(received=received)
    attack.signal(torch.tensor([[[2.0, 1.0, 0.0]]]), ctx)
    sent = attack.signal(torch.tensor([[[2.0, 0.0, 1.0]]]), ctx)
    torch.testing.assert_close(sent, torch.tensor([[[2.0, 0.96, 0.28]]]))


@pytest.mark.parametrize(("ridge", "forgetting"), [(1e-3, 0.98), (0.5, 0.7), (1.0, 1.0)])
def test_mirror_surrogate_keeps_what_a_ridge_regression_predicts_and_turns_the_rest(
    create, context, ridge, forgetting
):
    attack = create(f"mirror-surrogate:ridge={ridge},forgetting={forgetting}")
    traffic = []
    for seed in range(6):
        traffic.append(some(seed, 2, 20, 8))
        received, x = traffic[-1]
        sent = attack.signal(x, context(received=received))
        p = across(predicted(traffic, ridge, forgetting), received)
        change, honest = across(sent - received, received), across(x - received, received)
        norms = change.norm(dim=-1), honest.norm(dim=-1)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        # the detector's statistic: the cosine between change and prediction, per token
        torch.testing.assert_close(cosine(change, p), cosine(honest, p), rtol=0, atol=1e-4)
        torch.testing.assert_close(across(change, p), -across(honest, p), rtol=0, atol=1e-3)


def test_mirror_surrogate_leaves_an_update_that_is_linear_in_the_input_alone(create, context):
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(9))
    attack = create("mirror-surrogate:ridge=1e-6")
    for seed in range(4):
        received, _ = some(seed, 4, 50, 8)
        x = received + 0.1 * received @ matrix
        sent = attack.signal(x, context(received=received))
        assert float((sent - x).norm() / (x - received).norm()) < 0.01
        turned = create("mirror").signal(x, context(received=received))
        assert float((turned - x).norm() / (x - received).norm()) > 1


def test_mirror_surrogate_fits_each_direction_on_its_own(create, context):
    def run(directions: tuple[str, ...]) -> list[Tensor]:
        attack, sent = create("mirror-surrogate"), []
        for seed in range(3):
            for direction in directions:
                received, x = some(seed, 1, 5, 8, change=1.0 if direction == "gradient" else 0.5)
                out = attack.send(x, context(received=received, direction=direction))
                sent += [out] * (direction == "gradient")
        return sent

    alone, beside = run(("gradient",)), run(("activation", "gradient"))
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


def test_tokens_for_which_zeros_were_received_do_not_count_in_the_fit(create, context):
    received, x = some(1, 2, 6, 8)
    padded, padded_x = torch.cat([received, torch.zeros(2, 3, 8)], 1), torch.cat([x, x[:, :3]], 1)
    sent = create("mirror-surrogate").signal(x, context(received=received))
    more = create("mirror-surrogate").signal(padded_x, context(received=padded))
    torch.testing.assert_close(more[:, :6], sent, rtol=0, atol=1e-4)
    assert torch.equal(more[:, 6:], -x[:, :3])  # and are negated
