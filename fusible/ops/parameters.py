"""The parameters of an op: their names, their order, and what computes them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fusible.fuser.registry import is_ours


class OwnParameters(nn.Module):
    """The parameters that an op gives gradients of, by name and in order."""

    parameter_names: tuple[str, ...] | None
    _holder: weakref.ref[nn.Module] | None
    # Names of parameters in the order of first registration, which ``_parameters`` loses.
    _registered: dict[str, None]
    _names: tuple[str, ...] | None  # of an op that a run has captured
    _frozen: bool
    expert_processes: int | None = None
    """Number of processes among which the experts are shared, if they are."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also note the order of first registration."""
        is_source = self._is_source(name, param)
        super().register_parameter(name, param)
        if not is_source:
            self._registered.setdefault(name)
            if self._frozen:
                self._names = self._find_names()

    def _is_source(self, name: str, param: nn.Parameter | None) -> bool:
        """Whether PyTorch registers a parameter from which it will compute another one.

        Pruning, and the weight and spectral norms that are hooks, register it while the other is
        this very tensor or has just been deleted.
        """
        of, _, kind = name.rpartition("_")
        if kind not in ("orig", "g", "v") or of not in self._registered:
            return False
        return of not in self._parameters or self._parameters[of] is param

    def own_parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order in which gradients are returned."""
        return self._find_names() if self._names is None else self._names

    def own_parameters(self) -> tuple[Tensor, ...]:
        """The parameters as PyTorch resolves their names now; gradients come in this order.

        A parametrization is evaluated. In a forward, ``ctx.parameters`` has them.

        Raises:
            AttributeError: one of ``parameter_names`` is missing.
        """
        names = self.own_parameter_names()
        if not names:
            return ()
        own = self._parameters if self._holder is None else self._held_by()._parameters
        if tuple(own) == names:
            values: tuple[Any, ...] = tuple(own.values())
        else:
            values = tuple(
                [self._value(name) if own.get(name) is None else own[name] for name in names]
            )
        if self.parameter_names is None:
            return tuple([value for value in values if value is not None])
        for name, value in zip(names, values, strict=True):
            if value is None:
                raise _missing(self, name)
        return values

    def local_parameters(self) -> tuple[Tensor, ...]:
        """The local part of each parameter ``Shard(0)``; gradients are so too.

        Raises:
            ValueError: one is sharded otherwise, or no ``DTensor``.
        """
        parts: list[Tensor] = []
        parameters: tuple[Any, ...] = self.own_parameters()
        for name, parameter in zip(self.own_parameter_names(), parameters, strict=True):
            placements = getattr(parameter, "placements", None)
            if placements is None or len(placements) != 1 or not placements[0].is_shard(0):
                raise ValueError(
                    f"{name} of {type(self).__name__} must be a DTensor Shard(0) on the mesh of "
                    f"its experts, got {placements or 'no DTensor'}; after fully_shard call the "
                    "module that it was called on, whose hooks gather the parameters"
                )
            parts.append(parameter.to_local(grad_placements=placements))
        return tuple(parts)

    def _value(self, name: str) -> Any:
        """The value of a computed parameter, or None if there is none."""
        if self.parameter_names is None and not self._has(name):
            return None
        value = operator.attrgetter(name)(self._computing(name))
        if value is None:
            raise _missing(self, name)
        return value

    def _has(self, name: str) -> bool:
        """Whether there is a parameter that was registered once, and may be computed now."""
        if (
            "." in name
            or self._parameters.get(name) is not None
            or self.__dict__.get(name) is not None
        ):
            return True
        parametrized: Any = self._modules.get("parametrizations", ())
        return name in parametrized

    def stored(self, name: str) -> list[Tensor]:
        """The tensors that a parameter is computed from, by default itself."""
        return stored(self._computing(name), name)

    def _held_by(self) -> nn.Module:
        """The module whose attributes the parameters are."""
        return self if self._holder is None else self._holder() or self

    def _computing(self, name: str) -> nn.Module:
        """The module that computes a parameter: this part if it is pruned or parametrized."""
        is_own = name in self.__dict__ or hasattr(type(self), name)
        return self if is_own else self._held_by()

    def _find_names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order in which they are given and have gradients.

        Raises:
            TypeError: the gradient of a parameter would be lost, since neither ``parameter_names``
                nor ``formula`` has it, or it is that of a module inside and no backward returns it;
                not if the class has a forward of a user, which may read it.
        """
        if type(self).own_parameters is not OwnParameters.own_parameters:
            return tuple(self._registered)
        registered = [name for name in self._registered if self._has(name)]
        names = self.parameter_names
        if names is None:
            taken = self._formula_arguments(registered)
            known = [name for name in taken if name in self._registered]
            names = tuple(dict.fromkeys((*known, *self._registered)))
        inner = [name for name, _ in _named_parameters(self) if "." in name]
        inner = [name for name in inner if not name.startswith("parametrizations.")]
        if self.parameter_names is None and self._returns_grads():
            names = (*names, *inner)
        lost = [name for name in (*registered, *inner) if name not in {*names}]
        if lost and not self._has_users_forward():
            raise TypeError(
                f"{type(self).__name__} must return the gradients of all its parameters, got "
                f"{', '.join(lost)} besides ({', '.join(names)}); define op_forward and "
                "op_backward, and name them in parameter_names, or register them in the op itself"
            )
        return names

    def _has_users_forward(self) -> bool:
        """Whether the module's class has a forward of a user, around an op that is ours.

        Autograd sees what that reads, not what the op itself does.
        """
        names = "forward_impl", "op_forward", "fuser_forward", "formula"
        ours = all([is_ours(getattr(type(self), name)) for name in names])
        return ours and not is_ours(type(self._held_by()).forward)

    def _formula_arguments(self, registered: Sequence[str]) -> list[str]:
        """The arguments of the op's formula if it takes the parameters by name."""
        return []

    def _returns_grads(self) -> bool:
        """Whether a backward by hand returns the gradients, also of modules inside."""
        return False


def _missing(op: OwnParameters, name: str) -> AttributeError:
    return AttributeError(
        f"{name} of {type(op).__name__} must be a tensor, got None; make an op without it"
    )


def stored(module: nn.Module, name: str) -> list[Tensor]:
    """The tensors that a parameter of ``module`` is computed from, or itself."""
    parametrized: Any = module._modules.get("parametrizations", {})
    if name in parametrized:
        return [p for _, p in _named_parameters(parametrized[name])]
    parameter = getattr(module, name, None)
    return [] if parameter is None else [parameter]


def _named_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """``module.named_parameters()``, also of a replica of ``torch.nn.DataParallel``.

    A replica holds them as attributes.
    """
    return [
        (f"{path}.{name}" if path else name, p)
        for path, part in module.named_modules()
        for name, p in {**part._parameters, **vars(part).get("_former_parameters", {})}.items()
        if p is not None
    ]
