"""An experts module of transformers as a block of ops.

The module gives its weights, flags and gate; what it computes becomes ``Dispatch -> GroupedLinear
-> activation -> GroupedLinear -> Combine``, planned by the fuser. The weights stay the module's own
parameters, used where they lie.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fusible.activations import ACTIVATIONS
from fusible.arguments import described
from fusible.fuser.module_names import ATTRIBUTE
from fusible.fuser.tracing import constant_when_traced
from fusible.integrations.checkpoint_layouts import matrix_of, quantized_tensor
from fusible.ops import (
    BasicOperation,
    Combine,
    Dispatch,
    GroupedLinear,
    ScaledClampedQGeGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    Sequential,
)
from fusible.ops.activation import Activation
from fusible.ops.hooks import why_called
from fusible.ops.parameters import stored
from fusible.recipes.quantization import HIGH_PRECISION
from fusible.recipes.sharding import local
from fusible.recipes.tensor import QuantizedTensor

NAME = "fusible"


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum of what its experts make of each token; transformers calls it.

    Args:
        experts: an experts module of transformers.
        hidden_states: tokens ``[tokens, hidden]``.
        top_k_index: integers ``[tokens, k]``; ids of ``num_experts`` and above, which are experts
            of other ranks, take no part and get no gradient. Ids of all experts where
            ``ep_implementation="fusible"`` calls.
        top_k_weights: ``[tokens, k]``, floating.

    Raises:
        ValueError: the weights are not what a `GroupedLinear` can multiply with.
    """
    tracing = torch.compiler.is_compiling()
    block = getattr(experts, ATTRIBUTE, None)
    if block is None or not (tracing or block.is_of(experts)):
        _attach.to(type(experts))
        experts._make_fusible_block(tracing)
    return getattr(experts, ATTRIBUTE)(hidden_states, top_k_index, top_k_weights)


class _Attach:
    """Gives a class of experts the method that makes a module's block.

    torch.compile runs methods for real while it traces, and takes classes, not modules, as their
    arguments.
    """

    @constant_when_traced
    def to(self, experts_class: Any) -> None:
        experts_class._make_fusible_block = _make_fusible_block


@constant_when_traced
def _make_fusible_block(experts: Any, traced: bool) -> None:
    for module in (experts, *(_of_same_model(experts) if traced else ())):
        module.__dict__[ATTRIBUTE] = ExpertsBlock(module)


def _of_same_model(experts: Any) -> Iterator[Any]:
    """The experts of a model's other layers, which no call has reached yet.

    Compiled one by one, layers share their code only if all have a block by then.
    """
    for module in gc.get_objects():
        if (
            type(module) is type(experts)
            and module is not experts
            and module.config is experts.config
            and getattr(module, ATTRIBUTE, None) is None
        ):
            yield module


_attach = _Attach()


class ExpertsBlock(nn.Module):
    """The computation of an experts module, as ops over its parameters.

    One run of ops if the gate is one that an op computes. Otherwise the module's own gate, or its
    activation if it has none, stands between ops, as does a norm after the experts.
    """

    _experts: Any
    _options: tuple[Any, ...]
    mlp: Sequential | None

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.__dict__["_experts"] = experts  # not a submodule: the parameters stay theirs
        self.__dict__["_options"] = _options(experts)
        up = ExpertsLinear(experts, "gate_up_proj" if experts.has_gate else "up_proj")
        act = activation_of(experts)
        scaled = act is not None and act.num_extra_inputs > 0
        down = ExpertsLinear(experts, "down_proj", scale_bias=scaled and experts.has_bias)
        _check_sizes(experts, up, down)
        dispatch, combine = _exchanges(experts, up.num_groups, scaled=scaled)
        self.mlp = None
        if act is None:
            self.dispatch, self.up, self.down, self.combine = dispatch, up, down, combine
        else:
            self.mlp = Sequential(dispatch, up, act, down, combine)

    def is_of(self, experts: Any) -> bool:
        """Whether the experts still compute what this was made from."""
        return self._experts is experts and self._options == _options(experts)

    def __getstate__(self) -> dict[str, Any]:
        """Without the options, which may not be picklable: a copy is made again when called."""
        return {**vars(self), "_options": ()}

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See :func:`experts_forward`."""
        if self.mlp is not None:
            return self.mlp(hidden_states, weights, ids).to(hidden_states.dtype)
        experts, dispatch = self._experts, self.dispatch
        rows, *others = dispatch(hidden_states, weights, ids)
        outputs = dict(zip(dispatch.extra_output_names, others, strict=False))
        rows = self.up(rows, outputs["split_sizes"])
        rows = _gate_of(experts)(rows)
        rows = self.down(rows, outputs["split_sizes"])
        if _has_norm(experts):
            rows = experts.post_expert_norm(rows)
        y = self.combine(rows, *[outputs[name] for name in self.combine.extra_input_names])
        return y.to(hidden_states.dtype)


EXPERTS_GROUP = "_fusible_group"
"""The attribute of an experts module for its process group and exchange, if it gets all ids."""


def _exchanges(experts: Any, count: int, *, scaled: bool) -> tuple[Dispatch, Combine]:
    """The ops around ``count`` experts: of this process, or of each process of a group.

    A token's weights multiply its rows before the experts, or ``scaled`` activations, or else what
    the experts give.
    """
    group, send = getattr(experts, EXPERTS_GROUP, (None, None))
    scale_input = getattr(experts, "scales_input", False)
    count = count if group is None else count * group.size()
    dispatch = dispatch_over(group, count, scale_input=scale_input, send=send)
    return dispatch, Combine(not (scaled or scale_input), process_group=group)


def dispatch_over(group: Any, num_experts: int, **options: Any) -> Dispatch:
    """A ``Dispatch`` over a group, or of one process, whose caller does not get the load."""
    dispatch = Dispatch(num_experts, process_group=group, **options)
    if group is not None:
        load = dispatch.extra_output_names.index("load")
        dispatch.set_extra_output_channel(load, "load", output_to_caller=False)
    return dispatch


_PLAIN = bool, int, float, str, type(None)


def _options(experts: Any) -> tuple[Any, ...]:
    """The properties of a module's experts that a block depends on, besides their values."""
    gate, act = _gate_of(experts), getattr(experts, "act_fn", None)
    plain = {name: value for name, value in vars(experts).items() if isinstance(value, _PLAIN)}
    if _is_known(gate):  # which computes the same in training and evaluation
        plain.pop("training")
    of_act = {
        name: value
        for name, value in (vars(act) if isinstance(act, nn.Module) else {}).items()
        if not name.startswith("_") and name != "training"
    }
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    shapes = [getattr(getattr(experts, name, None), "shape", None) for name in (up, "down_proj")]
    return (gate, act, plain, of_act, *shapes, _is_own_gate(experts))


def _check_sizes(experts: Any, up: ExpertsLinear, down: ExpertsLinear) -> None:
    """Refuse a second weight that does not go with the first."""
    inner = up.out_features // 2 if experts.has_gate else up.out_features
    wanted = up.num_groups, up.in_features, inner
    got = down.num_groups, down.out_features, down.in_features
    if got != wanted:
        raise ValueError(
            f"down_proj of {type(experts).__name__} must be of {wanted} (experts, hidden, inner) "
            f"to go with the weight before it, got {got}"
        )


class ExpertsLinear(GroupedLinear):
    """A ``GroupedLinear`` over the parameters of an experts module, which it reads at every call.

    Args:
        experts: has the weight ``[E, out, in]``, or ``[E, in, out]`` if ``is_transposed`` and not
            quantized, as ``name``, and if ``has_bias`` the bias ``[E, out]`` as ``name_bias``.
        name: of the weight.
        scale_bias: as in ``GroupedLinear``.

    Raises:
        ValueError: there is no such floating 3-D weight.
    """

    computes_as = GroupedLinear
    _experts: Any
    _name: str
    _scaled: tuple[Tensor, Tensor, QuantizedTensor] | None = None
    """Elements and scales that the experts hold apart, and the weight that they are."""

    def __init__(self, experts: Any, name: str, *, scale_bias: bool = False) -> None:
        self.__dict__.update(_experts=experts, _name=name)
        groups, out_features, in_features = self._weight().shape
        if getattr(experts, "_is_expert_parallel", False):
            groups = experts.num_experts  # here; the shape of a DTensor counts all
        super().__init__(
            groups,
            in_features,
            out_features,
            bias=experts.has_bias,
            device="meta",
            single_grouped_weight=True,
            single_grouped_bias=True,
            scale_bias=scale_bias,
        )

    def _add_parameters(self, name: str, values: Tensor, single: bool) -> tuple[str, ...]:
        """None of its own: it reads those of the experts by this name."""
        return (name,)

    def reset_parameters(self) -> None:
        """Leaves the experts' parameters alone."""

    @property
    def weight(self) -> Tensor:
        """The experts' weight as ``[E, out, in]``, a view if it is stored transposed.

        Raises:
            ValueError: it was replaced by what is no floating parameter of the shape it had.
        """
        weight, shape = self._weight(), (self.num_groups, self.out_features, self.in_features)
        if weight.shape != shape:
            raise ValueError(
                f"{self._name} of {type(self._experts).__name__} must be {shape} (groups, out, in) "
                f"as at its first call, got {tuple(weight.shape)}; replace the module"
            )
        return weight

    def _weight(self) -> Tensor:
        experts, weight = self._experts, getattr(self._experts, self._name, None)
        held = stored(experts, self._name)  # what an adapter adds to has the layout of its sum
        scale = getattr(experts, f"{self._name}_scale_inv", None)
        if isinstance(weight, Tensor) and isinstance(scale, Tensor):
            if weight is not held[0]:
                raise ValueError(
                    f"{self._name} of {type(experts).__name__} must be a parameter, since it is "
                    "without its scales, got elements that are computed (by an adapter, a "
                    'parametrization); load the checkpoint with quant_method "fusible"'
                )
            weight = self._of_scale(weight, scale)
        if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.is_floating_point():
            raise ValueError(
                f"{self._name} of {type(experts).__name__} must be a floating 3-D parameter, got "
                f'{described(weight)}; use experts_implementation="eager" for this model'
            )
        quantized = any([isinstance(local(part), QuantizedTensor) for part in (weight, *held)])
        return weight if quantized or not experts.is_transposed else weight.mT

    def _of_scale(self, data: Tensor, scale: Tensor) -> QuantizedTensor:
        """The weight of elements and scales that the experts hold, in their memory; frozen."""
        kept = self._scaled
        if kept is None or kept[0] is not data or kept[1] is not scale:
            matrix = matrix_of(data.detach(), scale.detach())
            dtype = getattr(self._experts.config, "dtype", None)
            dtype = dtype if dtype in HIGH_PRECISION else torch.bfloat16
            kept = data, scale, quantized_tensor(matrix, matrix.format, dtype)
            self.__dict__["_scaled"] = kept
        return kept[2]

    @property
    def bias(self) -> Tensor:
        """The experts' bias."""
        return getattr(self._experts, f"{self._name}_bias")

    def stored(self, name: str) -> list[Tensor]:
        """The stored tensors of the experts."""
        if name == "weight" and self._scaled is not None:
            return [self.weight]
        return stored(self._experts, self._name if name == "weight" else f"{self._name}_bias")


def activation_of(experts: Any) -> BasicOperation | None:
    """The op that computes the gate of an experts module, or its activation, if there is one.

    Times a row's weight if an op does both, and the weights are not those of the experts' inputs.
    Classes write the same gate in many ways, so it is recognised by its values, of halves or of
    alternating columns.
    """
    if _has_norm(experts) or _is_own_gate(experts):
        return None
    # explain() and torch.compile may be the first to call, under modes of fake tensors.
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)
        # Also of magnitudes that any limit clamps.
        rows = torch.randn(16, 64, generator=generator, device="cpu").double() * 8
        rows = torch.cat([rows, rows * 100, rows * 1e4])
        try:
            expected = _gate_of(experts)(rows).double()
        except (RuntimeError, TypeError):  # such as parameters on another device
            return None
        for act in _candidates(experts):
            if torch.allclose(act.value(rows), expected, rtol=1e-5, atol=1e-6):
                return act
    return None


def _is_own_gate(experts: Any) -> bool:
    """Whether the module's activation is called as it is, since its values may change unnoticed.

    It is neither of PyTorch's activations nor of transformers', or it has submodules, hooks,
    parameters or buffers.
    """
    act = getattr(experts, "act_fn", None)
    if not isinstance(act, nn.Module):
        return act is not None and not _is_known(act)
    has_state = act._modules or act._parameters or act._buffers
    return bool(has_state) or not _is_known(type(act)) or why_called(act) is not None


def _is_known(function: Any) -> bool:
    """Whether an activation, its class or a gate is PyTorch's or transformers'."""
    module = getattr(function, "__module__", None) or ""
    return module == "torch" or module.startswith(
        ("torch._C", "torch.nn.functional", "torch.nn.modules.activation", "transformers.")
    )


def _gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """The activation between the two products of the experts."""
    return experts._apply_gate if experts.has_gate else experts.act_fn


def _candidates(experts: Any) -> Iterator[Any]:
    """Activations that may be the experts', those with scales first."""
    if not getattr(experts, "scales_input", False):
        yield from _scaled_candidates(experts) if experts.has_gate else [ScaledSReLU()]
    for kind in Activation.pattern_types:
        if kind.num_extra_inputs or ACTIVATIONS[kind.activation].options:
            continue
        if kind.gated and experts.has_gate:
            yield from (kind(glu_interleave_size=interleave) for interleave in (None, 1))  # type: ignore[call-arg]
        elif not (kind.gated or experts.has_gate):
            yield kind()


def _scaled_candidates(experts: Any) -> Iterator[ScaledSwiGLU | ScaledClampedQGeGLU]:
    """Gates with the parameters that the module has, under the names models give them."""
    limits = [getattr(experts, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(experts, name, None) for name in ("alpha", "swiglu_alpha")]
    for interleave in (None, 1):
        yield ScaledSwiGLU(interleave)
        for limit in (value for value in limits if value):
            for alpha in {float(value) for value in (*alphas, 1.0) if value is not None}:
                for offset in (0.0, 1.0):
                    yield ScaledClampedQGeGLU(interleave, float(limit), alpha, offset)


def _has_norm(experts: Any) -> bool:
    return getattr(experts, "has_post_expert_norm", False)
