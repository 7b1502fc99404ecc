"""A simulated GPU: tensors in main memory that report `cuda:0` and refuse to mix with CPU tensors.

Code that runs on it takes its GPU paths (fused optimizer, static shapes, uploads), computed by CPU kernels. Mixing a
CPU tensor with a GPU tensor raises as in CUDA. `torch.cuda` raises as on a GPU too: its own code runs, over a driver
with one device. The stand-in does not model speed, memory use, kernels, or asynchronous execution.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import return_and_correct_aliasing

DEVICE = torch.device("cuda", 0)
# Device of copies to the CPU. To torch's C++ every tensor here is on "cpu", without an index.
_HOST = torch.device("cpu", 0)
_aten = torch.ops.aten
# Operations that copy between devices, and so accept tensors of both.
_BETWEEN = {_aten.copy_.default, _aten._to_copy.default, _aten.set_.source_Tensor}
# Driver calls that `torch.cuda` makes after it has checked its arguments.
_DRIVER: dict[str, Callable[..., Any]] = {
    "cuda.device_count": lambda: 1,
    "_utils._get_current_device_index": lambda: 0,
    "_C._cuda_getDevice": lambda: 0,
    "_C._cuda_setMemoryFraction": lambda _share, _device: None,
    "_C._cuda_resetPeakMemoryStats": lambda _device: None,
    "cuda._get_device_properties": lambda _device: SimpleNamespace(name="a stand-in", major=0, minor=0),
    "cuda._lazy_init": lambda: None,
    "cuda.memory._lazy_init": lambda: None,
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class StandIn(Tensor):
    """A tensor of the stand-in; `host` holds its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> StandIn:
        """Wrap a host tensor and share its memory."""
        assert not isinstance(host, StandIn)
        made: StandIn = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            # torch's own C++, which has no CUDA here, sees the CPU; Python code sees `cuda:0`.
            device=torch.device("cpu"),
            requires_grad=False,
        )
        made.host = host.detach()
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The reported device."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True, to match `device`."""
        return True

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        return f"StandIn({self.host!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _BETWEEN:
            _refuse_mixture(func, args, kwargs)
        if func is _aten._to_copy.default and kwargs.get("device") == _HOST:
            return func(args[0].host, **{**kwargs, "device": None})
        # Where torch's C++ requests a CPU tensor, it means one on this tensor's device.
        result = func(*_mapped(_host, args), **_mapped(_host, kwargs))
        # Results of tensors made outside inference mode must not be inference tensors: views share a version counter.
        theirs = [value for value in _leaves((args, kwargs)) if isinstance(value, StandIn)]
        with torch.inference_mode(all(value.is_inference() for value in theirs)):
            wrapped = _mapped(_there, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to each leaf of an operation's arguments or results. torch's pytree takes four times as long."""
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(change, each) for name, each in value.items()}
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _host(value: Any) -> Any:
    return value.host if isinstance(value, StandIn) else value


def _there(value: Any) -> Any:
    return StandIn(value) if isinstance(value, Tensor) else value


def _refuse_mixture(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if CPU and GPU tensors mix, as CUDA does. Scalars on the CPU are allowed, and so are CPU indices of a GPU
    tensor."""
    values = _leaves((args[:1], args[2:], kwargs) if func in _INDEXED else (args, kwargs))
    others = [value for value in values if isinstance(value, Tensor) and not isinstance(value, StandIn) and value.dim()]
    if others:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
        )


class StandInGpu(TorchFunctionMode):
    """A mode in which tensors made on or moved to `cuda` are on the stand-in."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.__len__, Tensor.untyped_storage) and isinstance(args[0], StandIn):
            return func(args[0].host)
        if func in (Tensor.tolist, Tensor.__bool__, Tensor.item) and isinstance(args[0], StandIn):
            return func(_aten._to_copy.default(args[0].detach(), device=_HOST))
        if func is Tensor.numpy and isinstance(args[0], StandIn):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")
        if func is Tensor.backward:
            # torch leaves a mode inside its handler, but backward passes create tensors too.
            gradient = kwargs.get("gradient")
            gradient = torch.ones_like(args[0]) if gradient is None else gradient
            with self:
                return _engine_run_backward(
                    (args[0],), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if func is Tensor.new_tensor and isinstance(args[0], StandIn):
            return StandIn(args[0].host.new_tensor(*args[1:], **kwargs))
        if func is Tensor.cuda:
            return self._moved(Tensor.to, (args[0], DEVICE), {})
        if func in (Tensor.to, Tensor.cpu):
            return self._moved(func, args, kwargs)
        if (place := kwargs.get("device")) is None:
            return func(*args, **kwargs)
        # Factory functions, with or without a tensor to imitate.
        made = func(*_mapped(_host, args), **{**kwargs, "device": "cpu" if _is_gpu(place) else place})
        return _made_there(made) if _is_gpu(place) else made

    def _moved(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, others = args[0], [*args[1:], *kwargs.values()]
        if func is not Tensor.cpu and not any(_is_place(other) for other in others):
            return func(*args, **kwargs)
        is_gpu = any(other.is_cuda if isinstance(other, Tensor) else _is_gpu(other) for other in others)
        if is_gpu == tensor.is_cuda and func is Tensor.cpu:
            return tensor
        if not is_gpu and not tensor.is_cuda:
            return func(*args, **kwargs)
        dtypes = [other for other in others if isinstance(other, torch.dtype)]
        is_moving, is_patient = is_gpu != tensor.is_cuda, bool(kwargs.get("non_blocking"))
        moved = _Move.apply(tensor, is_gpu, is_patient) if is_moving else tensor
        if kwargs.get("copy") and moved is tensor:
            moved = tensor.clone()
        return moved.to(dtypes[0]) if dtypes else moved


class _Move(torch.autograd.Function):
    """A differentiable copy to the other device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_gpu: bool, non_blocking: bool) -> Tensor:  # type: ignore[override]
        ctx.to_gpu = to_gpu
        return _moved(tensor.detach(), to_gpu, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _moved(gradient, not ctx.to_gpu, non_blocking=False), None, None


def _moved(tensor: Tensor, to_gpu: bool, non_blocking: bool) -> Tensor:
    """Copy to the other device with the operations that an operation counter expects."""
    if not to_gpu:
        return _aten._to_copy.default(tensor, device=_HOST, non_blocking=non_blocking)
    return _aten.copy_.default(StandIn(torch.empty_like(tensor)), tensor, non_blocking)


def _made_there(made: Any) -> Any:
    """Wrap a tensor just made in main memory."""
    if isinstance(made, DTensor):
        local = _made_there(made.to_local())
        return DTensor.from_local(
            local, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
        )
    return StandIn(made) if type(made) is Tensor else made


def _is_gpu(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"


def _is_place(value: Any) -> bool:
    return isinstance(value, str | torch.device | Tensor)


def bytes_there() -> int:
    """Return the bytes of the stand-in's memory held by all live tensors."""
    gc.collect()
    storages = [one.host.untyped_storage() for one in gc.get_objects() if type(one) is StandIn]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _grouped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Group tensors by device as torch does, but report `cuda:0` where torch's C++ reports the CPU."""
    groups = _group_tensors_by_device_and_dtype(tensors, *args, **kwargs)
    where = DEVICE if any(tensor.is_cuda for tensor in tensors[0]) else None
    return {(where or device, dtype): group for (device, dtype), group in groups.items()}


# Calls to a GPU, other than tensor operations, when processes are placed on it.
_PLACING: dict[str, Callable[..., Any]] = {
    "cuda.is_available": lambda: True,
    "cuda.is_initialized": lambda: True,
    "cuda.set_device": lambda _device: None,
    # torch.cpu's streams have the same methods and never wait.
    "cuda.current_stream": lambda _device=None: torch.cpu.current_stream(),
    "cuda.stream": torch.cpu.stream,
    "cuda.Stream": lambda priority=0: torch.cpu.Stream(),
    "cuda.Event": lambda enable_timing=False: torch.cpu.Event(),
    "cuda.empty_cache": lambda: None,
    "cuda.memory_allocated": lambda _device=None: bytes_there(),
    "cuda.max_memory_allocated": lambda _device=None: bytes_there(),
}


def _with_stand_in(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Enter the stand-in in each thread, since torch's modes are per thread."""

    def run_with_it(thread: threading.Thread) -> None:
        with StandInGpu():
            run(thread)

    return run_with_it


@contextmanager
def stand_in_machine() -> Iterator[list[float]]:
    """Simulate a GPU for all threads that begin in the block, and for FSDP. Yields the list of memory fractions that
    processes were limited to."""
    shares: list[float] = []
    placing = {**_PLACING, "_C._cuda_setMemoryFraction": lambda share, _device: shares.append(share)}
    with stand_in_gpu(), ExitStack() as stack:
        stack.enter_context(patch.object(threading.Thread, "run", _with_stand_in(threading.Thread.run)))
        # A sharded tensor is on the device of its shard.
        stack.enter_context(patch.object(DTensor, "device", property(lambda sharded: sharded.to_local().device)))
        stack.enter_context(patch.object(DTensor, "is_cuda", property(lambda sharded: sharded.to_local().is_cuda)))
        for name, answer in placing.items():
            stack.enter_context(patch(f"torch.{name}", answer, create=True))
        yield shares


@contextmanager
def stand_in_gpu() -> Iterator[torch.device]:
    """Simulate a GPU within the block."""
    # Moving a module changes the class of its parameters, which torch supports only with this setting.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Existing objects hold nothing on the stand-in; freezing them speeds up `bytes_there`.
    gc.freeze()
    try:
        with ExitStack() as stack:
            for name, answer in _DRIVER.items():
                stack.enter_context(patch(f"torch.{name}", answer, create=True))
            stack.enter_context(patch.object(clip_grad, "_group_tensors_by_device_and_dtype", _grouped))
            stack.enter_context(StandInGpu())
            yield DEVICE
    finally:
        gc.unfreeze()
        torch.__future__.set_swap_module_params_on_conversion(before)
