"""Tokens to the experts they were routed to, and the experts' rows back to the tokens."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusible.arguments import check_bools, check_numbers, described
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.op_facts import Dtypes, autocast_to
from fusible.fuser.overlap import defer
from fusible.fuser.tracing import constant_when_traced
from fusible.kernels import moe
from fusible.kernels.moe.cuda import PeerRows
from fusible.kernels.quantize.k_major import row_matrix
from fusible.ops.collectives import check_initialized
from fusible.ops.exchange import (
    SENT,
    Exchange,
    Received,
    ReturnExchange,
    Send,
    Settings,
    balanced_sizes,
    begin_send_as,
    copy_received,
    receive,
    scatter_received,
    sum_copies,
    unrounded,
    wire_format,
)
from fusible.ops.inputs import check_dtype, check_row_scales, check_sizes
from fusible.ops.matrices import GatheredRows, QuantizedRows
from fusible.ops.op import BasicOperation, OpGrads
from fusible.ops.peer_memory import on_failure, peer_memory, reserved
from fusible.ops.top_k_router import TopKRouter
from fusible.recipes.formats import NumberFormat
from fusible.recipes.product import values


class Choices(NamedTuple):
    """Tokens ``[R, H]`` for the experts here, with their choices ``[R, k]``."""

    x: Tensor | PeerRows
    probs: Tensor
    ids: Tensor
    """Ids among the experts of this process, from 0."""
    rows: int
    capacity: int | None
    """The most rows an expert takes."""
    of_group: tuple[Tensor, ...]
    """The extra outputs of a dispatch over a group."""


class _OverGroup(BasicOperation):
    """An op over a process group, or of one process; arguments as in :class:`Dispatch`."""

    sending_names: tuple[str, ...] = ("quantized_send", "symmetric_memory")

    def __init__(self, process_group: Any, quantized_send: bool, symmetric_memory: bool) -> None:
        name = type(self).__name__
        check_bools(name, quantized_send=quantized_send, symmetric_memory=symmetric_memory)
        super().__init__()
        self.processes = 1
        if process_group is not None:
            check_initialized(name)
            if hasattr(process_group, "get_group"):  # of a DeviceMesh
                process_group = process_group.get_group()
            self.processes = dist.get_world_size(process_group)
        self.process_group = process_group
        self.quantized_send, self.symmetric_memory = quantized_send, symmetric_memory

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The facts, over a group also how tokens are sent."""
        if self.process_group is None:
            return tuple([name for name in self.fact_names if name != "processes"])
        return (*self.fact_names, *self.sending_names)

    def on_failure(self) -> None:
        """Abandon the unfinished exchanges of the group."""
        on_failure(self.process_group)


class Dispatch(_OverGroup):
    """One row for each of a token's choices of experts, sorted by expert: ``[rows, H]``.

    The input is tokens ``[..., H]``. Extra inputs: ``probs`` ``[..., k]``, floating, and
    ``expert_ids`` ``[..., k]``, int64 or int32, as a :class:`TopKRouter` gives them. An id that is
    negative or at least ``num_experts`` (an expert of another rank) has no part in the output, and
    gives no gradient.

    Extra outputs, which later ops of the run find by name:

    - ``split_sizes``, int64 ``[num_experts]``: the rows of each expert. No host reads them.
    - ``scales`` ``[rows]``: the weight of each row, from ``probs``; not with ``scale_input``.
    - ``row_map``, int32 ``[..., k]``: the row of each choice. Where a choice is not computed,
      ``~r`` for a row r in the tail (:mod:`fusible.kernels.moe.definitions`), so test for ``>= 0``.

    There is a row for each choice, computed or not: ``rows`` is the number of choices, or at most
    ``num_experts`` times the capacity. Within an expert rows are in the order of the tokens; rows
    past the last expert's (the tail) are zero. The backward sums a token's rows in FP32, in the
    order of its choices, so it is deterministic. Under autocast rows have autocast's dtype.

    Over a ``process_group`` of P processes, process r holds the experts from ``r * num_experts /
    P`` on, ``num_experts / P`` of them; tokens, probabilities and ids are this process's, and ids
    are those of all experts. Rows are then those of all processes' tokens for the experts here, and
    ``split_sizes`` is ``[num_experts / P]``. ``row_map`` is ``[R, k]``, for the R tokens received
    (with ``send="rows"`` ``[R, 1]``), and three extra outputs follow:

    - ``sent_map``, int32 ``[..., c]``, and ``sent_counts``, int64 ``[2, P]`` on the host (empty
      with ``send="all"``), by which ``Combine`` returns results (:mod:`fusible.ops.exchange`);
    - ``load``, int64 ``[num_experts]``: the choices of this process's tokens, for
      :meth:`TopKRouter.update_expert_bias`.

    Gradients of expert weights are sums over the tokens of the group. What is sent:

    - ``"all"``: every token to every process, which returns partial sums. Nothing is read on the
      host on a GPU, where all processes must have equally many tokens unless ``max_tokens`` is
      given.
    - ``"tokens"``: a copy of a token to each process that has an expert of it, which returns a
      partial sum. The host reads how many.
    - ``"rows"``: a copy of a token for each choice, which is returned: the bits of one process that
      has all tokens in order of rank. The host reads how many.

    Partial sums are rounded to the rows' dtype, so the first two round once more than one process.

    Saves ``(row_map,)``, and with ``scale_input`` ``(row_map, x, probs)``, over a group then
    ``sent_map``; ``ctx.dtype``, the dtype of the probabilities.

    Args:
        num_experts: number of experts, of all processes.
        scale_input: multiply the rows by their weights (Llama-4), rather than give these out.
        recompute_rows: where a rule fuses the whole of the experts, keep the tokens for the
            backward and make their rows once more: less memory for one more launch.
        capacity_factor: an expert takes at most ``capacity_factor * choices / num_experts`` rows,
            rounded up; later choices are dropped (Switch Transformers, arXiv 2101.03961). None
            drops no choice.
        process_group: of ``torch.distributed``, or a one-dimensional ``DeviceMesh``: experts are
            shared among its processes. None for one process.
        send: what is sent to other processes; None for ``"all"`` in groups of at most k processes,
            else ``"tokens"``.
        receive_factor: over a group, a bound on the rows of a process: this many times its own
            choices, or those of the process that has the most tokens. More are an error on all
            processes. It bounds memory where nothing is read on the host. None for no bound.
        max_tokens: over a group, the most tokens of a process. With ``send="all"`` on a GPU
            processes may then have different numbers of tokens, and are padded to this one. More
            are an error on all processes. None if they have equally many.
        quantized_send: over a group, send tokens in the recipe's format of inputs, and in
            :class:`Combine`'s backward gradients in that of gradients, quantized row-wise and
            rounded to their dtype where they arrive: half of BF16's bytes. It changes numbers:
            the experts' column-wise uses are quantized from these. Formats with scales of parts of
            a row are sent so (MXFP8, FP8 block), others as without.
        symmetric_memory: over a group, with ``send="all"``: where the processes are on the GPUs of
            one host, kernels read tokens from, and write sums to, each other's memory, by PyTorch's
            symmetric memory, instead of collectives of NCCL. Same bits; the first call waits for
            the other processes.

    Raises:
        TypeError: the number of experts or of tokens is no integer.
        ValueError: no expert, or a factor that is not positive and finite, an unknown mode, or a
            group whose size does not divide the experts; in a call, ``probs`` and ``expert_ids`` do
            not fit the tokens or each other, the input has a dtype that ops do not compute in,
            processes disagree about options, or rows or tokens exceed their bound.
        RuntimeError: ``torch.distributed`` is not initialized; in a call, another process fails.
    """

    num_extra_inputs = 2
    extra_input_names = ("probs", "expert_ids")
    fact_names = ("num_experts", "scale_input", "recompute_rows", "capacity_factor", "processes")
    sending_names = ("send", "receive_factor", "max_tokens", *_OverGroup.sending_names)
    saves = "row map; with scale_input x, probs; over a group sent map"

    def __init__(
        self,
        num_experts: int,
        *,
        scale_input: bool = False,
        recompute_rows: bool = False,
        capacity_factor: float | None = None,
        process_group: Any = None,
        send: Send | None = None,
        receive_factor: float | None = None,
        max_tokens: int | None = None,
        quantized_send: bool = False,
        symmetric_memory: bool = True,
    ) -> None:
        check_bools("Dispatch", scale_input=scale_input, recompute_rows=recompute_rows)
        scales = () if scale_input else ("scales",)
        of_group = () if process_group is None else ("sent_map", "sent_counts", "load")
        self.extra_output_names = ("split_sizes", *scales, "row_map", *of_group)
        self.num_extra_outputs = len(self.extra_output_names)
        super().__init__(process_group, quantized_send, symmetric_memory)
        check_sizes("Dispatch", num_experts=num_experts)
        _check_factor("capacity_factor", capacity_factor)
        _check_factor("receive_factor", receive_factor)
        if send not in (None, *SENT):
            raise ValueError(f"send of Dispatch must be None or one of {tuple(SENT)}, got {send!r}")
        if num_experts % self.processes:
            raise ValueError(
                f"num_experts of Dispatch must be a multiple of the group's {self.processes} "
                f"processes, got {num_experts}"
            )
        if max_tokens is not None:
            check_sizes("Dispatch", max_tokens=max_tokens)
            if capacity_factor is not None:
                raise ValueError(
                    "max_tokens of Dispatch must be None with a capacity_factor, which counts the "
                    f"choices of all processes, got {max_tokens} and {capacity_factor}; give all "
                    "processes equally many tokens"
                )
        self.send, self.receive_factor, self.max_tokens = send, receive_factor, max_tokens
        self.num_experts, self.capacity_factor = num_experts, capacity_factor
        self.scale_input, self.recompute_rows = scale_input, recompute_rows

    def check_producer(self, slot: int, producer: Any) -> None:
        """Refuse a router that chooses among more experts, whose tokens would be lost."""
        if isinstance(producer, TopKRouter) and producer.num_experts > self.num_experts:
            raise ValueError(
                f"num_experts of Dispatch must be at least the {producer.num_experts} experts of "
                f"the TopKRouter before it, got {self.num_experts}; the tokens of the others would "
                "be lost"
            )

    @property
    def local_experts(self) -> int:
        """The experts of this process."""
        return self.num_experts // self.processes

    def capacity(self, choices: int) -> int | None:
        """The most rows an expert takes of so many choices; None without a capacity factor."""
        if self.capacity_factor is None:
            return None
        # In integers, which torch.compile keeps symbolic.
        parts = 1 << 16
        factor = Fraction(max(self.capacity_factor, 1 / parts)).limit_denominator(parts)
        factor = factor / self.num_experts  # torch 2.11 does not trace /=
        return -(-choices * factor.numerator // factor.denominator)

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """Autocast's or the input's; sizes, the probabilities' and the row map's."""
        x = None if given.input is None else autocast_to(given.input, given.autocast)
        middle = () if self.scale_input else given.extra_inputs[:1]
        of_group = () if self.process_group is None else (torch.int32, torch.int64, torch.int64)
        return (x, torch.int64, *middle, torch.int32, *of_group)

    def call_notes(self, ctx: OperationContext) -> tuple[str, ...]:
        """Notes on what is sent, and whether the host reads sizes."""
        if self.process_group is None:
            return ()
        sent_as = ""
        if self.quantized_send:
            sent_as = f"; tokens, and the sums' gradients, are sent in {ctx.sent_as}"
            if ctx.sent_as is None:
                sent_as = (
                    "; quantized_send has no effect without a recipe whose formats have scales of "
                    "parts of a row (MXFP8, FP8 block), or with its backward_override"
                )
        chosen = "" if self.send else f", chosen for top_k {ctx.top_k}"
        return (
            f"experts are shared among {self.processes} processes; sends {ctx.send}{chosen}: "
            f"{SENT[ctx.send]}{sent_as}{self._transport(ctx)}",
        )

    def _transport(self, ctx: OperationContext) -> str:
        """How tokens are sent to other GPUs, in words."""
        if ctx.send != "all" or ctx.device.type != "cuda" or self.processes == 1:
            return ""
        if not self.symmetric_memory:
            return "; by collectives: symmetric_memory is off"
        found = reserved(self.process_group, ctx.device)
        if found is None:
            return "; the first call finds out whether through symmetric memory"
        if isinstance(found, str):
            return f"; by collectives, not symmetric memory: {found}"
        return "; tokens are read from, and sums written to, each other's memory"

    def forward_impl(
        self, ctx: OperationContext, input_: Tensor, probs: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The row map and the rows."""
        return self.scattered(ctx, self.choices(ctx, input_, probs, expert_ids))

    def scattered(self, ctx: OperationContext, choices: Choices) -> tuple[Tensor, ...]:
        """Copy tokens to rows; the rows and the extra outputs."""
        x, probs, ids, rows, capacity, of_group = choices
        groups, options = (ids, self.local_experts, capacity), (rows, self.scale_input)
        if isinstance(x, Tensor):
            permuted = moe.permute_rows(x, probs, *groups, *options, zero_tail=ctx.zero_tail)
            y, scales, *places = permuted
        else:
            places = [*moe.permutation(*groups)]
            arguments = places[0], probs, *options
            y, scales = scatter_received(x, *arguments, zero_tail=ctx.zero_tail)
        saved = (places[0], x, probs) if self.scale_input else places[:1]
        ctx.save_for_backward(*saved, *of_group[:1])
        return y, *self._extra_outputs(ctx, choices, scales, places)

    def gathered(self, ctx: OperationContext, choices: Choices) -> tuple[Any, ...]:
        """The outputs of :meth:`scattered`, with rows that are gathered later, not written."""
        x, probs, ids, rows, capacity, of_group = choices
        places = moe.permutation(ids, self.local_experts, capacity)
        ctx.save_for_backward(places[0], *of_group[:1])
        index, scales = moe.row_sources(places[0], probs, rows)
        gathered = GatheredRows(copy_received(x), index, self.recompute_rows)
        return gathered, *self._extra_outputs(ctx, choices, scales, places)

    def quantized(
        self, ctx: OperationContext, choices: Choices, fmt: NumberFormat
    ) -> tuple[Any, ...]:
        """The outputs of :meth:`scattered`, with rows quantized in ``fmt``; nothing is saved."""
        x, probs, ids, rows, capacity, _ = choices
        x = copy_received(x)
        given = x, probs, ids, self.local_experts, capacity, rows, fmt
        data, scale, moved, *places = moe.permute_rows_quantized(*given)
        quantized = QuantizedRows(row_matrix(data, scale, fmt), x.dtype)
        return quantized, *self._extra_outputs(ctx, choices, moved, places)

    def _extra_outputs(
        self, ctx: OperationContext, choices: Choices, scales: Tensor, places: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        row_map, split_sizes, ends = places
        # As the grouped ops that follow would compute them.
        ctx.memo[split_sizes] = choices.rows, ends
        if self.process_group is None:
            row_map = row_map.view(*ctx.shape[:-1], row_map.shape[1])
        middle = () if self.scale_input else (scales,)
        return split_sizes, *middle, row_map, *choices.of_group

    def choices(
        self, ctx: OperationContext, input_: Tensor, probs: Tensor | None, expert_ids: Tensor | None
    ) -> Choices:
        """The tokens of this process, or those that it receives, and their choices."""
        x: Tensor | PeerRows
        x, probs, ids = operands = self._operands(ctx, values(input_), probs, expert_ids)
        ctx.dtype, ctx.shape = probs.dtype, input_.shape
        rows = choices = ids.numel()
        of_group: tuple[Tensor, ...] = ()
        if self.process_group is not None:
            received, of_group = self._receive(ctx, *operands)
            x, probs, ids, _, _, rows, choices = received
            ids = ids - dist.get_rank(self.process_group) * self.local_experts
            if self.scale_input or self.recompute_rows:  # they are read again
                x = copy_received(x)
        capacity = self.capacity(choices)
        if capacity is not None:
            rows = min(rows, self.local_experts * capacity)
        return Choices(x, probs, ids, rows, capacity, of_group)

    def _receive(
        self, ctx: OperationContext, x: Tensor, probs: Tensor, ids: Tensor
    ) -> tuple[Received, tuple[Tensor, ...]]:
        """The tokens for the experts here, and the extra outputs of a group."""
        k = ids.shape[1]
        # Up to k processes most tokens have an expert on each of them: all then send the fewest
        # bytes, and nothing is read on the host.
        mode = self.send or ("all" if self.processes <= k else "tokens")
        # No expert, also where ids of 64 bits end in those of one.
        ids = ids.clamp(-1, self.num_experts)
        recipe = ctx.recipe if self.quantized_send else None
        sent_as, grads_as = wire_format(recipe, "input"), wire_format(recipe, "grad")
        agreed: dict[str, object] = {
            "num_experts": operator.index(self.num_experts),
            "k (choices of a token)": operator.index(k),
            "send": mode,  # may follow from these
            "features of a token": operator.index(x.shape[1]),
            "dtype of the input": x.dtype,
            "dtype of probs": probs.dtype,
            "scale_input": self.scale_input,
            "capacity_factor": self.capacity_factor and float(self.capacity_factor),
            "receive_factor": self.receive_factor and float(self.receive_factor),
            "format of tokens sent": sent_as and sent_as.reduction_blocks,
            "format of gradients sent": grads_as and grads_as.reduction_blocks,
            "symmetric_memory": self.symmetric_memory,
            "max_tokens": self.max_tokens,
            "requires_grad of (input, probs)": (ctx.needs.input, ctx.needs.extra_inputs[0]),
        }
        group, local = self.process_group, self.local_experts
        options = self.receive_factor, self.max_tokens, self.symmetric_memory, agreed
        digest = self._digest(tuple(agreed.values()))
        received = receive(x, probs, ids, Settings(group, mode, local, sent_as, *options, digest))
        exchange, sent_map = received.exchange, received.sent_map
        ctx.sent_as = None if sent_as is None else sent_as.name
        ctx.exchange, ctx.send, ctx.top_k, ctx.rows_dtype = exchange, mode, k, x.dtype
        ctx.device = x.device
        counts = ids.new_empty(0, dtype=torch.int64)
        if exchange.sent is not None:
            counts = torch.tensor((exchange.sent, exchange.received), dtype=torch.int64)
        _, load, _ = moe.permutation(ids, self.num_experts, None)
        sent_map = sent_map.view(*ctx.shape[:-1], sent_map.shape[1])
        return received, (sent_map, counts, load)

    @constant_when_traced
    def _digest(self, options: tuple[object, ...]) -> int:
        text = repr(options).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())

    def _operands(
        self, ctx: OperationContext, x: Tensor, probs: Tensor | None, ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Checked tokens ``[T, H]``, probabilities and ids ``[T, k]``."""
        check_dtype(x, "input", "Dispatch")
        integers = (torch.int64, torch.int32)
        tokens = x.shape[:-1]
        fits = ids is not None and ids.dtype in integers and ids.dim() == x.dim()
        if ids is None or not fits or ids.shape[:-1] != tokens or ids.shape[-1] == 0:
            sizes = "".join([f"{size}, " for size in tokens])
            raise ValueError(
                f"expert_ids of Dispatch must be int64 or int32 of shape ({sizes}k), for the "
                f"tokens of the input, got {described(ids)}"
            )
        if probs is None or not probs.is_floating_point() or probs.shape != ids.shape:
            raise ValueError(
                f"probs of Dispatch must be floating of the shape {tuple(ids.shape)} of "
                f"expert_ids, got {described(probs)}"
            )
        if not x.device == probs.device == ids.device:
            raise ValueError(
                f"input, probs and expert_ids of Dispatch must be on one device, got {x.device}, "
                f"{probs.device} and {ids.device}"
            )
        x = cast(x, autocast_to(x.dtype, ctx.autocast_dtype))
        k = ids.shape[-1]
        return x.reshape(-1, x.shape[-1]), probs.reshape(-1, k), ids.reshape(-1, k)

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, *grad_extra_outputs: Tensor | None
    ) -> OpGrads:
        """Each token's sum of its rows' gradients, and each choice's gradient of its weight."""
        return self.begin_backward(ctx, grad_output, *grad_extra_outputs)()

    def begin_backward(
        self, ctx: OperationContext, grad_output: Tensor, *grad_extra_outputs: Tensor | None
    ) -> Callable[[], OpGrads]:
        """Begin to return gradients to other processes; the result waits for theirs."""
        # No pop: in the tracer of torch 2.11 `others` is a tuple.
        row_map, *others = ctx.saved_tensors
        x, weights = others[:2] if self.scale_input else (None, None)
        dscales = None if self.scale_input else grad_extra_outputs[1]
        # A context that is made by hand has no needs of extra inputs.
        of_x, of_probs = ctx.needs.input, any(ctx.needs.extra_inputs[:1])
        rows, back = grad_output, None
        if self.process_group is not None:
            rows = unrounded(rows, row_map, weights)
            sizes = (rows.shape[1], rows.dtype), (row_map.shape[1], ctx.dtype)
            sent = [size for size, needed in zip(sizes, (of_x, of_probs), strict=True) if needed]
            back = ReturnExchange(ctx.exchange, *sent)
        given = rows, row_map, weights, dscales
        if back is not None and of_x:
            picked = back.sums(*given)
        else:
            dx, picked = moe.gather_sum(*given)
        dprobs = None if dscales is None else picked  # dscales by choice
        if x is not None and of_probs:
            dprobs = cast(moe.row_dots(grad_output, x, row_map, False), ctx.dtype)
        if back is None:
            if dprobs is not None:
                dprobs = dprobs.view(*ctx.shape[:-1], row_map.shape[1])
            return lambda: (dx.view(ctx.shape), dprobs, None)
        if of_probs:  # all processes send some: zeros where there are none
            if dprobs is None:
                dprobs = row_map.new_zeros(row_map.shape, dtype=ctx.dtype)
            back.rows(cast(dprobs, ctx.dtype))
        sent_map = others[-1]
        return lambda: self._returned(ctx, back, sent_map.reshape(-1, sent_map.shape[-1]))

    @staticmethod
    def _returned(ctx: OperationContext, back: ReturnExchange, copies: Tensor) -> OpGrads:
        """The gradients of this process's tokens, of what all processes have returned."""
        returned, dx, dprobs = back.finish(), None, None
        if ctx.needs.input:
            dx = cast(sum_copies(returned[0], copies), ctx.rows_dtype).view(ctx.shape)
        if ctx.needs.extra_inputs[0]:
            of_probs = returned[-1]
            if ctx.send == "rows":
                _, dprobs = moe.gather_sum(of_probs, copies, None, of_probs.flatten())
            else:
                dprobs = sum_copies(of_probs, copies)
            dprobs = dprobs.view(*ctx.shape[:-1], ctx.top_k)
        back.end()
        return dx, dprobs, None


def _check_factor(name: str, factor: float | None) -> None:
    """Raise ValueError unless a factor of a Dispatch is positive and finite, or None."""
    if factor is None:
        return
    check_numbers("Dispatch", **{name: factor})
    if not 0 < factor < math.inf:
        raise ValueError(
            f"{name} of Dispatch must be positive and finite, or None for no limit, got {factor}"
        )


class Combine(_OverGroup):
    """Each token's sum of its rows, ``[..., H]``, from rows ``[rows, H]`` and their row map.

    Extra inputs, which a :class:`Dispatch` of the run gives by name: ``row_map``, int32
    ``[..., k]``; with ``weighted`` also ``scales`` ``[rows]``, which multiply the rows. Sums are
    taken in FP32 in the order of a token's choices; a token without a row gets zeros. In the
    backward every row gets its token's gradient, rows of the tail zeros.

    Over a ``process_group`` the rows are those of all processes' tokens for the experts here, and
    ``sent_map`` and ``sent_counts`` of the :class:`Dispatch`, which follow ``row_map``, say whose
    they are: sums return to the processes of the tokens, which add them in FP32 in order of rank
    (with ``send="rows"`` in order of the choices).

    Saves ``(row_map,)``, and if weighted ``(row_map, rows, scales)``; over a group then
    ``sent_map``.

    Args:
        weighted: multiply the rows by ``scales``. Leave it off where something before did, as
            :class:`ScaledSwiGLU` does.
        process_group: that of the :class:`Dispatch`.
        quantized_send: as of the :class:`Dispatch`: gradients of sums are sent quantized.
        symmetric_memory: as of the :class:`Dispatch`.

    Raises:
        ValueError: in a call, the input is not ``[rows, H]`` with at most as many rows as choices,
            or ``row_map`` or ``scales`` are not what a :class:`Dispatch` gives; the group,
            ``quantized_send`` or ``symmetric_memory`` is not that of the :class:`Dispatch`.
        RuntimeError: ``torch.distributed`` is not initialized; in a call, another process fails.
    """

    extra_input_names: tuple[str, ...]  # type: ignore[misc]
    fact_names = ("weighted", "processes")
    saves = "row map; if weighted rows, scales; over a group sent map"

    def __init__(
        self,
        weighted: bool = False,
        *,
        process_group: Any = None,
        quantized_send: bool = False,
        symmetric_memory: bool = True,
    ) -> None:
        check_bools("Combine", weighted=weighted)
        of_group = () if process_group is None else ("sent_map", "sent_counts")
        self.extra_input_names = ("row_map", *of_group, *(("scales",) if weighted else ()))
        self.num_extra_inputs = len(self.extra_input_names)
        super().__init__(process_group, quantized_send, symmetric_memory)
        self.weighted = weighted

    def check_producer(self, slot: int, producer: Any) -> None:
        """Refuse the row map of a Dispatch over another group, or that sends otherwise."""
        if not isinstance(producer, Dispatch):
            return
        for name in ("process_group", "quantized_send", "symmetric_memory"):
            own, given = getattr(self, name), getattr(producer, name)
            if own is not given:
                if name == "process_group":
                    own = f"one of {self.processes} processes"
                    given = f"one of {producer.processes}, or another group of as many"
                raise ValueError(
                    f"{name} of Combine must be that of the Dispatch whose rows it sums, got "
                    f"{own} and {given}"
                )

    def forward_impl(
        self, ctx: OperationContext, input_: Tensor, row_map: Tensor | None, *others: Tensor | None
    ) -> Tensor:
        """One sum over each token's choices."""
        rows = values(input_)
        row_map = self._check(rows, row_map)
        scales = check_row_scales(others[-1], rows, "Combine") if self.weighted else None
        flat = row_map.reshape(-1, row_map.shape[-1])
        ctx.num_rows, ctx.rows_dtype = rows.shape[0], rows.dtype
        saved = (flat, rows, scales) if self.weighted else (flat,)
        if self.process_group is None:
            y, _ = moe.gather_sum(rows, flat, scales, None, reads_ahead=ctx.reads_ahead)
            ctx.save_for_backward(*saved)
            return y.view(*row_map.shape[:-1], rows.shape[1])
        ctx.exchange, sent_map = self._exchange(flat, *others[:2])
        ctx.save_for_backward(*saved, sent_map)
        copies = sent_map.reshape(-1, sent_map.shape[-1])
        shape = *sent_map.shape[:-1], rows.shape[1]
        wide = unrounded(rows, flat, scales)
        back = ReturnExchange(ctx.exchange, (wide.shape[1], wide.dtype))
        back.sums(wide, flat, scales, None)

        def sums() -> Tensor:
            (returned,) = back.finish()
            y = cast(sum_copies(returned, copies), ctx.rows_dtype).view(shape)
            back.end()
            return y

        return defer(ctx, rows.new_empty(shape), sums) if ctx.deferred else sums()

    @property
    def communicates(self) -> bool:
        """Whether tokens are exchanged between processes."""
        return self.process_group is not None

    def begin_sending(self, ctxs: Sequence[OperationContext], grad_output: Tensor) -> None:
        """Begin to send the gradients of the sums."""
        (ctx,) = ctxs
        ctx.begun = self.begin_token_grads(ctx, grad_output, ctx.saved_tensors[-1])

    def begin_token_grads(
        self, ctx: OperationContext, grad_output: Tensor, sent_map: Tensor
    ) -> Callable[[], Tensor | PeerRows]:
        """Begin to send; returns what :meth:`token_grads` waits for, if it is ``ctx.begun``."""
        dy = cast(grad_output.reshape(-1, grad_output.shape[-1]), ctx.rows_dtype)
        copies = sent_map.reshape(-1, sent_map.shape[-1])
        sent_as = wire_format(ctx.recipe, "grad") if self.quantized_send else None
        return begin_send_as(dy, sent_as, copies, ctx.exchange)

    def _exchange(
        self, row_map: Tensor, sent_map: Tensor | None, counts: Tensor | None
    ) -> tuple[Exchange, Tensor]:
        """The exchange of the Dispatch, from its outputs, and the sent map."""
        if sent_map is None or sent_map.dtype != torch.int32 or sent_map.dim() == 0:
            raise _not_of_dispatch("sent_map", "int32 of shape (..., c)", sent_map)
        if counts is None or counts.dtype != torch.int64 or (counts.is_cuda and counts.numel()):
            raise _not_of_dispatch("sent_counts", "int64 on the host", counts)
        group, tokens = self.process_group, row_map.shape[0]
        if not counts.numel():
            memory = peer_memory(group, sent_map.device) if self.symmetric_memory else None
            padded = tokens // self.processes
            return Exchange("Combine", group, None, None, padded, memory), sent_map
        if isinstance(counts, FakeTensor):
            sent = received = balanced_sizes(tokens, group)
        else:
            sent, received = map(tuple, counts.tolist())
        return Exchange("Combine", group, sent, received, 0), sent_map

    @staticmethod
    def _check(rows: Tensor, row_map: Tensor | None) -> Tensor:
        check_dtype(rows, "input", "Combine")
        fits = row_map is not None and row_map.device == rows.device and row_map.dim() > 0
        if row_map is None or not fits or row_map.dtype != torch.int32:
            must_be = f"int32 of shape (..., k) on {rows.device}"
            raise _not_of_dispatch("row_map", must_be, row_map)
        # A comparison of symbolic sizes would be a guard, which export refuses. (Dynamo of torch
        # 2.11 takes `is_exporting()` for True in all traced code.)
        exporting = torch.compiler._is_exporting_flag
        fits = exporting or rows.shape[0] <= row_map.numel()
        if rows.dim() != 2 or not fits:
            raise ValueError(
                f"input of Combine must be rows of shape (rows, H), at most the {row_map.numel()} "
                f"choices of row_map, got {tuple(rows.shape)}"
            )
        return row_map

    def token_grads(
        self, ctx: OperationContext, grad_output: Tensor, sent_map: Tensor | None
    ) -> Tensor | PeerRows:
        """The gradients ``[R, H]`` of the sums here: the output's, from the tokens' processes."""
        if sent_map is None:
            return grad_output.reshape(-1, grad_output.shape[-1])
        begun = getattr(ctx, "begun", None) or self.begin_token_grads(ctx, grad_output, sent_map)
        ctx.begun = None  # it keeps what is sent
        return begun()

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Each row's gradient is its token's; that of its weight, a dot product."""
        row_map, *others = ctx.saved_tensors  # no pop, as in Dispatch
        sent_map = None if self.process_group is None else others[-1]
        dy = self.token_grads(ctx, grad_output, sent_map)
        scales = others[1] if self.weighted else None
        drows = None
        extra: list[Tensor | None] = [None] * self.num_extra_inputs
        if scales is not None or not ctx.needs.input:  # others read it than the copy to rows
            dy = copy_received(dy)
        if ctx.needs.input:
            arguments = row_map, scales, ctx.num_rows, self.weighted
            drows, _ = scatter_received(dy, *arguments, zero_tail=ctx.zero_tail)
        if scales is not None and ctx.needs.extra_inputs[-1]:
            rows = others[0]
            dscales = moe.row_dots(rows, cast(copy_received(dy), rows.dtype), row_map, True)
            extra[-1] = cast(dscales, scales.dtype)
        return drows, *extra


def _not_of_dispatch(name: str, must_be: str, got: Tensor | None) -> ValueError:
    return ValueError(
        f"{name} of Combine must be {must_be}, as Dispatch gives it, got {described(got)}"
    )
