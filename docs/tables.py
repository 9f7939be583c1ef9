"""Write the tables of the pages: the fusion rules, and what was measured of the grouped MLP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusible.fused
from fusible.fuser.rules import support_table

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "benchmarks" / "results" / "grouped_mlp.json"
PASSES = ("forward", "forward + backward")


def measured_table(report: dict[str, Any]) -> str:
    """Times of ``benchmarks/grouped_mlp.py`` and those of its peers over them, as Markdown."""
    cells = {(c["config"], c["split"], c["pass"]): c["ms"] for c in report["cells"]}
    columns = [f"{what}: ours, ms | torch / ours | quack / ours" for what in PASSES]
    lines = [f"| shape | splits | {' | '.join(columns)} |", "|" + "---|" * 8]
    shapes = dict.fromkeys((config, split) for config, split, _ in cells)
    for config, split in shapes:
        graph = f"{PASSES[1]}, graph" if (config, split, f"{PASSES[1]}, graph") in cells else ""
        row = [f"{config}, in a CUDA graph" if graph else config, split]
        for what in PASSES:
            ms = cells.get((config, split, f"{what}, graph" if graph else what))
            row += [
                f"{ms['fused']:.4g}" if ms else "",
                *[f"{ms[who] / ms['fused']:.2f}" if ms else "" for who in ("torch", "quack")],
            ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", _sentences(report)])


def _sentences(report: dict[str, Any]) -> str:
    where, host, found = report["environment"], report["host_us"], []
    found.append(
        f"Commit {where['commit']}, torch {where['torch']}, {where['date'].partition('T')[0]}."
    )
    for key, what in (("saved_mb", "Saved for the backward"), ("peak_mb", "Peak of both passes")):
        sizes = [f"{v['fused'][key]:.0f} MB ({v['torch'][key]:.0f})" for v in _large(report)]
        found.append(f"{what}, with PyTorch's in brackets: {', '.join(sizes)}.")
    times = [f"{w} {host[w]['fused']:.0f} us ({host[w]['torch']:.0f})" for w in PASSES]
    found.append(f"Host time at a tiny shape: {', '.join(times)}.")
    if phases := host.get("phases"):
        found.append(
            f"Of it an empty autograd node takes {phases['autograd']:.0f} us, the launches with "
            f"their allocations {phases['launches']:.0f} us."
        )
    return " ".join(found)


def _large(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Memory of the shapes, in the table's order, but for the small one."""
    return [sizes for config, sizes in report["memory"].items() if config != "small"]


# By page, and by the name between the page's markers.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "rules": lambda: support_table(fusible.fused.RULES, needs=False),
        "measured": lambda: measured_table(json.loads(MEASURED.read_text(encoding="utf-8"))),
    },
    "docs/rules.md": {"rules": lambda: support_table(fusible.fused.RULES)},
}


def with_tables(page: str) -> str:
    """A page's text with the tables between their markers brought up to date."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        begin, end = f"<!-- {name}: written by make docs -->", f"<!-- end of {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} must have the lines {begin} and {end}")
        text = f"{head}{begin}\n{table()}\n{end}{tail}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(with_tables(page), encoding="utf-8")
