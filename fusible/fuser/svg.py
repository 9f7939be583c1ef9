"""The op graph before and after fusion, as an SVG drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fusible.fuser.plan import Plan
from fusible.fuser.wiring import CALLER, Output, Wiring

_ROW, _BOX_HEIGHT, _WIDTH, _GAP = 76, 56, 230, 60
_INPUTS = 42  # of a box's height, where outputs take the rest
_LANE = 8  # between two lines that run down
_EDGE = 20  # left of all
_STYLE = (
    "text{font:13px sans-serif;fill:#1f2933}.small{font-size:11px;fill:#52606d}"
    ".name{text-anchor:middle}"
    ".title{font-weight:bold}.op{fill:#f5f7fa;stroke:#9aa5b1}.fused{fill:#d3f2e0;stroke:#27875a}"
    "path,line{stroke:#7b8794;fill:none;stroke-width:1.3}.channel{stroke:#b35c00}"
    ".channelname{fill:#b35c00}"
)
_COLUMNS = ("as written", "forward, as run", "backward, as run")


def draw(runs: Sequence[tuple[str, Wiring, Plan]]) -> str:
    """A drawing of every ``(title, wiring, plan)``, one below the other."""
    body: list[str] = []
    top = 20
    names = max([_names_width(wiring, plan) for _, wiring, plan in runs], default=0)
    lanes = max([len(_lanes(wiring)) for _, wiring, _ in runs], default=0)
    left = _EDGE + _LANE * lanes + names
    for title, wiring, plan in runs:
        body.extend(_run(title, wiring, plan, top, left, left - names))
        top += 60 + _ROW * len(plan.basic_ops)
    width = left + len(_COLUMNS) * (_WIDTH + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top - 20}" '
        f'viewBox="0 0 {width} {top - 20}"><style>{_STYLE}</style>'
        f"<defs>{_tip('tip', '#7b8794')}{_tip('channeltip', '#b35c00')}</defs>"
        f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
    )


def _names_width(wiring: Wiring, plan: Plan) -> int:
    """The width of the names of the extra inputs, between the lanes and the boxes."""
    names = [
        _input_name(plan.basic_ops[i], slot)
        for i, sources in enumerate(wiring.sources)
        for slot in range(len(sources))
    ]
    return 20 + 6 * max(map(len, names), default=0)


def _input_name(op: Any, slot: int) -> str:
    return op.extra_input_channels[slot] or op.extra_input_name(slot)


def _tip(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:{colour};'
        'stroke:none"/></marker>'
    )


def _run(
    title: str, wiring: Wiring, plan: Plan, top: int, left: int, first_lane: int
) -> Iterator[str]:
    yield _text(_EDGE, top, title, "title")
    columns = (plan.basic_ops, plan.forward_ops, plan.backward_ops)
    for column, (label, ops) in enumerate(zip(_COLUMNS, columns, strict=True)):
        x = left + column * (_WIDTH + _GAP)
        yield _text(x, top + 26, label, "small")
        y = top + 38
        for i, op in enumerate(ops):
            height = _BOX_HEIGHT + _ROW * (len(op.basic_ops) - 1)
            yield from _box(x, y, height, op)
            if i + 1 < len(ops):
                tail, head = y + height, y + height + _ROW - _BOX_HEIGHT
                # Gradients flow from the last op to the first.
                ends = (head, tail) if column == 2 else (tail, head)
                yield _arrow(x + _WIDTH // 2, ends[0], x + _WIDTH // 2, ends[1])
            y += height + _ROW - _BOX_HEIGHT
    yield from _extra_tensors(wiring, plan, top + 38, left, first_lane)


def _extra_tensors(
    wiring: Wiring, plan: Plan, top: int, left: int, first_lane: int
) -> Iterator[str]:
    """Extra inputs, each with its channel's name or its own: the caller's, or along a lane."""
    lanes = _lanes(wiring)
    for i, sources in enumerate(wiring.sources):
        op = plan.basic_ops[i]
        for slot, source in enumerate(sources):
            y = _port(top, i, slot, op)
            if source[0] == CALLER:
                yield _arrow(first_lane, y, left, y)
            else:
                start = _port(top, *source, plan.basic_ops[source[0]], is_output=True)
                lane = first_lane - _LANE * lanes[source]
                yield (
                    f'<path class="channel" marker-end="url(#channeltip)" '
                    f'd="M{left} {start}H{lane}V{y}H{left}"/>'
                )
            kind = "small" if source[0] == CALLER else "small channelname"
            yield _text(left - 12, y - 3, _input_name(op, slot), kind, end=True)


def _lanes(wiring: Wiring) -> dict[Output, int]:
    """The lane in which each extra output that an op reads runs down: the longest farthest out."""
    ends = {source: max(ops) for source, ops in wiring.consumers.items() if ops}
    by_length = sorted(ends, key=lambda source: ends[source] - source[0])
    return {source: lane for lane, source in enumerate(by_length)}


def _port(top: int, place: int, slot: int, op: Any, is_output: bool = False) -> int:
    """How high an extra tensor enters or leaves an op's box: inputs above outputs."""
    inputs, outputs = op.num_extra_inputs, op.num_extra_outputs
    middle = _INPUTS if inputs and outputs else _BOX_HEIGHT if inputs else 0
    above, below, count = (middle, _BOX_HEIGHT, outputs) if is_output else (0, middle, inputs)
    return top + _ROW * place + above + (below - above) * (slot + 1) // (count + 1)


def _box(x: int, y: int, height: int, op: Any) -> Iterator[str]:
    """An op; a fused one with the ops that it covers, each where it is in the first column."""
    kind, middle = "fused" if op.is_fused_op else "op", x + _WIDTH // 2
    yield f'<rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH}" height="{height}" rx="6"/>'
    yield _text(middle, y + (22 if op.is_fused_op else height // 2 + 4), type(op).__name__, "name")
    if op.is_fused_op:
        for i, part in enumerate(op.basic_ops):
            yield _text(middle, y + i * _ROW + 42, type(part).__name__, "name small")


def _text(x: int, y: int, words: str, kind: str, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{anchor}>{escape(words)}</text>'


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#tip)"/>'
