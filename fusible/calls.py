"""How calls arrive: traced, transformed, through PyTorch's dispatcher, or directly.

What the predicates give, of a plain CUDA tensor and without gradients unless they are named::

                              is_traced  is_intercepted  is_fake  is_direct  may_cache
    eager                     no         no              no       yes        yes
    eager, gradients enabled  no         no              no       no         yes
    CUDA graph capture        no         no              no       yes        no
    torch function mode       no         no              no       no         yes
    torch.func                no         yes             no       no         no
    forward AD                no         yes             no       no         yes
    dispatch mode             yes        yes             no       no         yes
    fake mode                 yes        yes             yes      no         no
    torch.compile             yes        yes             -        no         no

The last row is of code that Dynamo traces, which cannot call `is_fake`; the fake implementations of
ops run in a fake mode.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.autograd import forward_ad


def is_traced() -> bool:
    """Whether tensors may stand for others: under ``torch.compile``, export and dispatch modes."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def depend_on_values(*sizes: object) -> bool:
    """Whether a size, or a place, is one that traced code reads of a tensor when it runs."""
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    if not symbolic:
        return False
    # Imports sympy, which tracing has imported already.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(free_unbacked_symbols(size) for size in symbolic)


def is_intercepted() -> bool:
    """Whether something else sees calls: `is_traced`, ``torch.func``, or forward-mode autograd."""
    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_fake() -> bool:
    """Whether operations give fake tensors, without values: in ``explain``, and when traced."""
    return torch._C._len_torch_dispatch_stack() > 0 and active_fake_mode() is not None


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def may_cache() -> bool:
    """Whether what an operation gives now may be kept for later calls.

    Not what is traced, transformed or captured.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or capturing()
        or is_fake()
    )


def in_data_parallel() -> bool:
    """Whether this is the forward of a ``DistributedDataParallel``."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def reduced_by_data_parallel(parameters: Sequence[Any]) -> bool:
    """Whether ``DistributedDataParallel`` will reduce gradients of some of the parameters.

    Those of this forward, which it is in.
    """
    module = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if module is None or not module.require_backward_grad_sync:
        return False
    reduced = {id(p) for p in module._module_parameters if p.requires_grad}
    return any([id(p) in reduced for p in parameters])


def in_compiled_autograd() -> bool:
    """Whether this is a backward that compiled autograd runs."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # its import is slow
    return module is not None and module.in_compiled_autograd_region


def refuse_derivatives(name: str, arguments: Sequence[Any]) -> None:
    """Raise RuntimeError if autograd would go through the op ``name``, in reverse or forward mode.

    PyTorch would take the derivative for zero.
    """
    every = [t for a in arguments for t in (a if isinstance(a, list | tuple) else (a,))]
    floating = [t for t in every if isinstance(t, Tensor) and t.is_floating_point()]
    if torch.is_grad_enabled() and any([t.requires_grad for t in floating]):
        _refuse_gradients(name)
    refuse_hidden_derivatives(name, *floating)


def refuse_hidden_derivatives(name: str, *tensors: Tensor) -> None:
    """Raise RuntimeError for a derivative that PyTorch would silently take for zero.

    For a tangent, and for a tensor that requires gradients inside of a wrapper of ``torch.vmap``,
    which does not show it. Traced code cannot look inside: there every transform of ``torch.func``
    with gradients enabled is refused. Whether the tensors themselves require gradients is checked
    by the caller.
    """
    transformed = torch._C._are_functorch_transforms_active()
    if forward_ad._current_level < 0 and (torch.compiler.is_dynamo_compiling() or not transformed):
        if transformed and torch.is_grad_enabled():
            _refuse_gradients(name)
        return
    autograd = torch._C.DispatchKey.AutogradFunctionality
    if torch._C._dispatch_tls_is_dispatch_key_excluded(autograd):
        return  # which has seen the operation already: this is in `__torch_dispatch__`
    for t in tensors:
        inner = t
        while True:
            if inner.requires_grad and inner is not t and torch.is_grad_enabled():
                _refuse_gradients(name)
            if forward_ad._current_level >= 0 and forward_ad.unpack_dual(inner)[1] is not None:
                raise RuntimeError(
                    f"inputs of {name} must have no tangents (torch.func.jvp, "
                    "torch.autograd.forward_ad), since it has no forward-mode derivative; use "
                    "reverse mode"
                )
            if not torch._C._functorch.is_functorch_wrapped_tensor(inner):
                break
            inner = torch._C._functorch.get_unwrapped(inner)


def _refuse_gradients(name: str) -> None:
    raise RuntimeError(
        f"inputs of {name} must not require gradients, since it has no derivative; call it in "
        "forward_impl and backward_impl of an op, or under torch.no_grad()"
    )


def is_direct(x: object) -> bool:
    """Whether the dispatcher would run nothing but the CUDA implementation of an op of ``x``.

    That can then be called directly. PyTorch's dispatcher takes 8 us of host time for an op written
    in Python, and more for one of many arguments. It is needed where calls are traced, transformed,
    intercepted or recorded for a gradient.
    """
    return (
        type(x) is Tensor
        and x.is_cuda
        and not (
            is_intercepted() or torch._C._len_torch_function_stack() > 0 or torch.is_grad_enabled()
        )
    )
