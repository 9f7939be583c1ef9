"""Tokens to the processes whose experts they were routed to, and partial results back.

Two linear functions, each the other's adjoint: :func:`begin_send` copies a process's tokens to
those that need them; :class:`ReturnExchange` returns what these made of the copies, and
:func:`sum_copies` sums it. Both use the sent map, int32 ``[T, c]``, a row map as of
:mod:`fusible.kernels.moe.definitions`: the place in the buffer sent of each of a token's c copies,
or the complement of a place past its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusible.formulas import math_dtype
from fusible.kernels import moe
from fusible.kernels.moe import cuda as moe_kernels
from fusible.kernels.moe.cuda import PeerRows
from fusible.ops.collectives import all_gather, begin_all_gather
from fusible.ops.peer_memory import PeerMemory, aligned_bytes, all_said, reserve
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import QuantizedMatrix
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_matrix
from fusible.recipes.recipe import Role

Send = Literal["rows", "tokens", "all"]
SENT: dict[Send, str] = {
    "rows": "a token for each of its choices, and each row back; reads sizes on the host (on CUDA "
    "a synchronisation)",
    "tokens": "a token to each process that has an expert of it, and partial sums back; reads "
    "sizes on the host (on CUDA a synchronisation)",
    "all": "every token to every process, and partial sums back; reads nothing on the host of CUDA",
}
"""A description of each mode, for ``explain``."""


class Exchange(NamedTuple):
    """The sizes of one exchange, which its forward and its backward share."""

    op_name: str
    group: Any
    sent: tuple[int, ...] | None
    """Copies sent to each process; None where every process gets all tokens."""
    received: tuple[int, ...] | None
    padded: int
    """The most tokens of a process, to which others are padded where all tokens are sent."""
    memory: PeerMemory | None = None
    """The symmetric memory through which all tokens are sent; None for collectives."""


Routed = tuple[Exchange, Tensor, int, int]
"""The last fields of :class:`Received`."""


class Received(NamedTuple):
    """Tokens ``[R, H]`` of all processes that this one needs, with weights and ids ``[R, k]``."""

    x: Tensor | PeerRows
    probs: Tensor
    ids: Tensor
    exchange: Exchange
    sent_map: Tensor
    rows: int
    """At least the rows that the experts here get: exact where sizes are read on the host."""
    choices: int
    """The choices of all processes."""


def communicate(op_name: str, group: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; an error of ``torch.distributed`` names the op and the group's size."""
    if torch.compiler.is_compiling():
        return function(*args)
    try:
        return function(*args)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # of this process's device
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{op_name} over {dist.get_world_size(group)} processes: another process failed, left "
            f"or did not answer within the group's timeout; torch.distributed says: {error}"
        ) from error


def _bytes(t: Tensor) -> Tensor:
    """``[T, n]`` as bytes; flat while sent, since strides of an empty tensor may be any."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    return flat.view(t.shape[0], t.shape[1] * t.element_size())


def _packed(*parts: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Matrices ``[T, n]`` side by side as bytes ``[T, bytes]``, and a function that undoes this.

    It divides bytes ``[R, bytes]`` into matrices in memory of their own: parts of a single row are
    contiguous as they lie, but may begin where no such number may.
    """
    of_parts = [_bytes(part) for part in parts]
    widths, dtypes = [part.shape[1] for part in of_parts], [part.dtype for part in parts]

    def unpack(message: Tensor) -> list[Tensor]:
        own = [p.clone(memory_format=torch.contiguous_format) for p in message.split(widths, 1)]
        return [part.view(dtype) for part, dtype in zip(own, dtypes, strict=True)]

    return torch.cat(of_parts, 1), unpack


def _all_to_all(t: Tensor, group: Any, sent: Any, received: Any, begin: bool) -> tuple[Tensor, Any]:
    """The rows that all processes have for this one, in order of rank; None: equal parts.

    And what to wait for, with ``begin``.
    """
    out = t.new_empty(t.shape[0] if received is None else sum(received), *t.shape[1:])
    into, given = _bytes(out), _bytes(t)
    return out, dist.all_to_all_single(into, given, received, sent, group=group, async_op=begin)


def begin_send(x: Tensor, sent_map: Tensor, exchange: Exchange) -> Callable[[], Tensor]:
    """Begin to send copies of the tokens ``x`` ``[T, n]`` of all processes to those that need them.

    Returns a function that waits for the tokens of this process and gives them, ``[R, n]``, in
    order of rank, then of token. Where all are sent, padding tokens are zero.
    """
    dtype = x.dtype
    if exchange.sent is not None:
        copies, _ = moe.scatter_rows(x, sent_map, None, sum(exchange.sent), False)
        return _begun(exchange, _all_to_all, copies, exchange.sent, exchange.received)
    if exchange.padded != x.shape[0]:
        x = torch.cat((x, x.new_zeros(exchange.padded - x.shape[0], x.shape[1])))
    wait = _begun(exchange, begin_all_gather, _bytes(x))
    return lambda: wait().view(dtype)


def _begun(
    exchange: Exchange, function: Callable[..., Any], sent: Tensor, *args: Any
) -> Callable[[], Tensor]:
    """Begin an exchange; return a function that waits for its result.

    In a graph that is traced nothing is left to wait for, whatever torch's function returns there
    (2.11: the tensor).
    """
    (op_name, group, *_), begin = exchange, not torch.compiler.is_compiling()
    out, work = communicate(op_name, group, function, sent, group, *args, begin)

    def finish(kept: Tensor = sent) -> Tensor:  # which is read until then
        if begin and work is not None:
            communicate(op_name, group, work.wait)
        return out

    return finish


def wire_format(recipe: Any, role: Role) -> NumberFormat | None:
    """The format in which rows can be sent: that of ``recipe``, where scales are of parts of a row.

    None where a backward is to read what was not quantized.
    """
    fmt = None if recipe is None or recipe.backward_override else recipe.format(role)
    return fmt if fmt and fmt.directional and not fmt.has_tensor_scale else None


def begin_send_as(
    x: Tensor, fmt: NumberFormat | None, sent_map: Tensor, exchange: Exchange
) -> Callable[[], Tensor | PeerRows]:
    """:func:`begin_send` of ``x``, quantized row-wise unless ``fmt`` is None.

    Returns a function that waits for the copies and gives them, as values in the dtype of ``x``.
    """
    if fmt is None:
        placed = _begin_placing(exchange.memory, [(x, exchange.padded)])
        if placed is None:
            return begin_send(x, sent_map, exchange)
        return lambda: placed()[0]
    row, _ = quantize_matrix(x, fmt, rowwise=True, columnwise=False)
    assert row is not None
    (message, unpack), dtype = _packed(row.data, row.scale), x.dtype
    wait = begin_send(message, sent_map, exchange)

    def finish() -> Tensor:
        data, scale = unpack(wait())
        return dequantize_matrix(QuantizedMatrix(data, scale, None, fmt), dtype)

    return finish


def _begin_placing(
    memory: PeerMemory | None, given: Sequence[tuple[Tensor, int]]
) -> Callable[[], list[PeerRows]] | None:
    """Begin an exchange in which every process reads tensors ``[T, n]`` of all, padded to rows.

    Returns a function that waits for all processes and gives the tensors; None if the memory cannot
    hold them now.
    """
    sizes = [aligned_bytes(rows * t.shape[1] * t.element_size()) for t, rows in given]
    if memory is None or not memory.begin(sum(sizes)):
        return None
    placed = []
    for t, rows in given:
        part = memory.rows((rows, t.shape[1]), t.dtype)
        own = part.parts[part.rank]
        own[: t.shape[0]].copy_(t[:rows])
        own[t.shape[0] :].zero_()
        placed.append(part)

    def finish() -> list[PeerRows]:
        memory.ready()
        return placed

    return finish


def scatter_received(
    x: Tensor | PeerRows,
    row_map: Tensor,
    weights: Tensor | None,
    rows: int,
    scale: bool,
    *,
    zero_tail: bool,
) -> tuple[Tensor, Tensor]:
    """``moe.scatter_rows`` of tokens that :func:`begin_send_as` gave, the last read of them."""
    arguments = row_map, weights, rows, scale
    if isinstance(x, Tensor):
        return moe.scatter_rows(x, *arguments, zero_tail=zero_tail)
    scattered: Any = NotImplemented
    if x.table:
        scattered = moe_kernels.scatter_rows(x, *arguments, zero_tail=zero_tail)
    if scattered is NotImplemented:
        scattered = moe.scatter_rows(x.copied(), *arguments, zero_tail=zero_tail)
    x.end()
    return scattered


def copy_received(x: Tensor | PeerRows) -> Tensor:
    """Tokens that :func:`begin_send_as` gave, as a tensor, the last read of them."""
    if isinstance(x, Tensor):
        return x
    copied = x.copied()
    x.end()
    return copied


class ReturnExchange:
    """Sends what a process made of the copies that it received back to where they came from.

    After :meth:`sums` and :meth:`rows`, :meth:`finish` waits for what all processes made of this
    one's copies, in the order in which these were sent, and :meth:`end` follows its last read.

    Args:
        exchange: that brought the copies.
        matrices: features and dtype of each matrix ``[R, features]`` that goes back.
    """

    def __init__(self, exchange: Exchange, *matrices: tuple[int, torch.dtype]) -> None:
        self._exchange = exchange
        memory = exchange.memory
        if memory is not None:
            rows = memory.processes * exchange.padded
            sizes = [aligned_bytes(rows * n * dtype.itemsize) for n, dtype in matrices]
            memory = memory if memory.begin(sum(sizes)) else None
        self._memory = memory
        self._returned: list[Callable[[], Tensor]] = []

    def sums(
        self, rows: Tensor, row_map: Tensor, weights: Tensor | None, values: Tensor | None
    ) -> Tensor:
        """Return each copy's sum of its rows; and give ``values`` by choice: ``moe.gather_sum``."""
        given = rows, row_map, weights, values
        if self._memory is None:
            sums, picked = moe.gather_sum(*given)
            self.rows(sums)
            return picked
        out = self._slots(rows.shape[1], rows.dtype)
        result = moe_kernels.gather_sum(*given, out) if out.table else NotImplemented
        if result is NotImplemented:
            result = moe.gather_sum(*given)
            out.copy_(result[0])
        return result[1]

    def rows(self, partial: Tensor) -> None:
        """Return ``[R, n]``, one row for each copy."""
        if self._memory is not None:
            self._slots(partial.shape[1], partial.dtype).copy_(partial)
            return
        exchange = self._exchange
        given = partial, exchange.received, exchange.sent
        self._returned.append(_begun(exchange, _all_to_all, *given))

    def _slots(self, features: int, dtype: torch.dtype) -> PeerRows:
        assert self._memory is not None
        out, own = self._memory.slots((self._exchange.padded, features), dtype)
        self._returned.append(lambda: own)
        return out

    def finish(self) -> list[Tensor]:
        """Wait; returns what came back, in the order of the calls."""
        if self._memory is not None:
            self._memory.ready()
        return [wait() for wait in self._returned]

    def end(self) -> None:
        """Release the memory that was received into, after the last read."""
        if self._memory is not None:
            self._memory.end()


def unrounded(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted rows of one choice in FP32 (FP64), in which their sums over processes are taken."""
    if weights is None or row_map.shape[1] > 1:
        return rows
    return rows.to(math_dtype(rows.dtype))


def sum_copies(back: Tensor, sent_map: Tensor) -> Tensor:
    """Each token's sum ``[T, n]`` of what was made of its copies, as it came back.

    Sums are taken in FP32 (FP64) in the order of the sent map's columns and rounded once.
    """
    return moe.gather_sum(back, sent_map, None, None)[0]


def send_choices(
    ids: Tensor, probs: Tensor, sent_map: Tensor, exchange: Exchange, per_choice: bool
) -> tuple[Tensor, Tensor]:
    """The expert ids and weights of the tokens that :func:`begin_send` gives, ``[R, k]``.

    ``per_choice``: one copy was sent for each choice, so k is 1. Ids of padding tokens are -1.
    """
    if per_choice:
        ids, probs, sent_map = (t.reshape(-1, 1) for t in (ids, probs, sent_map))
    # One message; ids from 1, so that zeros are no expert.
    message, unpack = _packed(ids.int() + 1, probs)
    ids, probs = unpack(begin_send(message, sent_map, exchange)())
    return ids - 1, probs


def balanced_sizes(copies: int, group: Any) -> tuple[int, ...]:
    """An even split of ``copies`` among the processes."""
    processes = dist.get_world_size(group)
    return tuple((copies + i) // processes for i in range(processes))


class Settings(NamedTuple):
    """How tokens are sent, as the arguments of a ``Dispatch`` say."""

    group: Any
    mode: Send
    local: int
    """Experts of a process."""
    sent_as: NumberFormat | None
    """See :func:`begin_send_as`."""
    receive_factor: float | None
    max_tokens: int | None
    symmetric_memory: bool
    agreed: dict[str, object]
    """By name, the options on which all processes must agree."""
    digest: int
    """A number of these, under 2^56."""

    @property
    def processes(self) -> int:
        """The number of processes in the group."""
        return dist.get_world_size(self.group)


def receive(x: Tensor, probs: Tensor, ids: Tensor, settings: Settings) -> Received:
    """Send the tokens ``x`` ``[T, H]`` to their experts, and receive those for the experts here.

    ``probs`` are the weights of their choices, ``[T, k]``, and ``ids`` the experts, ``[T, k]``, -1
    or the number of all experts for none.

    Raises:
        ValueError: processes disagree about an option, experts get more rows than the bound, or
            a process has more tokens than ``max_tokens``, on all processes alike.
        RuntimeError: a process fails; a mode that reads sizes on the host is compiled.
    """
    mode, compiling = settings.mode, torch.compiler.is_compiling()
    if isinstance(ids, FakeTensor) and not compiling:
        routed = _balanced(ids, settings)
    elif mode == "all" and not _reads_sizes(ids.device):
        return _receive_all(x, probs, ids, settings)
    elif compiling:
        raise RuntimeError(
            f'send of Dispatch must be "all" where torch.compile traces it, got "{mode}", whose '
            "sizes the host reads"
        )
    else:
        routed = _route_copies(ids, settings)
    exchange, sent_map, *_ = routed
    received = begin_send_as(x, settings.sent_as, sent_map, exchange)()
    ids, probs = send_choices(ids, probs, sent_map, exchange, mode == "rows")
    return Received(received, probs, ids, *routed)


def _reads_sizes(device: torch.device) -> bool:
    """Whether the host reads sizes even with ``send="all"``: on a CPU it need not wait."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def _balanced(ids: Tensor, settings: Settings) -> Routed:
    """The result of :func:`_route_copies` for equal token counts and balanced choices.

    For fake tensors, which have no values.
    """
    group, processes, (tokens, k) = settings.group, settings.processes, ids.shape
    width = k if settings.mode == "rows" else processes
    if settings.mode == "all":
        exchange = Exchange("Dispatch", group, None, None, settings.max_tokens or tokens)
        rows = processes * exchange.padded * min(k, settings.local)
    else:
        sizes = balanced_sizes(tokens * min(k, width), group)
        exchange, rows = Exchange("Dispatch", group, sizes, sizes, 0), tokens * k
    sent_map = ids.new_empty(tokens, width, dtype=torch.int32)
    return exchange, sent_map, rows, k * tokens * processes


def _route_copies(ids: Tensor, settings: Settings) -> Routed:
    """Agree with the group on an exchange whose sizes the host reads.

    One all-gather of a few integers: the digest of the options, on which processes must agree, the
    number of tokens, and the copies and choices for each process.
    """
    group, mode, processes = settings.group, settings.mode, settings.processes
    (tokens, _), device = ids.shape, ids.device
    ranks = torch.arange(processes, device=device)
    owner = ids.long().div(settings.local, rounding_mode="floor")
    _, choices, _ = moe.permutation(owner, processes, None)
    copies, sent_map = torch.zeros_like(ranks), torch.empty(0)
    if mode == "tokens":
        to = torch.where((owner[:, :, None] == ranks).any(1), ranks, processes)
        sent_map, copies, _ = moe.permutation(to, processes, None)
    elif mode == "rows":
        sent_map, copies, _ = moe.permutation(owner, processes, None)
    header = torch.tensor((settings.digest, tokens), dtype=torch.int64, device=device)
    own = torch.cat((header, copies, choices))
    table = communicate("Dispatch", group, all_gather, own[None], group)
    return _read_sizes(table, sent_map, ids.shape[1], settings)


def _receive_all(x: Tensor, probs: Tensor, ids: Tensor, settings: Settings) -> Received:
    """:func:`receive` the tokens of all processes; only the device checks what these said."""
    group, local, max_tokens = settings.group, settings.local, settings.max_tokens
    processes, (tokens, k) = settings.processes, ids.shape
    padded = max_tokens or tokens
    memory = _memory_for(x, probs, padded, settings)
    exchange = Exchange("Dispatch", group, None, None, padded, memory)
    # No copy from the host, which a CUDA graph would repeat.
    numbers = settings.digest, tokens
    header = torch.cat([ids.new_full((1, 1), n, dtype=torch.int64) for n in numbers], 1)
    sent_map = _all_sent(tokens, padded, processes, ids.device)
    coded = (ids + 1).int()  # so that zeros, which pad, are no expert
    sent = (header, 1), (coded, padded), (probs, padded), (x, padded)
    placed = None if settings.sent_as else _begin_placing(memory, sent)
    received: Tensor | PeerRows
    if placed is not None:
        headers, *of_choices, received = placed()
        _check_processes_agree(headers.copied(), tokens, max_tokens)
        ids, probs = of_choices[0].copied() - 1, of_choices[1].copied()
    else:
        table = communicate("Dispatch", group, all_gather, header, group)
        _check_processes_agree(table, tokens, max_tokens)
        by_group = exchange._replace(memory=None)
        received = begin_send_as(x, settings.sent_as, sent_map, by_group)()
        ids, probs = send_choices(ids, probs, sent_map, by_group, False)
    rows = processes * padded * min(k, local)
    if settings.receive_factor is not None:
        bound = math.ceil(settings.receive_factor * padded * k)
        _, choices, _ = moe.permutation(ids.div(local, rounding_mode="floor"), processes, None)
        fits = choices.max() <= bound
        torch._assert_async(fits, "more rows than receive_factor of Dispatch allows")
        rows = min(rows, bound)
    return Received(received, probs, ids, exchange, sent_map, rows, k * padded * processes)


def _memory_for(x: Tensor, probs: Tensor, padded: int, settings: Settings) -> PeerMemory | None:
    """The memory for the exchanges of tokens."""
    group, processes, device = settings.group, settings.processes, x.device
    if device.type != "cuda" or processes == 1 or not settings.symmetric_memory:
        return None
    # The largest exchange is that of gradients, of all processes' tokens and weights; or, where
    # there are none, that of headers.
    of_x = max(x.element_size(), 4) if probs.shape[1] == 1 else x.element_size()  # see unrounded
    widths = x.shape[1] * of_x, probs.shape[1] * max(probs.element_size(), 4)
    nbytes = sum(aligned_bytes(max(processes * padded, 1) * width) for width in widths)
    found = communicate("Dispatch", group, reserve, group, device, nbytes)
    return found if isinstance(found, PeerMemory) else None


def _check_processes_agree(table: Tensor, tokens: int, max_tokens: int | None) -> None:
    """Check on the device that processes agree.

    ``table`` has, of each process, a digest of its options and the number of its tokens. A process
    that has too many tokens raises only now, when the others know it.
    """
    same = table == table[:1]
    if max_tokens is not None:
        if tokens > max_tokens:
            raise ValueError(_too_many(tokens, max_tokens))
        same = torch.stack((same[:, 0], table[:, 1] <= max_tokens))
    torch._assert_async(same.all(), "processes disagree about Dispatch's options or token counts")


def _too_many(tokens: int, max_tokens: int) -> str:
    return f"a process must have at most max_tokens of Dispatch, {max_tokens} tokens, got {tokens}"


def _all_sent(tokens: int, padded: int, processes: int, device: torch.device) -> Tensor:
    """The sent map of tokens that all processes get."""
    places = torch.arange(processes * padded, dtype=torch.int32, device=device)
    return places.view(processes, padded)[:, :tokens].t().contiguous()


def _read_sizes(table: Tensor, sent_map: Tensor, k: int, settings: Settings) -> Routed:
    """The exchange, from the gathered table of all processes, read on the host."""
    group, receive_factor, max_tokens = settings.group, settings.receive_factor, settings.max_tokens
    processes, rank = table.shape[0], dist.get_rank(group)
    digests, tokens, *counts = zip(*table.tolist(), strict=True)
    if len(set(digests)) > 1:
        _refuse_disagreement(settings)
    copies, rows = counts[:processes], [sum(of) for of in counts[processes:]]
    if max_tokens is not None and max(tokens) > max_tokens:
        raise ValueError(_too_many(max(tokens), max_tokens))
    if receive_factor is not None:
        most = k * (max_tokens or max(tokens))
        bound = math.ceil(receive_factor * most)
        if max(rows) > bound:
            raise ValueError(
                f"the experts of a process must get at most {bound} rows (receive_factor of "
                f"Dispatch, {receive_factor}, times the {most} choices of a process), "
                f"got {max(rows)}; raise receive_factor, or leave it out for no bound"
            )
    if settings.mode == "all":
        padded = max(tokens)
        sent_map = _all_sent(tokens[rank], padded, processes, table.device)
        exchange = Exchange("Dispatch", group, None, None, padded)
    else:
        sent = tuple(of[rank] for of in copies)
        exchange = Exchange("Dispatch", group, sent, copies[rank], 0)
    return exchange, sent_map, rows[rank], k * sum(tokens)


def _refuse_disagreement(settings: Settings) -> None:
    """Raise ValueError, on all processes, for an option that is not the same on all."""
    given = list(settings.agreed.values())
    of_ranks = communicate("Dispatch", settings.group, all_said, settings.group, given)
    for name, *values in zip(settings.agreed, *of_ranks, strict=True):
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{name} of Dispatch must be the same on all {len(values)} processes of its "
                f"group, got {values} in order of rank"
            )
