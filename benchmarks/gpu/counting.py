"""Counter of GPU operations on any device: kernel launches, host synchronisations and memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.model.elementwise import PLAIN, Elementwise, set_elementwise

_aten = torch.ops.aten
_COPIES = {_aten._to_copy, _aten.copy_}
# No kernel and no traffic: these only allocate memory or make a view.
_FREE = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten._unsafe_view, _aten.lift_fresh}
# These synchronise: the host needs a value from the device, or the size of the result.
_WAITS = {
    _aten._local_scalar_dense,
    _aten.bincount,
    _aten.equal,
    _aten.is_nonzero,
    _aten.item,
    _aten.masked_select,
    _aten.nonzero,
    _aten.unique_consecutive,
    _aten._unique2,
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
# Their traffic is that of the result, not of the table.
_LOOKUPS = {_aten.index, _aten.gather, _aten.index_select, _aten.embedding}
# Bound by arithmetic, or by a few scattered writes.
_NOT_ELEMENTWISE = {
    *(_aten.linear, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm),
    *_INDEXED,
    *(_aten.index_copy_, _aten.scatter_),
}


class OpCounter(TorchDispatchMode):
    """Counts the operations in its block that involve a tensor outside the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Reset all counts to zero."""
        self.num_launches = 0
        """Operations other than views, copies between host and device included."""
        self.num_waits = 0
        """Times that the host waits for the device."""
        self.num_blocking_uploads = 0
        """Copies to the device that the host waits for."""
        self.num_bytes = 0
        """Bytes read and written by memory-bound operations: all but matmuls and attention."""

    def add_kernel(self, tensors: list[Tensor]) -> None:
        """Count one kernel that reads or writes each of these tensors once."""
        self.num_launches += 1
        self.num_bytes += sum(map(_bytes, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Function modes have already run: only the resulting operations arrive here.
        with torch._C.DisableTorchFunction():
            if func.is_view:
                # Composite operations (`to`, `reshape`) may copy or not: decompose them to find out.
                with self:
                    made_of = func.decompose(*args, **kwargs)
                if made_of is not NotImplemented:
                    return made_of
            result = func(*args, **kwargs)
        read = {name: value for name, value in kwargs.items() if name != "out"}
        given = [value for value in tree_leaves((args, read)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        kind = func.overloadpacket
        if any(map(_is_there, (*given, *made))) and not func.is_view and kind not in _FREE:
            self.num_launches += 1
            self.num_bytes += _traffic(kind, given, made)
            self._count_waits(kind, args, kwargs, given, made)
        return result

    def _count_waits(self, kind: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if kind in _COPIES:
            source, target = given[-1], made[0]
            is_patient = kwargs.get("non_blocking", kind is _aten.copy_ and len(args) > 2 and args[2])
            if _is_there(source) != _is_there(target) and not is_patient:
                self.num_waits += _is_there(source)
                self.num_blocking_uploads += _is_there(target)
        elif kind in _INDEXED:
            # Indexing with a bool mask runs `nonzero`, which synchronises.
            self.num_waits += any(index is not None and index.dtype is torch.bool for index in args[1])
        else:
            self.num_waits += kind in _WAITS


def count_as_fused(model: nn.Module, counter: OpCounter) -> None:
    """Count each elementwise function of a policy as one kernel, as `fuse_elementwise` compiles it, in place.

    Its backward counts as one kernel, plus one for the gradient of a norm's weight, which is a sum over rows.
    """
    fused = Elementwise(*(partial(_OneKernel.apply, counter, getattr(PLAIN, one.name)) for one in fields(PLAIN)))
    set_elementwise(model, fused)


class _OneKernel(torch.autograd.Function):
    """Stand-in for a fused function, with results of the right shapes."""

    @staticmethod
    def forward(ctx: Any, counter: OpCounter, function: Callable[..., Any], *args: Any) -> Any:
        given = [value for value in args if isinstance(value, Tensor)]
        before = counter.num_launches, counter.num_bytes
        # Clones, since a plain function may overwrite its inputs.
        made = function(*(value.clone() if isinstance(value, Tensor) else value for value in args))
        counter.num_launches, counter.num_bytes = before
        counter.add_kernel(given + tree_leaves(made))
        ctx.counter, ctx.is_tensor = counter, [isinstance(value, Tensor) for value in args]
        ctx.save_for_backward(*given)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        needed = ctx.needs_input_grad[2:]
        made = [torch.empty_like(next(saved)) if is_tensor else None for is_tensor in ctx.is_tensor]
        made = [value if needs else None for value, needs in zip(made, needed, strict=True)]
        new = [value for value in made if value is not None]
        ctx.counter.add_kernel([*gradients, *ctx.saved_tensors, *new])
        ctx.counter.num_launches += sum(value.ndim == 1 for value in new)
        return None, None, *made


def _is_there(value: Tensor) -> bool:
    return value.device.type != "cpu"


def _traffic(kind: Any, given: list[Tensor], made: list[Tensor]) -> int:
    if kind in _LOOKUPS:
        return 2 * sum(map(_bytes, made))
    if kind in _NOT_ELEMENTWISE:
        return 0
    return sum(map(_bytes, (*given, *made)))


def _bytes(value: Tensor) -> int:
    """Count the bytes of distinct elements: expanded dimensions are read once."""
    numbers = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        numbers *= size if stride else min(size, 1)
    return numbers * value.element_size()
