"""The op graph before and after fusion, as an SVG drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fusible.fuser.plan import Plan, Step
from fusible.fuser.wiring import CALLER, Wiring

_ROW, _BOX_HEIGHT, _WIDTH, _GAP, _MARGIN = 54, 36, 230, 60, 190
_STYLE = (
    "text{font:13px sans-serif;fill:#1f2933}.small{font-size:11px;fill:#52606d}"
    ".title{font-weight:bold}.op{fill:#f5f7fa;stroke:#9aa5b1}.fused{fill:#d3f2e0;stroke:#27875a}"
    "path,line{stroke:#7b8794;fill:none;stroke-width:1.3}.channel{stroke:#b35c00}"
    ".channelname{fill:#b35c00}"
)
_COLUMNS = ("as written", "forward, as run", "backward, as run")


def draw(runs: Sequence[tuple[str, Wiring, Plan]]) -> str:
    """A drawing of every ``(name, wiring, plan)``, one below the other."""
    body: list[str] = []
    top = 20
    for name, wiring, plan in runs:
        body.extend(_run(name, wiring, plan, top))
        top += 60 + _ROW * len(plan.basic_ops) + 30
    width = _MARGIN + len(_COLUMNS) * (_WIDTH + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}"><style>{_STYLE}</style>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#7b8794"/></marker>'
        f'</defs><rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
    )


def _run(name: str, wiring: Wiring, plan: Plan, top: int) -> Iterator[str]:
    recipe = "none" if plan.recipe is None else plan.recipe.name
    yield _text(20, top, f"{name}: {plan.target}, recipe {recipe}", "title")
    written = tuple(Step(op, (op,)) for op in plan.basic_ops)
    columns = (written, plan.forward_ops, plan.backward_ops)
    for column, (title, steps) in enumerate(zip(_COLUMNS, columns, strict=True)):
        x = _MARGIN + column * (_WIDTH + _GAP)
        yield _text(x, top + 26, title, "small")
        y = top + 38
        for i, (op, basic_ops) in enumerate(steps):
            height = _BOX_HEIGHT + _ROW * (len(basic_ops) - 1)
            yield _box(x, y, height, op)
            if i + 1 < len(steps):
                tail, head = y + height, y + height + _ROW - _BOX_HEIGHT
                # Gradients flow from the last op to the first.
                ends = (head, tail) if column == 2 else (tail, head)
                yield _arrow(x + _WIDTH // 2, ends[0], x + _WIDTH // 2, ends[1])
            y += height + _ROW - _BOX_HEIGHT
    yield from _extra_tensors(wiring, plan, top + 38)


def _extra_tensors(wiring: Wiring, plan: Plan, top: int) -> Iterator[str]:
    """Extra inputs of the caller as arrows from the left, channels as arcs."""
    for i, sources in enumerate(wiring.sources):
        for slot, (producer, _) in enumerate(sources):
            y = _slot_height(top, i, slot, len(sources))
            label = plan.basic_ops[i].extra_input_name(slot)
            if producer == CALLER:
                yield _arrow(_MARGIN - 60, y, _MARGIN, y)
                yield _text(_MARGIN - 66, y + 4, label, "small", end=True)
                continue
            start = top + _ROW * producer + _BOX_HEIGHT // 2
            bend = _MARGIN - 50
            yield (
                f'<path class="channel" marker-end="url(#tip)" d="M{_MARGIN} {start}'
                f'C{bend} {start} {bend} {y} {_MARGIN} {y}"/>'
            )
            middle = (start + y) // 2 + 4
            yield _text(_MARGIN - 44, middle, label, "small channelname", end=True)


def _slot_height(top: int, op: int, slot: int, slots: int) -> int:
    return top + _ROW * op + _BOX_HEIGHT * (slot + 1) // (slots + 1)


def _box(x: int, y: int, height: int, op: Any) -> str:
    kind = "fused" if op.is_fused_op else "op"
    middle = y + height // 2 + 4
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH}" height="{height}" rx="6"/>'
        f'<text x="{x + _WIDTH // 2}" y="{middle}" text-anchor="middle">'
        f"{escape(type(op).__name__)}</text>"
    )


def _text(x: int, y: int, words: str, kind: str, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{anchor}>{escape(words)}</text>'


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#tip)"/>'
