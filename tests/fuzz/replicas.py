"""A replica of a module, as ``torch.nn.parallel.replicate`` makes it, on one device."""

from __future__ import annotations

from torch import nn


def replica_of(model: nn.Module) -> nn.Module:
    """Modules that share all but their parameters, which are copies that autograd follows."""
    copies = {id(p): p * 1 for p in model.parameters()}
    replicas = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, replica in replicas.items():
        replica._former_parameters = {}
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, p in module._parameters.items():
            if p is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, copies[id(p)])
                replica._former_parameters[name] = copies[id(p)]
        for name, b in module._buffers.items():
            replica._buffers[name] = b
    return replicas[model]
