# Device code is traced by the CuTe DSL.
"""Kernels that start before the one ahead of them on their stream has ended, from SM90 on.

Programmatic dependent launch (CUDA programming guide): what a kernel does before `wait` runs under
the end of the kernel ahead; its launch passes ``use_pdl=has_pdl()``. No kernel lets the next one
start before its own `wait`. So all kernels before the one ahead have ended, and what these wrote
may be read before `wait`.
"""

from cutlass import const_expr, cute
from cutlass.base_dsl import Arch, BaseDSL


def has_pdl() -> bool:
    """Whether the GPU that is compiled for can start a kernel before the one ahead ends."""
    return BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_90


@cute.jit
def wait():
    """Wait for the kernel ahead and all it wrote; let the next one start and wait likewise."""
    if const_expr(has_pdl()):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
