"""A fake GPU: real code runs on fake `cuda` tensors, and whatever would make the host wait is
caught.

A fake tensor (torch._subclasses.FakeTensorMode) has a shape, a dtype, strides and a device, and no
memory. Every operation is dispatched as on a GPU, autocast and autograd included, so that this can
be found on a machine without one:

- tensors of two devices in one operation;
- a host read: `.item()`, `.tolist()`, `.cpu()`, `bool(tensor)`, a mask as index, `torch.equal`,
  operations that check their result on the host, a wait for an event of the same step;
- a blocking copy: to the device without `non_blocking=True` or from memory that is not pinned, a
  tensor made on the device of Python numbers, an index that lies on the CPU;
- a copy to pinned memory that is read before the host has waited for it;
- a Triton kernel that is given a tensor of the CPU.

Not found: what depends on values (there are none: a number that is read nevertheless is 1, and a
flag is not set), on streams (which tensor is ready when, `record_stream`) and on kernels. No kernel
runs, neither PyTorch's nor our own, so times, memory and results mean nothing, and waits inside
PyTorch's kernels are known only from the list `WAITS`. PyTorch's autograd engine asks the
driver for streams, so `run_backward` walks through the graph in its place.

    with fake_cuda() as gpu:
        model, batch = ...                 # on CUDA; anything may wait
        with gpu.watched():
            model(batch).sum().backward()  # raises Caught where the host would wait
"""

import contextlib
import functools
import linecache
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from fake_backward import run_backward
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from utils.fused import kernels

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten

# Operations whose CUDA kernels wait, or whose result is checked on the host.
WAITS = {
    aten._linalg_check_errors, aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig,
    aten.linalg_lstsq, aten.multinomial, aten.histc, aten._ctc_loss,
}  # fmt: skip
# Tags of operations that return values to the host, or whose result's shape depends on values.
VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What FakeTensorMode raises for them.
UNKNOWN = fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException
# These move data between devices, and are judged as copies.
COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Caught(AssertionError):
    """The host would wait, or a GPU would fail: why, and in which line of the project."""


@contextlib.contextmanager
def fake_cuda() -> Iterator["Watch"]:
    """In this context tensors can be on `CUDA`, and all new tensors are fake."""
    assert not torch.cuda.is_available(), "PyTorch would use the real GPU"
    # The engine counts devices once: not while FakeTensorMode pretends that there is one.
    torch.ones((), requires_grad=True).backward()
    watch = Watch()
    with contextlib.ExitStack() as stack:
        for target, name, replacement in _stand_ins(watch):
            stack.enter_context(patch.object(target, name, replacement, create=True))
        stack.enter_context(_Fakes(allow_non_fake_inputs=True, allow_fallback_kernels=False))
        stack.enter_context(watch)
        yield watch


class _Fakes(fake_tensor.FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        return True  # whatever torch.cuda.is_available says


class Watch(TorchDispatchMode):
    """Sees every operation before FakeTensorMode does.

    Attributes:
        steps: optimizer steps so far, counted by the test: the host may wait for events of earlier
            ones.
        reads: (steps so far, line) of every wait in a line that may wait.
        operations: calls of PyTorch's operations, by name; launches: of Triton kernels.
        copies: to the device without blocking; copied_back: to pinned memory.
        free_memory: of the GPU, in bytes.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.copies, self.copied_back, self.free_memory = 0, 0, 0, 1 << 36
        self.reads: list[tuple[int, str]] = []
        self.operations: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._watching, self._allowed = False, ()
        # By the address of the storage, which is kept so that no other one gets that address.
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._in_flight: dict[int, int] = {}  # the number of the copy under way to it

    @contextlib.contextmanager
    def watched(self, allowed: tuple[str, ...] = ()) -> Iterator[None]:
        """In this context the host must not wait, except in the lines `allowed` (their source)."""
        before = self._watching, self._allowed
        self._watching, self._allowed = True, allowed
        try:
            yield
        finally:
            self._watching, self._allowed = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        operation = func.overloadpacket
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # where autograd does not decompose operations
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.operations[str(operation)] += 1
        if operation is aten._local_scalar_dense:
            return self._read_scalar(func, args[0])
        if operation not in COPIES:
            self._check(func, operation, args, kwargs)
        if operation is aten._fused_sgd_ or func.__name__.endswith("_.tensor_lr"):
            return None  # in place, and without an implementation for fake tensors
        pin = kwargs.pop("pin_memory", False)
        try:
            result = func(*args, **kwargs)
        except UNKNOWN as error:
            raise Caught(f"{error} {self._place()}") from error
        if pin:
            self.mark_pinned(result)
        if operation in COPIES:
            self._copy(func, operation, args, kwargs, result)
        if operation in (aten.convolution, aten.convolution_backward):
            return _laid_as_cudnn_does(result, args)
        return result

    # ---- operations ------------------------------------------------------------------------

    def _check(self, func, operation, args, kwargs) -> None:
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        of_host = [tensor for tensor in tensors if not tensor.is_cuda]
        for tensor in of_host:
            self._check_arrived(tensor)
        if len(of_host) == len(tensors):
            return
        if operation in INDEXED:
            self._check_index(func, *args)
            return
        waits = operation in WAITS or kwargs.get("check_errors")
        if waits or VALUES & {*func.tags}:
            self.host_waits(f"{func} reads from the device")
        # A scalar on the CPU may go with tensors of the device, but not in fused optimizers.
        fused = func.__name__.startswith("_fused_")
        if any(tensor.ndim or fused for tensor in of_host):
            self.catch(f"{func} of tensors on two devices")

    def _check_index(self, func, own: Tensor, indices, values: Tensor | None = None, *_) -> None:
        indices = [index for index in indices if index is not None]
        if any(index.is_cuda != own.is_cuda for index in indices):
            self.host_waits(f"{func}: blocking copy of an index to the device")
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            # A single value is written where the mask says, without counting the places.
            if values is None or values.numel() != 1:
                self.host_waits(f"{func}: a mask as index, whose places are counted on the host")
        elif values is not None and values.is_cuda != own.is_cuda:
            self.host_waits(f"{func}: blocking copy of a value to the device")

    def _read_scalar(self, func, tensor: Tensor):
        if tensor.is_cuda:
            self.host_waits(f"{func} reads from the device")
            return _one(tensor)
        self._check_arrived(tensor)
        if tensor.dtype == torch.bool or self.is_pinned(tensor):
            return False  # no flag is set
        try:
            return func(tensor)
        except fake_tensor.DataDependentOutputException:  # its value is not known
            return _one(tensor)

    def _copy(self, func, operation, args, kwargs, result) -> None:
        pairs = [(result, args[0])] if operation is aten._to_copy else [(args[0], args[1])]
        if operation is aten._foreach_copy_:
            pairs = list(zip(*args[:2], strict=True))
        late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        for target, source in pairs:
            if not source.is_cuda:
                self._check_arrived(source)
            if target.is_cuda and not source.is_cuda:
                self._copy_to_device(func, source, late)
            elif source.is_cuda and not target.is_cuda:
                if late and operation is aten._to_copy:
                    self.mark_pinned(target)  # PyTorch pins what it makes for such a copy
                self._copy_from_device(func, target, late)

    def _copy_to_device(self, func, source: Tensor, late: bool) -> None:
        if not late:
            self.host_waits(f"{func}: blocking copy to the device")
        elif not self.is_pinned(source):
            self.host_waits(f"{func}: copy to the device from memory that is not pinned")
        elif self._watching:
            self.copies += 1

    def _copy_from_device(self, func, target: Tensor, late: bool) -> None:
        if not late:
            self.host_waits(f"{func}: blocking copy to the host")
        elif not self.is_pinned(target):
            self.host_waits(f"{func}: copy to host memory that is not pinned")
        else:
            self.copied_back += 1
            self._in_flight[target.untyped_storage()._cdata] = self.copied_back

    # ---- pinned memory, events ---------------------------------------------------------------

    def mark_pinned(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def _check_arrived(self, tensor: Tensor) -> None:
        if self._in_flight and tensor.untyped_storage()._cdata in self._in_flight:
            self.catch("pinned memory is read before the host has waited for the copy to it")

    def event_waited_for(self, step: int, copied_back: int) -> None:
        """The host waits for an event recorded in `step`, after so many copies."""
        if step == self.steps:
            self.host_waits("wait for an event of the same step")
        flying = self._in_flight.items()
        self._in_flight = {key: number for key, number in flying if number > copied_back}

    # ---- reports ----------------------------------------------------------------------------

    def host_waits(self, what: str) -> None:
        """Raises Caught, unless it may wait here."""
        _, line = self._frame()
        if line in self._allowed:
            self.reads.append((self.steps, line))
        elif self._watching:
            self.catch(what)

    def catch(self, what: str) -> None:
        """Raises Caught."""
        raise Caught(f"{what} {self._place()}")

    def _place(self) -> str:
        place, line = self._frame()
        return f"in {place}: {line}"

    def _frame(self) -> tuple[str, str]:
        """(file:line and function, the line itself) of the project's innermost frame."""
        frame = sys._getframe()
        while frame is not None:
            name = frame.f_code.co_filename
            if name != __file__ and name.startswith(f"{ROOT}/") and "site-packages" not in name:
                place = f"{Path(name).relative_to(ROOT)}:{frame.f_lineno} ({frame.f_code.co_name})"
                return place, linecache.getline(name, frame.f_lineno).strip()
            frame = frame.f_back
        return "PyTorch", "?"


def _laid_as_cudnn_does(result, arguments):
    """In channels_last if an image or weight is, which FakeTensorMode does not do without cuDNN."""
    last = torch.channels_last
    images = [t for t in arguments if isinstance(t, Tensor) and t.ndim == 4]
    if all(suggest_memory_format(image) != last for image in images):
        return result
    return tree_map_only(
        Tensor, lambda t: t.contiguous(memory_format=last) if t.ndim == 4 else t, result
    )


def _one(tensor: Tensor) -> bool | int | float:
    """The result of a read where there is no value."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


# ---- in place of the driver ------------------------------------------------------------------


def _stand_ins(watch: Watch) -> list[tuple]:
    """(object, attribute, replacement) of each."""

    class Event:
        """Remembers when it was recorded."""

        def __init__(self, **_):
            self.step, self.copied = -1, 0

        def record(self, stream=None) -> None:
            self.step, self.copied = watch.steps, watch.copied_back

        def synchronize(self) -> None:
            watch.event_waited_for(self.step, self.copied)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end) -> float:
            return 1.0  # milliseconds

    class Stream:
        def __init__(self, device=CUDA, **_):
            self.device = device

        def wait_stream(self, stream) -> None:
            pass

        def wait_event(self, event) -> None:
            pass

        def record_event(self, event=None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            watch.host_waits("wait for a stream")

    def numpy(tensor: Tensor, **_) -> np.ndarray:
        if tensor.is_cuda:
            watch.catch("numpy() of a tensor on the device")
        watch._check_arrived(tensor)
        return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    training = Stream()
    return [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        (torch.cuda, "mem_get_info", lambda device=None: (watch.free_memory, 1 << 36)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "Event", Event),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", lambda device=None: training),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda device=None: watch.host_waits("wait for the device")),
        (torch.random, "fork_rng", lambda devices=None: contextlib.nullcontext()),
        (torch.Tensor, "pin_memory", lambda tensor: watch.mark_pinned(torch.empty_like(tensor))),
        (torch.Tensor, "is_pinned", lambda tensor: watch.is_pinned(tensor)),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.Tensor, "numpy", numpy),
        (torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (torch.nn.Module, "_apply", _apply),
        (torch.autograd, "_engine_run_backward", run_backward),
        (torch.autograd.graph, "_engine_run_backward", run_backward),
        *_triton(watch),
    ]


def _apply(module: torch.nn.Module, change, recurse: bool = True) -> torch.nn.Module:
    """`module.to(...)`: PyTorch's own cannot swap fake parameters."""
    for child in module.children():
        child._apply(change)
    for name, own in module._parameters.items():
        if own is not None:
            module._parameters[name] = torch.nn.Parameter(change(own.detach()), own.requires_grad)
    for name, own in module._buffers.items():
        module._buffers[name] = own if own is None else change(own)
    return module


def _triton(watch: Watch) -> list[tuple]:
    """Counts launches, and launches nothing."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []  # the project uses PyTorch's code then

    def run(kernel, *args, grid, warmup, **options):
        if any(isinstance(a, Tensor) and not a.is_cuda for a in args):
            watch.catch(f"the Triton kernel {kernel.__name__} is given a tensor of the CPU")
        watch.launches[kernel.__name__] += 1

    from utils.fused.kernels import image_kernels

    # Those that are kept would be of another fake GPU.
    arrivals = functools.cache(image_kernels._arrivals.__wrapped__)
    return [
        (JITFunction, "run", run),
        (kernels, "unusable", lambda: None),
        (image_kernels, "_arrivals", arrivals),
    ]
