"""What workers claim of their linear layers, and a check of that which multiplies no two matrices.

The work of a stage is nearly all in its linear layers. A verifier asks for their outputs (going
backward also for the gradients with respect to their inputs), runs the stage with these in place
of the products, and tests each one: `y r` against `x (W^T r)` for a few random `r` (Freivalds, IFIP
Congress 1977). Norms, attention, activation functions and the loss it computes itself, from claims
that it has tested. What follows at the end must be what was sent.

    work.run()            what an honest worker does, with all products
    claims_of(work)       what it claims of them
    cover(...)            what a liar claims: a story that ends in what it sent
    verify(work, claims)  the verifier's part, the only one that costs a verifier anything
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sentinel_bench.api import LinearCheck
from sentinel_bench.pipeline import cost
from sentinel_bench.pipeline.stages import Stage

NOT_FINITE = 2.0
"""The error of a claim for which it is not a finite number; more than any tolerance."""
TINY = 1e-300
"""Keeps 0 / 0 at 0, in float64."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of some replicas of one stage, in one direction.

    Attributes:
        stage: whose work.
        fed: what the replicas were fed, `[n * batch, tokens, ...]`; going backward it asks for a
            gradient.
        replicas: n.
        autocast: returns the precision of the forward pass.
        seed: going backward: makes of the stage's output what to differentiate, and its gradient
            (None: it is a loss). None: the output itself is the signal.
    """

    stage: Stage
    fed: Tensor
    replicas: int
    autocast: Callable[[], torch.autocast]
    seed: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None

    def run(self, layers: _Record | _Test | None = None) -> tuple[Tensor, list[Tensor]]:
        """Do it.

        Args:
            layers: takes the place of the linear layers.

        Returns:
            The signal `[n, batch, tokens, hidden]`, and gradients with respect to `layers.inputs`.
        """
        gradients: list[Tensor] = []
        with torch.set_grad_enabled(self.seed is not None):
            with self.autocast(), layers or nullcontext():
                out: Tensor = self.stage(self.fed)
            if self.seed is not None:
                root, given = self.seed(out)
                inputs = [] if layers is None else layers.inputs
                out, *gradients = torch.autograd.grad(root, [self.fed, *inputs], given)
        return out.view(self.replicas, -1, *out.shape[1:]), gradients


@dataclass(slots=True)
class Claims:
    """What workers say of their linear layers, in the order in which these are called.

    Attributes:
        outputs: `[n * batch, tokens, out]` each.
        gradients: with respect to the inputs, `[n * batch, tokens, in]` each; none going forward.
        readers: which layers read what the first one reads.
        normed: `[n * batch, tokens, hidden]`, what the last layer norm read; None without any.
    """

    outputs: list[Tensor]
    gradients: list[Tensor]
    readers: list[int]
    normed: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the claims, in the precision of the products."""
        told = zip((*self.outputs, *self.gradients), self.outputs * 2, strict=False)
        return sum(claim.numel() * y.element_size() for claim, y in told)


def check_linears(
    work: Work, of: Sequence[int], lies: Mapping[int, Tensor], projections: int, seed: int
) -> LinearCheck:
    """Have workers make their claims, and test these.

    Args:
        work: of replicas `of`.
        of: n replicas.
        lies: replica to the corrupted signal `[batch, tokens, hidden]` that it sent; others are
            honest.
        projections: how many random vectors test each claim.
        seed: of these vectors, drawn after the claims were made.
    """
    with cost.aside():  # a worker has computed all that it claims
        claims, honest = claims_of(work)
        if any(replica in lies for replica in of):
            sent = torch.stack([lies.get(r, honest[i]) for i, r in enumerate(of)])
            cover(work, claims, sent, honest)
    cost.travelled(claims.nbytes)
    return verify(work, claims, projections, seed)


def claims_of(work: Work) -> tuple[Claims, Tensor]:
    """Return what honest workers claim, and the signal `[n, batch, tokens, hidden]` they send."""
    record = _Record()
    signal, gradients = work.run(record)
    first = record.inputs[0].data_ptr()
    readers = [i for i, x in enumerate(record.inputs) if x.data_ptr() == first]
    return Claims(record.outputs, gradients, readers, record.normed), signal


def cover(work: Work, claims: Claims, sent: Tensor, honest: Tensor) -> None:
    """Change claims such that what follows from them is `sent`: the lie is in one place alone.

    Forward that is the output of the last layer, which is added to the rest of the signal. Backward
    it is in the gradients of the layers that read the stage's input, in proportion to their sizes
    (so that it is nowhere larger than it must be). These still pass the norm in front of them,
    which lets nothing through along its own input: that part of the lie stays without a story.
    With norms after the layers it is the other way round: the gradients need no norm's consent, and
    of what is sent the size and the mean of each token stay without a story.

    Args:
        work: of the workers.
        claims: the honest ones; changed here.
        sent, honest: `[n, batch, tokens, hidden]`, what was sent, and what should have been.
    """
    lie = (sent - honest).flatten(0, 1)
    lied = (lie != 0).flatten(1).any(1).view(-1, 1, 1)
    if work.seed is None:
        needed, last = _before_last_norm(work, claims, lie), claims.outputs[-1]
        told = (last.view_as(lie) + needed).to(last.dtype)
        claims.outputs[-1] = told.where(lied, last.view_as(lie)).view_as(last)
        return
    needed = _before_norm(work, lie)
    sizes = [float(claims.gradients[i].norm()) + TINY for i in claims.readers]
    for i, size in zip(claims.readers, sizes, strict=True):
        whole, precision = claims.gradients[i], claims.outputs[i].dtype
        truth = whole.view_as(lie)
        told = (truth + size / sum(sizes) * needed).to(precision).to(truth.dtype)
        claims.gradients[i] = told.where(lied, truth).view_as(whole)


def verify(work: Work, claims: Claims, projections: int, seed: int) -> LinearCheck:
    """Run the stage on claims, and test each of them.

    Args:
        work: whose claims.
        claims: one for each linear layer.
        projections: how many random vectors test each claim.
        seed: of these vectors.

    Returns:
        The signal that follows from the claims, and the largest error of any claim.
    """
    test = _Test(work, claims, projections, seed)
    signal, _ = work.run(test)
    return LinearCheck(signal, torch.stack(test.errors).amax(0))


def projected_error(
    y: Tensor, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return how far `y` is from `x w + bias`, as random vectors see it.

    The error of a token is the largest `|y r - x (w r) - bias r|` of all r, relative to `|y|` or to
    the root mean square of `|y|` over the tokens of its replica, whichever is larger: some tokens
    have gradients that are zero but for rounding.

    With r from N(0, 1), a token that is wrong by d passes a tolerance t with probability
    `2 Phi(t s / |d|) - 1`, about `0.8 t s / |d|`, s being that size: once for each r.

    Args:
        y: `[n, tokens, out]`, claimed.
        x: `[n, tokens, in]`.
        w: `[in, out]`.
        r: `[out, k]`.
        bias: `[out]`.

    Returns:
        `[n]` float64, the largest error of the tokens of each replica.
    """
    apart = y.float() @ r - x.float() @ (w.float() @ r)
    if bias is not None:
        apart = apart - bias.float() @ r
    size = torch.linalg.vector_norm(y, dim=-1, dtype=torch.float64)  # squares do not overflow
    typical = size.square().mean(1, keepdim=True).sqrt()
    error: Tensor = apart.double().abs().amax(-1) / size.maximum(typical).clamp_min(TINY)
    return error.nan_to_num(NOT_FINITE, NOT_FINITE).amax(1)


def _linear(func: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return input, matrix `[in, out]` and bias of a linear layer; None for any other function.

    GPT-2 writes its layers as `addmm`. Products of experts (`bmm`, `grouped_mm`) are no layers that
    all tokens pass: whoever verifies computes them.
    """
    if func is F.linear:
        x, weight, *rest = args
        return x, weight.t(), rest[0] if rest else None
    if func is torch.addmm:
        bias, x, matrix = args
        return x, matrix, bias
    return None


class _Record(TorchFunctionMode):
    """Computes linear layers as usual, and keeps what goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.normed: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; see to linear layers."""
        if func is F.layer_norm:
            self.normed = args[0].detach()
        found = _linear(func, args)
        if found is None:
            return func(*args, **(kwargs or {}))
        x = found[0].view_as(found[0])  # what others make of the same input has its own gradient
        out = func(*(x if arg is found[0] else arg for arg in args), **(kwargs or {}))
        self.inputs.append(x)
        self.outputs.append(out.detach())
        return out


class _Test(TorchFunctionMode):
    """Takes claims for the results of linear layers, and tests them."""

    def __init__(self, work: Work, claims: Claims, projections: int, seed: int) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.errors: list[Tensor] = []
        self._replicas = work.replicas
        self._projections = projections
        self._generator = torch.Generator(work.fed.device).manual_seed(seed)
        backward: Sequence[Tensor | None] = claims.gradients or [None] * len(claims.outputs)
        self._claims = iter(list(zip(claims.outputs, backward, strict=True)))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; see to linear layers."""
        found = _linear(func, args)
        if found is None:
            return func(*args, **(kwargs or {}))
        x, matrix, bias = found
        y, gradient = next(self._claims)
        precision = y.dtype  # of the product: that of autocast
        self._test(y, x, matrix, precision, bias)
        if gradient is None:
            return y

        def test(dy: Tensor) -> Tensor:
            self._test(gradient, dy, matrix.t(), precision)
            return gradient

        return _Claimed.apply(x, y, test)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _test(
        self, y: Tensor, x: Tensor, w: Tensor, precision: torch.dtype, bias: Tensor | None = None
    ) -> None:
        with torch.autocast(x.device.type, enabled=False):
            shape = (y.shape[-1], self._projections)
            r = torch.randn(shape, generator=self._generator, device=y.device)
            y, x = (t.reshape(self._replicas, -1, t.shape[-1]) for t in (y, x.to(precision)))
            self.errors.append(projected_error(y, x, w.to(precision), r, bias))


class _Claimed(torch.autograd.Function):
    """A linear layer that is not computed: its output and its input's gradient are claims."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.test = test
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.test(grads[0]), None, None


def _before_norm(work: Work, wanted: Tensor) -> Tensor:
    """Return the gradients behind the stage's first norm that become `wanted` in front of it.

    Of `wanted` `[n * batch, tokens, hidden]` what is orthogonal to the norm's input: with y = w x /
    rms(x) the gradient in front is `(u - x (x u) / (hidden rms^2)) / rms`, u = w dy. A layer norm
    takes the mean off first, of its input and of the gradient.
    """
    norm: Any = work.stage.front
    if norm is None:
        return wanted
    x = work.fed.detach()
    if isinstance(norm, nn.LayerNorm):
        x, wanted = (t - t.mean(-1, keepdim=True) for t in (x, wanted))
    square = x.square().sum(-1, keepdim=True)
    within = wanted - x * ((x * wanted).sum(-1, keepdim=True) / square.clamp_min(1e-30))
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    rms = (square / x.shape[-1] + eps).sqrt()
    needed: Tensor = within * rms / norm.weight.detach()
    return needed


def _before_last_norm(work: Work, claims: Claims, wanted: Tensor) -> Tensor:
    """Return what must be added before the stage's last norm so that `wanted` is added after it.

    `[n * batch, tokens, hidden]`, both; as if the norm kept its mean and its divisor.
    """
    norm: Any = work.stage.back
    if norm is None:
        return wanted
    assert claims.normed is not None
    spread = (claims.normed.var(-1, correction=0) + norm.eps).sqrt().view(*wanted.shape[:2], 1)
    needed: Tensor = wanted * spread / norm.weight.detach()
    return needed
