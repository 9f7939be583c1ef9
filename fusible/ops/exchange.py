"""Tokens to the processes whose experts they were routed to, and partial results back.

Two linear functions, each the other's adjoint: :func:`send` copies a process's tokens to those that
need them; :func:`begin_return` returns what these made of the copies, which :func:`sum_copies`
sums. What connects them is
the sent map, int32 ``[T, c]``, a row map as of :mod:`fusible.kernels.moe.definitions`: the place in
the buffer sent of each of a token's c copies, or the complement of a place past its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusible.kernels import moe
from fusible.ops.collectives import all_gather, begin_all_gather
from fusible.recipes.formats import ELEMENTS, SCALE_DTYPES, NumberFormat
from fusible.recipes.matrix import QuantizedMatrix
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_matrix
from fusible.recipes.recipe import Role

Send = Literal["rows", "tokens", "all"]
SEND: tuple[Send, ...] = ("rows", "tokens", "all")
SENT = {
    "rows": "a token for each of its choices, and each row back; reads sizes on the host (on CUDA "
    "a synchronisation)",
    "tokens": "a token to each process that has an expert of it, and partial sums back; reads "
    "sizes on the host (on CUDA a synchronisation)",
    "all": "every token to every process, and partial sums back; reads nothing on the host of CUDA",
}
"""What ``explain`` says of each."""


class AgreedOption(NamedTuple):
    """What must be the same on all processes: as an integer, and how that reads."""

    number: int
    shown: Callable[[int], object] = int


class Exchange(NamedTuple):
    """The sizes of one exchange, which its forward and its backward share."""

    group: Any
    sent: tuple[int, ...] | None
    """Copies sent to each process; None where every process gets all tokens."""
    received: tuple[int, ...] | None
    padded: int
    """The most tokens of a process, to which others are padded where all tokens are sent."""


class Routed(NamedTuple):
    """What :func:`route_copies` finds."""

    exchange: Exchange
    sent_map: Tensor
    rows: int
    """At least the rows that the experts here get: exact where sizes are read on the host."""
    choices: int
    """The choices of all processes."""


def resolve_group(group: Any) -> Any:
    """The process group of a one-dimensional ``DeviceMesh``; a process group as it is."""
    return group.get_group() if hasattr(group, "get_group") else group


def default_send(processes: int, top_k: int) -> Send:
    """The mode that sends the fewest bytes without a host synchronisation, or with one.

    Up to ``top_k`` processes most tokens have an expert on each of them.
    """
    return "all" if processes <= top_k else "tokens"


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
    """``[T, n]`` as bytes; flat on the way, since strides of an empty tensor may be any."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    return flat.view(t.shape[0], t.shape[1] * t.element_size())


def _all_to_all(
    t: Tensor,
    group: Any,
    sent: Sequence[int] | None,
    received: Sequence[int] | None,
    begin: bool = False,
) -> tuple[Tensor, Any]:
    """The rows that all processes have for this one, in order of rank; None: equal parts.

    And what to wait for, with ``begin``.
    """
    out = t.new_empty(t.shape[0] if received is None else sum(received), *t.shape[1:])
    of_out = None if received is None else list(received)
    of_in = None if sent is None else list(sent)
    work = dist.all_to_all_single(
        _bytes(out), _bytes(t), of_out, of_in, group=group, async_op=begin
    )
    return out, work


def send(x: Tensor, sent_map: Tensor, exchange: Exchange, op_name: str) -> Tensor:
    """Copies of the tokens ``x`` ``[T, n]`` of all processes that this one needs, ``[R, n]``.

    In order of rank, then of token. Where all are sent, tokens that pad are zero.
    """
    return begin_send(x, sent_map, exchange, op_name)()


def begin_send(
    x: Tensor, sent_map: Tensor, exchange: Exchange, op_name: str
) -> Callable[[], Tensor]:
    """Begin to :func:`send`; what comes back waits for the copies."""
    group, dtype = exchange.group, x.dtype
    if exchange.sent is not None:
        copies, _ = moe.scatter_rows(x, sent_map, None, sum(exchange.sent), False)
        return _begun(op_name, group, _all_to_all, copies, group, exchange.sent, exchange.received)
    if exchange.padded != x.shape[0]:
        x = torch.cat((x, x.new_zeros(exchange.padded - x.shape[0], x.shape[1])))
    wait = _begun(op_name, group, begin_all_gather, _bytes(x), group)
    return lambda: wait().view(dtype)


def _begun(
    op_name: str, group: Any, function: Callable[..., Any], sent: Tensor, *args: Any
) -> Callable[[], Tensor]:
    """Begin an exchange; what comes back waits for its result.

    In a graph that is traced nothing is left to wait for, whatever torch's function returns there
    (2.11: the tensor).
    """
    begin = not torch.compiler.is_compiling()
    out, work = communicate(op_name, group, function, sent, *args, begin)

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


def send_as(
    x: Tensor, fmt: NumberFormat | None, sent_map: Tensor, exchange: Exchange, op_name: str
) -> Tensor:
    """:func:`send` of ``x`` quantized row-wise, as values in its dtype; as it is for None."""
    return begin_send_as(x, fmt, sent_map, exchange, op_name)()


def begin_send_as(
    x: Tensor, fmt: NumberFormat | None, sent_map: Tensor, exchange: Exchange, op_name: str
) -> Callable[[], Tensor]:
    """Begin to :func:`send_as`; what comes back waits for the copies."""
    if fmt is None:
        return begin_send(x, sent_map, exchange, op_name)
    row, _ = quantize_matrix(x, fmt, rowwise=True, columnwise=False)
    assert row is not None
    parts, elements, dtype = [_bytes(row.data), _bytes(row.scale)], row.data.dtype, x.dtype
    wait = begin_send(torch.cat(parts, 1), sent_map, exchange, op_name)

    def finish(widths: Sequence[int] = [part.shape[1] for part in parts]) -> Tensor:
        data, scale = (t.contiguous() for t in wait().split(list(widths), dim=1))
        made = QuantizedMatrix(data.view(elements), scale.view(fmt.scale_dtype), None, fmt)
        return dequantize_matrix(made, dtype)

    return finish


def format_option(fmt: NumberFormat | None) -> AgreedOption:
    """A format of :func:`wire_format`, as what is sent depends on it."""
    elements, scales = list(ELEMENTS), list(SCALE_DTYPES)

    def shown(number: int) -> str | None:
        block, rest = divmod(number, 64)
        return f"{elements[rest // 8]}, {scales[rest % 8]} of {block}" if number else None

    if fmt is None or fmt.block is None:
        return AgreedOption(0, shown)
    kind = 8 * elements.index(fmt.element.name) + scales.index(fmt.scale)
    return AgreedOption(64 * fmt.block[1] + kind, shown)


def begin_return(partial: Tensor, exchange: Exchange, op_name: str) -> Callable[[], Tensor]:
    """Begin to return ``partial`` ``[R, n]``, made of copies that :func:`send` gave.

    The function that comes back waits for what all processes made of this one's copies, in the
    order in which they were sent.
    """
    sizes = exchange.received, exchange.sent
    return _begun(op_name, exchange.group, _all_to_all, partial, exchange.group, *sizes)


def sum_copies(back: Tensor, sent_map: Tensor) -> Tensor:
    """Each token's sum ``[T, n]`` of what was made of its copies, as it came back.

    Sums are taken in FP32 (FP64) in the order of the sent map's columns and rounded once.
    """
    return moe.gather_sum(back, sent_map, None, None)[0]


def send_choices(
    ids: Tensor, probs: Tensor, sent_map: Tensor, exchange: Exchange, per_choice: bool, name: str
) -> tuple[Tensor, Tensor]:
    """The expert ids and weights of the tokens that :func:`send` gives, ``[R, k]``.

    ``per_choice``: one copy was sent for each choice, so k is 1. Ids of tokens that pad are -1.
    """
    if per_choice:
        ids, probs, sent_map = (t.reshape(-1, 1) for t in (ids, probs, sent_map))
    k = ids.shape[1]
    # One message; ids from 1, so that zeros are no expert.
    message = torch.cat((_bytes(ids.int() + 1), _bytes(probs)), 1)
    message = send(message, sent_map, exchange, name)
    parts = message.split((4 * k, probs.element_size() * k), dim=1)
    return parts[0].contiguous().view(torch.int32) - 1, parts[1].contiguous().view(probs.dtype)


def _digest(numbers: Sequence[int]) -> int:
    """One integer of 61 bits for several."""
    digest = 0
    for number in numbers:
        digest = (digest * 1_000_003 + number + 1) % (2**61 - 1)
    return digest


def _reads_sizes(mode: Send, device: torch.device) -> bool:
    """Whether sizes are read on the host; on a GPU that is a synchronisation."""
    return mode != "all" or (device.type == "cpu" and not torch.compiler.is_compiling())


def balanced_sizes(copies: int, group: Any) -> tuple[int, ...]:
    """So many copies shared evenly among processes."""
    processes = dist.get_world_size(group)
    return tuple((copies + i) // processes for i in range(processes))


def _balanced(group: Any, mode: Send, ids: Tensor, local: int, max_tokens: int | None) -> Routed:
    """What :func:`route_copies` would find of equally many tokens and balanced choices.

    For fake tensors, whose values nobody knows.
    """
    processes, (tokens, k) = dist.get_world_size(group), ids.shape
    if mode == "all":
        sent_map = ids.new_empty(tokens, processes, dtype=torch.int32)
        padded = max_tokens or tokens
        rows = processes * padded * min(k, local)
        return Routed(Exchange(group, None, None, padded), sent_map, rows, k * tokens * processes)
    width = k if mode == "rows" else processes
    sizes = balanced_sizes(tokens * min(k, width), group)
    sent_map = ids.new_empty(tokens, width, dtype=torch.int32)
    return Routed(Exchange(group, sizes, sizes, 0), sent_map, tokens * k, k * tokens * processes)


def route_copies(
    group: Any,
    mode: Send,
    ids: Tensor,
    local: int,
    options: dict[str, AgreedOption],
    receive_factor: float | None,
    max_tokens: int | None,
) -> Routed:
    """Agree with the group on an exchange of the tokens whose choices are ``ids`` ``[T, k]``.

    One all-gather of a few integers: the options, on which processes must agree, the number of
    tokens, and the copies and choices for each process.

    Args:
        group: of processes.
        mode: what is sent.
        ids: of experts, ``[T, k]``, ``local`` of which belong to each process in order of rank.
        local: experts of a process.
        options: by name, what must be the same on all processes.
        receive_factor: the most rows that the experts of a process may get, as a multiple of the
            choices of the process that has the most tokens; None for no bound.
        max_tokens: the most tokens of a process, for which there is room where no host reads
            sizes; None if all processes then have equally many.

    Raises:
        ValueError: processes disagree about an option, experts get more rows than the bound, or
            a process has more tokens than ``max_tokens``, on all processes alike.
        RuntimeError: a process fails; a mode that reads sizes on the host is compiled.
    """
    if isinstance(ids, FakeTensor) and not torch.compiler.is_compiling():
        return _balanced(group, mode, ids, local, max_tokens)
    processes, (tokens, k), device = dist.get_world_size(group), ids.shape, ids.device
    read = _reads_sizes(mode, device)
    if read and torch.compiler.is_compiling():
        raise RuntimeError(
            f'send of Dispatch must be "all" where torch.compile traces it, got "{mode}", whose '
            "sizes the host reads"
        )
    ranks = torch.arange(processes, device=device)
    owner = torch.where((ids >= 0) & (ids < local * processes), ids.long() // local, processes)
    choices = ranks.new_zeros(processes + 1)
    choices = choices.scatter_add(0, owner.flatten(), torch.ones_like(owner.flatten()))[:-1]
    copies = torch.zeros_like(ranks)
    if mode == "all":
        sent_map = torch.empty(0)
    elif mode == "tokens":
        to = torch.where((owner[:, :, None] == ranks).any(1), ranks, processes)
        sent_map, copies, _ = moe.permutation(to, processes, None)
    else:
        sent_map, copies, _ = moe.permutation(owner, processes, None)
    numbers = [option.number for option in options.values()]
    if read:
        header = torch.tensor((*numbers, tokens), dtype=torch.int64, device=device)
    else:  # No copy from the host, which a CUDA graph would repeat.
        header = torch.cat([ranks.new_full((1,), n) for n in (_digest(numbers), tokens)])
    own = torch.cat((header, copies, choices))
    table = communicate("Dispatch", group, all_gather, own[None], group)
    if read:
        return _read(group, mode, table, sent_map, options, k, receive_factor, max_tokens)
    return _unread(group, table, ranks, tokens, k, local, receive_factor, max_tokens)


def _unread(
    group: Any,
    table: Tensor,
    ranks: Tensor,
    tokens: int,
    k: int,
    local: int,
    receive_factor: float | None,
    max_tokens: int | None,
) -> Routed:
    """The exchange of all tokens, from what all processes said, which only the device checks."""
    processes, padded = len(ranks), max_tokens or tokens
    same = table[:, :2] == table[:1, :2]
    if max_tokens is not None:
        if tokens > max_tokens:
            raise ValueError(_too_many(tokens, max_tokens))
        same = torch.stack((same[:, 0], table[:, 1] <= max_tokens))
    torch._assert_async(same.all(), "processes disagree about Dispatch's options or token counts")
    rows = processes * padded * min(k, local)
    if receive_factor is not None:
        bound = math.ceil(receive_factor * padded * k)
        rows, most = min(rows, bound), table[:, 2 + processes :].sum(0).max()
        torch._assert_async(most <= bound, "more rows than receive_factor of Dispatch allows")
    sent_map = _all_sent(tokens, padded, ranks)
    return Routed(Exchange(group, None, None, padded), sent_map, rows, k * padded * processes)


def _too_many(tokens: int, max_tokens: int) -> str:
    return f"a process must have at most max_tokens of Dispatch, {max_tokens} tokens, got {tokens}"


def _all_sent(tokens: int, padded: int, ranks: Tensor) -> Tensor:
    """The sent map of tokens that all processes get."""
    return (torch.arange(tokens, device=ranks.device)[:, None] + padded * ranks).int()


def _read(
    group: Any,
    mode: Send,
    table: Tensor,
    sent_map: Tensor,
    options: dict[str, AgreedOption],
    k: int,
    receive_factor: float | None,
    max_tokens: int | None,
) -> Routed:
    """The exchange, from what all processes said, read on the host."""
    processes, rank, agreed = table.shape[0], dist.get_rank(group), len(options)
    said = table.tolist()
    _check_agreement(options, said)
    tokens = [row[agreed] for row in said]
    copies = [row[agreed + 1 : agreed + 1 + processes] for row in said]
    rows = [sum(of) for of in zip(*[row[agreed + 1 + processes :] for row in said], strict=True)]
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
    if mode == "all":
        padded = max(tokens)
        sent_map = _all_sent(tokens[rank], padded, torch.arange(processes, device=table.device))
        exchange = Exchange(group, None, None, padded)
    else:
        exchange = Exchange(group, tuple(copies[rank]), tuple(of[rank] for of in copies), 0)
    return Routed(exchange, sent_map, rows[rank], k * sum(tokens))


def _check_agreement(options: dict[str, AgreedOption], said: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless all processes have the same options."""
    for i, (name, option) in enumerate(options.items()):
        numbers = [row[i] for row in said]
        if len(set(numbers)) > 1:
            raise ValueError(
                f"{name} of Dispatch must be the same on all {len(numbers)} processes of its "
                f"group, got {[option.shown(n) for n in numbers]} in order of rank"
            )
