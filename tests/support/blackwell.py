"""A Blackwell GPU, pretended: the front end's own code, compiler and argument checks, without one.

``simulated()`` lets ``cudnn`` believe in an SM100 GPU and in CPU tensors being on it. A kernel is
really compiled for ``sm_100a``, and really called: the entry that the compiler generated checks
rank, shape, strides, divisibility, dtype, device and alignment of every argument, and only then
looks for a CUDA driver, which there is none. A call that gets so far counts as launched.
"""

import contextlib
import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SMS = 148  # of a B200

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]


class OnDevice:
    """DLPack of a CPU tensor with the label of the first CUDA device on it."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.t.detach().__dlpack__()
        name = _name(capsule)
        # DLTensor {void* data; DLDevice {int type, id}; ...}, behind 32 bytes where versioned.
        tensor = _pointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
        device = (ctypes.c_int32 * 2).from_address(tensor + 8)
        device[0], device[1] = 2, 0
        return capsule


class Launches:
    """Kernels compiled, and the number of launches, in one ``simulated()``."""

    def __init__(self) -> None:
        self.clear(compiling=True)

    def clear(self, compiling: bool) -> None:
        """Begin anew."""
        self.compiling = compiling
        self.compiled: list[Any] = []
        self.count = 0

    def compile(self, compile_: Any, *args: Any, options: Any = None, **kwargs: Any) -> Any:
        """Compile for sm_100a; what comes back takes CPU tensors and counts its launches."""
        if not self.compiling:
            self.compiled.append(None)
            return self._count
        options = f"{options or ''} --gpu-arch sm_100a"
        compiled = compile_(*args, options=options, **kwargs)
        self.compiled.append(compiled)

        def launch(*arguments: Any) -> None:
            import tvm_ffi

            labelled = [
                tvm_ffi.from_dlpack(OnDevice(a)) if isinstance(a, Tensor) else a for a in arguments
            ]
            try:
                compiled(*labelled)
            except Exception as error:
                if "InsufficientDriver" not in str(error) and "no CUDA-capable" not in str(error):
                    raise
            self._count()

        return launch

    def _count(self, *_: Any) -> None:
        self.count += 1


# One for the process, as the front end's cache of compiled kernels is.
LAUNCHES = Launches()


@contextlib.contextmanager
def simulated(compiling: bool = True):
    """Pretend; gives the :class:`Launches`.

    Unless ``compiling``, the front end's support checks are all there is. It keeps what it takes
    for compiled in the process: use another number of groups than where it is compiled.
    """
    import cutlass.utils
    from cutlass import cute
    from cutlass.cute import runtime

    launches = LAUNCHES
    launches.clear(compiling)
    empty, tensor_init, compile_ = torch.empty, runtime._Tensor.__init__, cute.compile

    def aligned_empty(*size, **kwargs):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") is torch.uint8 and len(size) == 1 and isinstance(size[0], int):
            t = empty(size[0] + 128, **kwargs)  # workspaces begin at 128 bytes
            start = -t.data_ptr() % 128
            return t[start : start + size[0]]
        return empty(*size, **kwargs)

    def labelled(self, tensor, *args, **kwargs):
        on_host = isinstance(tensor, Tensor)
        tensor_init(self, OnDevice(tensor) if on_host else tensor, *args, **kwargs)

    info = cutlass.utils.HardwareInfo
    with contextlib.ExitStack() as stack:

        def patch(owner, name, new):
            stack.enter_context(mock.patch.object(owner, name, new))

        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "current_device", lambda: 0)
        patch(torch.cuda, "get_device_capability", lambda *_: (10, 0))
        patch(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch(info, "__init__", lambda self, device_id=0: None)
        patch(info, "get_max_active_clusters", lambda self, n, *_, **__: SMS // n)
        patch(info, "get_device_multiprocessor_count", lambda self: SMS)
        patch(torch, "empty", aligned_empty)
        patch(runtime._Tensor, "__init__", labelled)
        patch(cute, "compile", lambda *a, **k: launches.compile(compile_, *a, **k))
        for owner, name, new in _device_only():
            patch(owner, name, new)
        logging.disable(logging.WARNING)
        try:
            yield launches
        finally:
            logging.disable(logging.NOTSET)


def _device_only():
    """What the front end asks of CUDA tensors and streams that only those have."""
    import importlib
    import sys

    import cudnn.api_base

    for part in ("glu", "dglu", "srelu", "dsrelu", "quant", "wgrad", "unfused"):
        importlib.import_module(f"cudnn.gemm.cutedsl.grouped.{part}.api")
    for part in ("glu", "dglu", "wgrad"):
        importlib.import_module(f"cudnn.gemm.cutedsl.grouped.{part}._blockscaled_api")
    importlib.import_module("cudnn.gemm.cutedsl.discrete_grouped.discrete_kernel_utils")

    def count(pointers, name, expected_len=None):
        assert pointers.dtype == torch.int64
        assert pointers.is_contiguous()
        assert expected_len in (None, pointers.numel())
        return pointers.numel()

    replaced = {
        "_validate_pointer_tensor": count,
        "_require_pointer_tensor": count,
        "_torch_stream_context": lambda *_, **__: contextlib.nullcontext(),
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("cudnn.gemm.cutedsl"):
            for name, new in replaced.items():
                if name in vars(module):
                    yield module, name, new
            for kind in vars(module).values():
                if isinstance(kind, type) and "_record_pointer_stream" in vars(kind):
                    yield kind, "_record_pointer_stream", lambda *_: None
    yield cudnn.api_base, "_RAW_STREAM", lambda _: 0


# What a GPU of another architecture answers to a kernel for sm_100a, by name or by description:
# cudaErrorNoKernelImageForDevice (209), or, where the image is looked at later,
# cudaErrorInvalidDeviceFunction (98) and cudaErrorInvalidKernelImage (200).
NOT_FOR_THIS_GPU = (
    "cudaErrorNoKernelImageForDevice",
    "no kernel image is available",
    "cudaErrorInvalidDeviceFunction",
    "invalid device function",
    "cudaErrorInvalidKernelImage",
    "device kernel image is invalid",
)


class Refusals:
    """Launches on a real GPU, each of which it refused, and the streams that they were for."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.compiled = self.count = 0
        self.errors: set[str] = set()
        self.streams: set[int] = set()

    def compile(self, compile_: Any, *args: Any, options: Any = None, **kwargs: Any) -> Any:
        """Compile for sm_100a; what comes back is launched, and the GPU's refusal kept."""
        compiled = compile_(*args, options=f"{options or ''} --gpu-arch sm_100a", **kwargs)
        self.compiled += 1

        def launch(*arguments: Any) -> None:
            self.count += 1
            self.streams.update(int(a) for a in arguments if type(a).__name__ == "CUstream")
            if torch.cuda.is_current_stream_capturing():
                return  # a kernel is loaded before a capture, which this one cannot be
            try:
                compiled(*arguments)
            except Exception as error:
                if not any(text in str(error) for text in NOT_FOR_THIS_GPU):
                    raise
                self.errors.add(" ".join(str(error).split())[:160])
                _forget_last_error()
            else:
                raise AssertionError("a kernel for sm_100a has run on another GPU")

        return launch


# One for the process, as the front end's cache of compiled kernels is.
REFUSALS = Refusals()


def _forget_last_error() -> None:
    """The runtime keeps a thread's last error until it is asked, and PyTorch asks later."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "libcudart" in line}:
        ctypes.CDLL(path).cudaGetLastError()


@contextlib.contextmanager
def refusing():
    """Let the front end take a GPU of another architecture for an SM100; gives :data:`REFUSALS`.

    All else is real: tensors, DLPack, pointer tables, streams, occupancy, the compiler's checks of
    arguments, and the launch, which the GPU refuses.
    """
    import cutlass.utils
    from cutlass import cute
    from cutlass.cutlass_dsl import CuTeDSL

    environment = CuTeDSL._get_dsl().envar
    real, compile_ = environment.arch, cute.compile

    def compile_for(function, *args, **kwargs):
        if not isinstance(getattr(function, "__self__", None), cutlass.utils.HardwareInfo):
            return REFUSALS.compile(compile_, function, *args, **kwargs)
        environment.arch = real  # an empty kernel, to ask the GPU that there is for its occupancy
        try:
            return compile_(function, *args, **kwargs)
        finally:
            environment.arch = "sm_100a"

    environment.arch = "sm_100a"
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(10, 0)),
            mock.patch.object(cute, "compile", compile_for),
        ):
            yield REFUSALS
    finally:
        environment.arch = real
