"""The router of a mixture-of-experts block: which experts a token goes to, and how much of each."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusible import formulas
from fusible.arguments import check_bools, check_numbers, described
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.op_facts import Dtypes, autocast_to
from fusible.kernels import moe
from fusible.ops.collectives import all_reduce
from fusible.ops.elementary import holds_sum
from fusible.ops.inputs import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_features,
    check_sizes,
    wrong_shape,
)
from fusible.ops.matrices import add_product
from fusible.ops.op import BasicOperation, Grads, OpGrads
from fusible.recipes.product import values


class TopKRouter(BasicOperation):
    """Chooses ``top_k`` of ``num_experts`` experts for each token of x ``[..., hidden_size]``.

    The output is the input itself. Extra outputs: ``probs`` ``[..., top_k]``, the weights of the
    experts chosen, best first, in FP32 (FP64 for FP64); ``expert_ids`` ``[..., top_k]``, int64;
    then ``load_balancing_loss`` and ``z_loss``, scalars, where asked for. A later :class:`Dispatch`
    of the run finds the first two by name.

    Logits are ``x @ weight.T + bias``, of operands in the input's dtype (autocast's; the weight's
    if it is wider), accumulated and stored in FP32. On CUDA up to 8 tokens are multiplied by
    another kernel, so the last bits of a token's logits depend on the number of tokens. Of equal
    logits the first expert is chosen, on every device. What models do:

    - Mixtral, Qwen3-MoE: softmax, the default. GPT-OSS, a softmax of the logits chosen: the same
      numbers, with ``bias=True``.
    - OLMoE and Qwen2-MoE: ``normalize=False``.
    - DeepSeek-V3: ``score_function="sigmoid"``, ``num_groups=8``, ``top_groups=4``,
      ``expert_bias=True``, ``scaling_factor=2.5``. DeepSeek-V2: softmax, ``group_top=1``,
      ``normalize=False``.
    - Llama-4: sigmoid, ``top_k=1``, ``normalize=False``, and ``Dispatch(scale_input=True)``.

    Saves ``(x, weight, logits, ids)``, and the dtype of the product as ``ctx.dtype``.

    Args:
        hidden_size: features of a token.
        num_experts: number of experts.
        top_k: experts for each token.
        score_function: ``"softmax"`` or ``"sigmoid"`` of the logits.
        normalize: divide the weights of a token by their sum.
        num_groups: number of groups of neighbouring experts; None for one.
        top_groups: number of groups from which the experts of a token are chosen; None for all.
        group_top: the score of a group is the sum of this many of its best scores.
        expert_bias: keep a buffer ``expert_bias`` ``[num_experts]``, FP32 whatever the module is
            converted to, that is added to the scores where experts are chosen, not in their
            weights; see :meth:`update_expert_bias`.
        scaling_factor: multiplies the weights.
        bias: add a learned bias to the logits.
        load_balancing_loss: give :func:`fusible.formulas.load_balancing_loss` out.
        z_loss: give :func:`fusible.formulas.router_z_loss` out.
        device, dtype: of the parameters; PyTorch's defaults if None.

    Raises:
        TypeError: a size is no integer.
        ValueError: sizes that do not fit each other, an unknown score function, or a dtype that ops
            do not compute in; in a call, x has other features or such a dtype, or is elsewhere.
    """

    saves = "x, weight, logits, expert ids"
    handles_autocast = True
    writes_grads = True
    expert_bias: Tensor | None
    fact_names = (
        "hidden_size",
        "num_experts",
        "top_k",
        "score_function",
        "normalize",
        "num_groups",
        "top_groups",
        "group_top",
        "scaling_factor",
    )

    def __init__(  # noqa: PLR0913 - routers of many models
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: str = "softmax",
        normalize: bool = True,
        num_groups: int | None = None,
        top_groups: int | None = None,
        group_top: int = 2,
        expert_bias: bool = False,
        scaling_factor: float = 1.0,
        bias: bool = False,
        load_balancing_loss: bool = False,
        z_loss: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        losses = {"load_balancing_loss": load_balancing_loss, "z_loss": z_loss}
        check_bools("TopKRouter", normalize=normalize, expert_bias=expert_bias, bias=bias, **losses)
        check_numbers("TopKRouter", scaling_factor=scaling_factor)
        self.extra_output_names = ("probs", "expert_ids", *[n for n, on in losses.items() if on])
        self.num_extra_outputs = len(self.extra_output_names)
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.score_function = score_function
        self.normalize = normalize
        self.num_groups = 1 if num_groups is None else num_groups
        self.top_groups = self.num_groups if top_groups is None else top_groups
        self.group_top = group_top
        self.scaling_factor = scaling_factor
        self._check_arguments(dtype)
        self.parameter_names = ("weight", "bias") if bias else ("weight",)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
        self.bias = nn.Parameter(torch.empty(num_experts, **factory)) if bias else None
        load_bias = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("expert_bias", load_bias if expert_bias else None)
        self.reset_parameters()

    def _check_arguments(self, dtype: torch.dtype | None) -> None:
        if self.score_function not in ("softmax", "sigmoid"):
            raise ValueError(
                f"score_function of TopKRouter must be 'softmax' or 'sigmoid', got "
                f"{self.score_function!r}"
            )
        names = "hidden_size", "num_experts", "top_k", "num_groups", "top_groups", "group_top"
        check_sizes("TopKRouter", dtype, **{name: getattr(self, name) for name in names})
        groups = self.num_groups
        if self.num_experts % groups:
            raise ValueError(
                f"num_groups of TopKRouter must divide num_experts={self.num_experts}, got {groups}"
            )
        size = self.num_experts // groups
        for name, value, most in (
            ("top_groups", self.top_groups, groups),
            ("group_top", self.group_top, size if groups > 1 else self.group_top),
            ("top_k", self.top_k, self.top_groups * size),
        ):
            if value > most:
                raise ValueError(
                    f"{name} of TopKRouter must be from 1 to {most} for {self.num_experts} experts "
                    f"in {groups} groups, got {value}"
                )

    def extra_repr(self) -> str:
        """The facts, what it learns or keeps besides the weight, and the losses it gives out."""
        kept = [name for name in ("bias", "expert_bias") if getattr(self, name) is not None]
        on = [f"{name}=True" for name in (*kept, *self.extra_output_names[2:])]
        return ", ".join([super().extra_repr(), *on])

    def reset_parameters(self) -> None:
        """Kaiming-uniform, as ``torch.nn.Linear``; zeros for both biases."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        for bias in (self.bias, self.expert_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.expert_bias
        super()._apply(fn, recurse)
        after: Any = self.expert_bias
        if before is not None and after.dtype != before.dtype:
            # A step of 0.001 is lost when added to a bias of 0.3 in BF16.
            self.expert_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.expert_bias is not None:  # with assign=True that of the state dict
            self.expert_bias = self.expert_bias.float()

    @torch.no_grad()
    def update_expert_bias(
        self, split_sizes: Tensor, rate: float = 1e-3, *, process_group: Any = None
    ) -> None:
        """Move ``expert_bias`` by ``rate`` towards an even load; called after a step.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664, algorithm 1.

        Args:
            split_sizes: rows of each expert, a tensor ``[num_experts]``, in the step, summed over
                micro-batches, and over ranks unless ``process_group`` does that.
            rate: the step.
            process_group: whose processes' rows to sum; the bias then stays the same on all.

        Raises:
            ValueError: the router has no ``expert_bias``, or the sizes do not fit it.
        """
        if self.expert_bias is None:
            raise ValueError(
                "update_expert_bias needs expert_bias=True, got a TopKRouter without one"
            )
        if not isinstance(split_sizes, Tensor) or split_sizes.shape != self.expert_bias.shape:
            raise ValueError(
                "split_sizes of update_expert_bias must be a tensor of shape "
                f"({self.num_experts},), the rows of each expert, got {described(split_sizes)}"
            )
        if process_group is not None:
            split_sizes = all_reduce(split_sizes, process_group)
        load = split_sizes.to(self.expert_bias.dtype)
        self.expert_bias += rate * torch.sign(load.mean() - load)

    # --- math ------------------------------------------------------------------------------------

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """The input's; what is chosen by FP32 (FP64) logits, and the losses of them."""
        if given.input not in FLOAT_DTYPES:  # or not known
            return (None,) * (1 + self.num_extra_outputs)
        wide = formulas.math_dtype(_product_dtype(given.input, given.params[0], given.autocast))
        return (given.input, wide, torch.int64, *[wide] * (self.num_extra_outputs - 2))

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> tuple[Tensor, ...]:
        """The product and the choice, one launch for few tokens."""
        x, weight = self._operands(ctx, values(input_))
        bias = ctx.parameters[1] if len(ctx.parameters) > 1 else None
        choice = self.top_k, self.score_function, self.normalize, self.scaling_factor
        groups = [self.num_groups, self.top_groups, self.group_top]
        logits, probs, ids = moe.route_tokens(x, weight, bias, self.expert_bias, *choice, groups)
        of_weight, of_input = ctx.needs.params[0], ctx.needs.input
        ctx.save_for_backward(x if of_weight else None, weight if of_input else None, logits, ids)
        losses = [self._loss(name, logits, ids) for name in self.extra_output_names[2:]]
        shape = (*input_.shape[:-1], self.top_k)
        return input_, probs.view(shape), ids.view(shape), *losses

    def _operands(self, ctx: OperationContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[T, hidden_size]`` and the weight, in the dtype of the product."""
        weight = ctx.parameters[0]
        check_features(x, self.hidden_size, "TopKRouter")
        shapes = {"weight": (self.num_experts, self.hidden_size), "bias": (self.num_experts,)}
        for parameter, (name, shape) in zip(ctx.parameters, shapes.items(), strict=False):
            if parameter.shape != shape:
                raise wrong_shape(name, parameter, shape, "TopKRouter")
            check_device(x, parameter, "TopKRouter")
        check_dtype(x, "input", "TopKRouter")
        ctx.dtype = _product_dtype(x.dtype, weight.dtype, ctx.autocast_dtype)
        return cast(x.reshape(-1, self.hidden_size), ctx.dtype), cast(weight, ctx.dtype)

    def _loss(self, name: str, logits: Tensor, ids: Tensor) -> Tensor:
        """One of the losses given out, by the name of its output."""
        if name == "z_loss":
            return formulas.router_z_loss(logits)
        return formulas.load_balancing_loss(logits, ids, self.score_function)

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, *grad_extra_outputs: Tensor | None
    ) -> OpGrads:
        """The logits' gradient, then two products; that of the input is added to ``dy``."""
        dprobs, _, *dlosses = grad_extra_outputs
        x, weight, logits, ids = ctx.saved_tensors
        dlogits = self._logits_grad(logits, ids, dprobs, dlosses)
        grads: list[Tensor | None] = [None] * len(ctx.needs.params)
        if dlogits is None:
            return grad_output, *grads
        narrow = cast(dlogits, ctx.dtype)
        if ctx.needs.params[0]:
            grads[0] = narrow.t() @ x
        if len(grads) > 1 and ctx.needs.params[1]:
            grads[1] = dlogits.sum(0)
        dx = None
        if ctx.needs.input:
            shape = *grad_output.shape[:-1], self.num_experts
            in_place = ctx.writable_grad_output and holds_sum(grad_output, narrow)
            dx = add_product(grad_output, narrow.view(shape), weight, in_place=in_place)
        return dx, *grads

    def _logits_grad(
        self, logits: Tensor, ids: Tensor, dprobs: Tensor | None, dlosses: Grads
    ) -> Tensor | None:
        """Sum over what the logits lead to; None if nothing flows back."""
        parts = []
        if dprobs is not None:
            dprobs = dprobs.reshape(ids.shape)
            options = self.score_function, self.normalize, self.scaling_factor
            parts.append(moe.route_backward(dprobs, logits, ids, *options))
        for name, dloss in zip(self.extra_output_names[2:], dlosses, strict=True):
            if dloss is not None:
                parts += formulas.vjp(partial(self._loss, name, ids=ids), (logits,), dloss)
        return sum(parts[1:], parts[0]) if parts else None


def _product_dtype(
    x: torch.dtype, weight: torch.dtype, autocast: torch.dtype | None
) -> torch.dtype:
    return autocast_to(torch.promote_types(x, weight), autocast)
