"""What a defense computes, counted operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

MOVES = {
    *("clone", "copy_", "_to_copy", "to", "view", "_unsafe_view", "reshape", "expand", "t"),
    *("transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "detach", "alias", "cat"),
    *("stack", "empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "ones"),
    *("ones_like", "full", "full_like", "new_full", "fill_", "zero_", "arange", "index", "split"),
    *("gather", "index_select", "masked_fill", "where", "unbind", "lift_fresh", "scalar_tensor"),
    *("_local_scalar_dense", "empty_strided", "as_strided", "resize_", "set_", "index_copy_"),
}
"""Operations that only make, move or choose numbers."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations while it is entered.

    Products of matrices by torch's own rules (a multiplication and an addition each count); any
    other operation that computes counts one per element of its largest tensor, input or output.
    What leaves torch (a sort by numpy) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it."""
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        rule: Callable[..., int] | None = flop_registry.get(packet)
        if rule is not None:
            self.flops += rule(*args, **(kwargs or {}), out_val=out)
        elif packet.__name__ not in MOVES:
            sizes = [t.numel() for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
            self.flops += max(sizes, default=0)
        return out
