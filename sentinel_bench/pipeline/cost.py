"""What a defense costs in each step: operations, and bytes that travel because of it.

Counted in honest steps after the warm-up, on copies that are thrown away (`Session.cost`): nobody
attacks, all replicas are active, flags have no consequence, and the clock of a run stands still.

* `step_flops`: floating-point operations of a plain training step, without defense or aggregator.
* `flops`: those that a step has on top of it, mean over the counted steps: the defense's own code,
  all work that is done again for it, the training of copies, the verifiers' look at whether signals
  are finite, and the rule of a robust aggregator. What only the simulation has to do is left out
  (`aside`): replicas are stacked here, a worker has its own weight gradient anyway.
* `bytes`: what travels between machines on top of a plain step, mean over the counted steps.
  Signals pass through verifiers, and weight gradients through whoever takes their mean, so looking
  at them is free. What counts:

    - work that another replica is asked for (`asked`): each time all that it is done from, that is
      the signal that came in forward (token ids of 8 bytes at the first stage), in the backward
      pass also the gradient that came in (target ids at the last stage), and the answer;
    - work that the verifier does itself (`recomputed`): the weights of the stage, once in a step
      in which it does any; it knows the signals and the data;
    - work of a copy that another stage keeps (`asked`, copied): the jump connection, that is the
      signal that came in forward, once in a step; the holder itself sent the gradient, compares,
      and hears of the norm by which all clip in some bytes;
    - whatever else is told to `travelled`, such as claims of linear layers (`pipeline/claims.py`).

  Not counted, since honest steps have none of it: juries, passes done again, copies that drifted.
* The bytes of state are measured beside these, at the end of the warm-up (`Session.state_bytes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from sentinel_bench.api import Direction

STEPS = 10
"""Steps that are counted: what a defense draws at random differs from one to the next."""
ID_BYTES = 8
"""Of a token, as the pipeline sends it."""

MOVES = {
    *("clone", "copy_", "_to_copy", "_unsafe_view", "cat", "stack", "repeat", "flip", "roll"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "zero_", "fill_"),
    *("full", "full_like", "new_full", "arange", "scalar_tensor", "lift_fresh", "eye"),
    *("index", "index_select", "gather", "take", "index_copy_", "index_put_", "scatter"),
    *("masked_fill", "masked_fill_", "where", "masked_select", "_local_scalar_dense"),
    *("slice_backward", "select_backward", "embedding", "embedding_dense_backward"),
    *("nll_loss_forward", "nll_loss_backward"),
}
"""Operations besides views that only make, move or choose numbers."""


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    found: int = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return found


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = (x.shape for x in (grad, query, key, value))
    found: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return found


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Each row of `a` meets one matrix; in the backward pass `b` is no stack of matrices either."""
    return 2 * a.numel() * b.shape[-1]


_RULES: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""For what torch has no rule of its own."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations while it is entered.

    Products of matrices and attention by torch's own rules (a multiplication and an addition each
    count); any other operation that computes counts one per number of its largest floating-point
    tensor, input or output, where a list of tensors is one. Views and `MOVES` count nothing. What
    leaves torch (a sort by numpy) is not seen.

    Attributes:
        flops: counted so far.
        paused: nothing is counted while it is set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it."""
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            self.flops += _count(func, args, kwargs or {}, out)
        return out


def _count(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    rule: Callable[..., int] | None = flop_registry.get(packet) or _RULES.get(packet.__name__)
    if rule is not None:
        return rule(*args, **kwargs, out_val=out)
    if func.is_view or packet.__name__ in MOVES:
        return 0
    return max(_numbers(x) for x in (*args, *kwargs.values(), out))


def _numbers(x: Any) -> int:
    """Return how many floating-point numbers a tensor, or a list of them, holds."""
    if isinstance(x, Tensor):
        return x.numel() if x.is_floating_point() else 0
    return sum(map(_numbers, x)) if isinstance(x, list) else 0


class Meter:
    """Counts what is computed and what travels within each `with` block, which is one step.

    Args:
        weights: bytes of the weights of each stage.

    Attributes:
        bytes: that travelled so far.
    """

    def __init__(self, weights: Sequence[int] = ()) -> None:
        self.bytes = 0
        self._weights = weights
        self._counter = FlopCounter()
        self._known: set[tuple[str, int]] = set()

    @property
    def flops(self) -> int:
        """Floating-point operations so far."""
        return self._counter.flops

    def __enter__(self) -> Meter:
        """Begin a step."""
        self._known.clear()
        _RUNNING.append(self)
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End a step."""
        self._counter.__exit__(*error)  # type: ignore[no-untyped-call]
        _RUNNING.pop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count no operation within the `with` block."""
        before, self._counter.paused = self._counter.paused, True
        try:
            yield
        finally:
            self._counter.paused = before

    def asked(self, stage: int, direction: Direction, answers: Tensor, *, copied: bool) -> None:
        """Count what travels for `asked`."""
        n, batch, tokens = answers.shape[:3]
        ids = n * batch * tokens * ID_BYTES
        fed = ids if stage == 0 else answers.nbytes
        if copied:
            self.bytes += self._first("jump", stage) * fed
            return
        self.bytes += fed + answers.nbytes
        if direction == "gradient":
            self.bytes += ids if stage == len(self._weights) - 1 else answers.nbytes

    def recomputed(self, stage: int) -> None:
        """Count what travels for `recomputed`."""
        self.bytes += self._first("weights", stage) * self._weights[stage]

    def _first(self, what: str, stage: int) -> bool:
        """Tell whether something is sent for the first time in this step."""
        new = (what, stage) not in self._known
        self._known.add((what, stage))
        return new


_RUNNING: list[Meter] = []
"""The meter that runs, if any: also seen by the thread in which a GPU's backward pass runs."""


def asked(stage: int, direction: Direction, answers: Tensor, *, copied: bool) -> None:
    """Tell that others have done the work of replicas of a stage a second time.

    Args:
        stage, direction: whose work.
        answers: `[n, batch, tokens, hidden]`.
        copied: True if the copies that stages keep of each other did it.
    """
    for meter in _RUNNING:
        meter.asked(stage, direction, answers, copied=copied)


def recomputed(stage: int) -> None:
    """Tell that a verifier has done work of a stage a second time."""
    for meter in _RUNNING:
        meter.recomputed(stage)


def travelled(size: int) -> None:
    """Tell that so many more bytes were sent from one machine to another."""
    for meter in _RUNNING:
        meter.bytes += size


class _Aside:
    """How long the simulation's own work took so far, and whether it is going on."""

    seconds = 0.0
    since: float | None = None


@contextmanager
def aside() -> Iterator[None]:
    """Mark work within the `with` block as the simulation's own: no machine would have to do it.

    Its operations are not counted, and its time is not part of a step's. (On a GPU that is the time
    that it takes to ask for them.)
    """
    if _Aside.since is not None:
        yield
        return
    started = _Aside.since = time.perf_counter()
    try:
        with _RUNNING[-1].pause() if _RUNNING else nullcontext():
            yield
    finally:
        _Aside.since = None
        _Aside.seconds += time.perf_counter() - started


def clock() -> float:
    """Return seconds from some moment on that stand still while work is `aside`."""
    now = time.perf_counter() if _Aside.since is None else _Aside.since
    return now - _Aside.seconds
