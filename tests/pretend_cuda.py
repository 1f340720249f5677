"""A pretended CUDA device: its tensors are in host memory, and operations raise where CUDA would wait.

HiddenSyncError is raised for a value that is read on the host, a shape that depends on values, and a copy that waits.
An operation on tensors of host and device raises RuntimeError. Waits inside of libraries are not detected; tests marked
`gpu` repeat the checks with torch.cuda.set_sync_debug_mode, which ignores copies from pageable memory.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from .interpreter import IS_INTERPRETED

DEVICE: Final = torch.device("cuda", 0)
_CPU: Final = torch.device("cpu")
aten = torch.ops.aten


class HiddenSyncError(AssertionError):
    """The host would wait for the device."""


class OnCuda(Tensor):
    """A tensor of the pretended device."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Pinned(Tensor):
    """A tensor in host memory that counts as pinned."""

    __torch_function__ = torch._C._disabled_torch_function_impl


# Methods that read values on the host.
_READS: Final = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__complex__"} | {
    "__array__",
    "__contains__",
    "equal",
    "allclose",
    "isin",  # long inputs are sorted and searched for equal neighbours
    "bincount",
}
_WAITING_OPS: Final = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
}
_FACTORIES_OF_HOST_DATA: Final = {"tensor", "as_tensor", "new_tensor", "scalar_tensor"}


class _InsideOfTorch(TorchDispatchMode):
    """Raises at waiting operations that torch calls inside another one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WAITING_OPS:
            raise HiddenSyncError(f"{func} waits for its values")
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise HiddenSyncError("repeat_interleave waits for its length: give it output_size")
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise HiddenSyncError("an index that is a mask waits for the number of its rows")
        return func(*args, **kwargs)


class PretendCuda(TorchFunctionMode):
    """`DEVICE` exists while this mode is entered. Waits raise inside `watched()` only."""

    def __init__(self) -> None:
        super().__init__()
        self._is_watched = False

    @contextlib.contextmanager
    def watched(self, is_watched: bool = True) -> Iterator[None]:
        before, self._is_watched = self._is_watched, is_watched
        try:
            yield
        finally:
            self._is_watched = before

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Allows necessary waits inside `watched()`, such as for the results."""
        return self.watched(False)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args[0])
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if name == "to":
            tensors = tensors[:1]
        is_on = any(isinstance(x, OnCuda) for x in tensors)
        if name == "copy_" and is_on and not isinstance(args[0], OnCuda):
            return self._copy_to_host(func, args, kwargs)
        target = self._target(name, args, kwargs)
        is_pinned = bool(kwargs.pop("pin_memory", False))
        if target is None:
            goes_on, leaves = is_on, False
        else:
            goes_on, leaves = target.type == "cuda", is_on and target.type == "cpu"
        if is_on:
            self._check_call(name, tensors, args, leaves=leaves, is_non_blocking=bool(kwargs.get("non_blocking")))
        if goes_on and not is_on:
            self._check_copy(name, tensors, kwargs)
        if target is not None:
            args, kwargs = tree_map_only(torch.device, lambda d: _CPU if d.type == "cuda" else d, (args, kwargs))
            args = tuple(_CPU if isinstance(a, str) and a.startswith("cuda") else a for a in args)
            if isinstance(kwargs.get("device"), str):
                kwargs["device"] = _CPU
        inside = _InsideOfTorch() if self._is_watched and is_on else contextlib.nullcontext()
        with inside:
            result = func(*args, **kwargs)
        if name in ("pin_memory", "is_pinned"):
            return result
        if is_pinned or (not goes_on and not leaves and _is_view_of_pinned(result, tensors)):
            return tree_map_only(Tensor, _pinned, result)
        if goes_on:
            if target is not None and any(result is x for x in tensors) and not is_on:
                result = result.clone()  # a copy on the device is another tensor
            return tree_map_only(Tensor, _on, result)
        if leaves:
            result = result.clone() if any(result is x for x in tensors) else result
        return tree_map_only(Tensor, _off, result)

    def _copy_to_host(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        is_free = isinstance(args[0], Pinned) and bool(kwargs.get("non_blocking"))
        if self._is_watched and not is_free:
            raise HiddenSyncError("copy_ waits for the device: say non_blocking, into pinned memory")
        with torch._C.DisableTorchFunction():
            result: Tensor = func(*args, **kwargs)
        return result

    @staticmethod
    def _attribute(func: Callable[..., Any], tensor: Tensor) -> Any:
        if not isinstance(tensor, OnCuda):
            return func(tensor)
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        attributes = {"device": DEVICE, "is_cuda": True, "is_cpu": False}
        return attributes[owner] if owner in attributes else tree_map_only(Tensor, _on, func(tensor))

    @staticmethod
    def _target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        """Returns the device in the arguments of a call."""
        if name == "cuda":
            return DEVICE
        if name in ("cpu", "numpy", "tolist"):
            return _CPU
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        if name == "to":
            for value in args[1:]:
                if isinstance(value, torch.device):
                    return value
                if isinstance(value, str):
                    return torch.device(value)
                if isinstance(value, Tensor):
                    return DEVICE if isinstance(value, OnCuda) else _CPU
        return None

    def _check_call(
        self, name: str, tensors: list[Tensor], args: tuple[Any, ...], *, leaves: bool, is_non_blocking: bool
    ) -> None:
        if self._is_watched:
            if name in _READS or leaves:
                raise HiddenSyncError(f"{name} waits for the device")
            if name == "new_tensor":
                raise HiddenSyncError(f"{name} copies to the device and waits for it")
            if name in ("__getitem__", "__setitem__") and _has_host_index(args[1]):
                raise HiddenSyncError(f"{name} copies an index to the device and waits for it")
        for tensor in tensors:
            if not isinstance(tensor, OnCuda) and torch._C._TensorBase.dim(tensor) > 0 and not leaves:
                is_copied = name in ("copy_", "__setitem__")  # a copy to the device by another name
                is_free = name == "copy_" and is_non_blocking and isinstance(tensor, Pinned)
                if is_copied and self._is_watched and not is_free:
                    raise HiddenSyncError(f"{name} copies to the device and waits: pin it, say non_blocking")
                if not is_copied and name not in ("__getitem__", "to"):
                    raise RuntimeError(f"{name}: tensors are on cuda and on the cpu")

    def _check_copy(self, name: str, tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Checks a factory, or a copy from the host to the device."""
        if not self._is_watched:
            return
        if name in _FACTORIES_OF_HOST_DATA:
            raise HiddenSyncError(f"{name} copies to the device and waits for it")
        if tensors and not kwargs.get("non_blocking"):
            raise HiddenSyncError(f"{name} copies to the device and waits for it: say non_blocking")
        if tensors and not all(isinstance(x, Pinned) for x in tensors):
            raise HiddenSyncError(f"{name} copies out of memory that is not pinned, and may wait for the stream")


def _on(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor if isinstance(tensor, OnCuda) else tensor.as_subclass(OnCuda)


def _off(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(Tensor) if isinstance(tensor, OnCuda) else tensor


def _pinned(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(Pinned)


def _is_view_of_pinned(result: Any, tensors: list[Tensor]) -> bool:
    with torch._C.DisableTorchFunction():
        pinned = [x for x in tensors if isinstance(x, Pinned)]
        if not pinned or not isinstance(result, Tensor):
            return False
        return result.untyped_storage().data_ptr() == pinned[0].untyped_storage().data_ptr()


def _has_host_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list)
        or (hasattr(part, "__array__") and not isinstance(part, OnCuda) and getattr(part, "ndim", 0) > 0)
        for part in parts
    )


def _pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.clone().as_subclass(Pinned)


@contextlib.contextmanager
def pretend_cuda() -> Iterator[PretendCuda]:
    """Pretends a CUDA device of compute capability 9.0."""
    with pytest.MonkeyPatch.context() as patch, PretendCuda() as mode:
        patch.setattr(Tensor, "pin_memory", _pin_memory)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132)
        )
        if IS_INTERPRETED:
            from triton.runtime.interpreter import GridExecutor

            launch = GridExecutor.__call__

            def launch_on_host(self: Any, *args: Any, **kwargs: Any) -> None:
                off = tree_map_only(Tensor, _off, (args, kwargs))
                with torch._C.DisableTorchFunction():
                    launch(self, *off[0], **off[1])

            patch.setattr(GridExecutor, "__call__", launch_on_host)
        yield mode
