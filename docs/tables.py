"""Write the tables of the pages: the fusion rules, and what was measured of MLP and block."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import fusible.fused
from fusible.fuser.conditions import Condition
from fusible.fuser.rules import Rule
from fusible.integrations.checkpoint_layouts import LAYOUTS, CheckpointLayout
from fusible.ops import BasicLinear, BasicOperation, GroupedLinear

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # last: modules of examples have the same names

import expert_parallel_model  # noqa: E402 - found through the line above

RESULTS = ROOT / "benchmarks" / "results"
PASSES = ("forward", "forward + backward")
FORMATS = {
    "mxfp8": "MXFP8",
    "fp8 1x128": "FP8 1x128",
    "fp8 128x128": "FP8 128x128",
    "fp8 tensor": "FP8 per tensor",
    "nvfp4": "NVFP4",
}
SPLITS = ("equal", "ragged")
EXPERTS = {
    "qwen3-30b": "qwen3-30b, 128 x 768",
    "mixtral-8x7b": "mixtral-8x7b, 8 x 14336",
    "deepseek-v3": "deepseek-v3, 64 of its 256 x 2048",
    "gpt-oss-20b": "gpt-oss-20b, 32 x 2880",
    "gpt-oss-120b": "gpt-oss-120b, 128 x 2880",
    "qwen3-30b, decoding": "qwen3-30b, decoding",
    "gpt-oss-20b, decoding": "gpt-oss-20b, decoding",
}
SHAPES = {"tiny": "256, 128, 8, 512", "small": "1024, 512, 64, 8192"}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], *below: str) -> str:
    """A table as Markdown, and the lines below it after an empty one."""
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    lines.insert(1, "|" + "---|" * (lines[0].count(" | ") + 1))
    return "\n".join([*lines, *(["", *below] if below else [])])


def support_table(rules: Sequence[Rule]) -> str:
    """The rules as a Markdown table, one row each, in order of priority.

    After a rule with rows of kernels comes one for each of these, with what it needs in addition.
    """
    rows = []
    for r in rules:
        pattern = str(r).replace("|", "\\|")
        rows.append([f"`{r.name}`", r.phase, pattern, _needs(r.needs), r.worth])
        rows += [[f"`{r.name}_{k.name}`", "", "", _needs(k.needs), k.worth] for k in r.kernels]
    spaced = [[" ".join(cell.split()) for cell in row] for row in rows]
    return markdown(["rule", "pass", "pattern", "needs", "worth"], spaced)


def kernels_table(*kinds: type[BasicOperation]) -> str:
    """The rows of kernels of ops as a Markdown table, in order of priority."""
    rows = [
        [kind.__name__, f"`{row.name}`", _needs(row.needs), row.worth]
        for kind in kinds
        for row in kind.kernel_rows
    ]
    return markdown(["op", "kernels", "needs", "worth"], rows)


def _needs(conditions: Sequence[Condition]) -> str:
    return "; ".join(map(str, conditions)) or "nothing"


def measured_table(report: dict[str, Any]) -> str:
    """Times of ``benchmarks/grouped_mlp.py`` and those of its peers over them, as Markdown."""
    cells = {(c["config"], c["split"], c["pass"]): c["ms"] for c in report["cells"]}
    columns = [f"{what}: ours, ms | torch / ours | quack / ours" for what in PASSES]
    rows = []
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
        rows.append(row)
    return markdown(["shape", "splits", *columns], rows, _sentences(report))


def _measured_at(report: dict[str, Any]) -> str:
    where = report["environment"]
    return f"Commit {where['commit']}, torch {where['torch']}, {where['date'].partition('T')[0]}."


def _sentences(report: dict[str, Any]) -> str:
    host, found = report["host_us"], [_measured_at(report)]
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


def gains_table(block: dict[str, Any], mlp: dict[str, Any], experts: dict[str, Any]) -> str:
    """What a user gains over PyTorch and transformers, forward and backward, as Markdown."""
    rows = []
    release = block["environment"]["transformers"].removesuffix(".0")
    for name, cell in _large_blocks(block).items():
        ratio, saved = cell["passes"][PASSES[1]]["ratio"], cell["saved_mb"]
        for who, what in (
            ("transformers grouped_mm", f"transformers {release}, `grouped_mm`"),
            ("torch", "PyTorch's ops and `grouped_mm`"),
        ):
            sizes = f"{saved['fusible']:.0f}, {saved[who]:.0f}"
            rows.append([f"MoE block, {name}", what, f"{ratio[who]:.2f}", sizes])
    case = experts["cases"]["gpt-oss-20b"]
    ms, older = case["ms"][PASSES[1]], experts["environment"]["transformers"].removesuffix(".0")
    faster = f"{ms['grouped_mm'] / ms['fusible']:.2f}"
    rows.append(["experts of gpt-oss-20b", f"transformers {older}, `grouped_mm`", faster, ""])
    for cell in mlp["cells"]:
        if cell["pass"] == PASSES[1] and cell["config"] in ("qwen3-30b", "mixtral-8x7b"):
            ms, sizes = cell["ms"], mlp["memory"][cell["config"]]
            saved = [f"{sizes[who]['saved_mb']:.0f}" for who in ("fused", "torch")]
            what = f"grouped MLP, {cell['config']}, {cell['split']} rows"
            faster = f"{ms['torch'] / ms['fused']:.2f}"
            rows.append([what, "`grouped_mm`, compiled activation", faster, ", ".join(saved)])
    measured = " ".join(dict.fromkeys(map(_measured_at, (block, mlp))))
    columns = ["what", "compared with", "times as fast", "saved for the backward, MB: ours, theirs"]
    return markdown(columns, rows, f"{measured} gpt-oss-20b at commit {case['commit']}.")


def _large_blocks(report: dict[str, Any]) -> dict[str, Any]:
    """What was measured of the blocks, but for the small one."""
    return {name: cell for name, cell in report["shapes"].items() if name != "small"}


def block_table(report: dict[str, Any]) -> str:
    """The large shapes of ``benchmarks/moe_block.py``, forward + backward, as Markdown."""
    release = report["environment"]["transformers"].removesuffix(".0")
    columns = [
        "block",
        "ours, ms",
        "plain PyTorch / ours",
        f"transformers {release} / ours",
        "peak memory, MB: ours, plain, transformers",
        "kept for the backward, MB: ours (`recompute_rows`), plain, transformers",
    ]
    rows = []
    shapes = _large_blocks(report)
    for name, cell in shapes.items():
        ms, sizes = cell["passes"][PASSES[1]]["ms"], cell["sizes"]
        ours, again, *peers = ("fusible", "fusible, recompute", "torch", "transformers grouped_mm")
        plain, theirs = (f"{ms[who] / ms[ours]:.2f}" for who in peers)
        peak, saved = cell["peak_mb"], cell["saved_mb"]
        row = [
            f"{name}, {sizes['tokens']} tokens, top-{sizes['top_k']}",
            f"{ms[ours]:.3g}",
            plain,
            theirs,
            ", ".join(f"{peak[who]:.0f}" for who in (ours, *peers)),
            f"{saved[ours]:.0f} ({saved[again]:.0f}), "
            + ", ".join(f"{saved[who]:.0f}" for who in peers),
        ]
        rows.append(row)
    return markdown(columns, rows, f"{_measured_at(report)} {_block_sentences(report, shapes)}")


def _block_sentences(report: dict[str, Any], shapes: dict[str, Any]) -> str:
    """What moving rows takes, what ``recompute_rows`` costs, how exact the results are."""
    name, first = next(iter(shapes.items()))
    parts = report["parts"][name]["fusible"]
    moving = sum(sum(parts[part].values()) for part in ("dispatch", "combine"))
    share = moving / first["passes"][PASSES[1]]["ms"]["fusible"]
    speed = [v["of a copy"] for what, v in first["bandwidth"].items() if v["TB/s"] > 0]
    cost = [
        cell["passes"][PASSES[1]]["ratio"]["fusible, recompute"] - 1 for cell in shapes.values()
    ]
    ours, peers = (
        [cell["errors"][who] for cell in shapes.values()] for who in ("fusible", "torch")
    )
    return (
        f"Moving rows is {share:.0%} of the block's time on {name}: each launch that moves them "
        f"runs at {min(speed):.0%} to {sorted(speed)[-2]:.0%} of a copy's bandwidth, and the sort "
        f"by expert takes {first['bandwidth']['row map']['ms']:.2f} ms. `recompute_rows` costs "
        f"{min(cost):.0%} to {max(cost):.0%} of the time. Relative error against FP32 math: at "
        f"most {max(ours):.1%}; that of plain PyTorch is {min(peers):.1%} to {max(peers):.1%}, as "
        "it rounds the router's logits to BF16 and then chooses other experts."
    )


def experts_table(report: dict[str, Any]) -> str:
    """Experts of published models, ``benchmarks/transformers_experts.py``, as Markdown."""
    columns = ["experts", "tokens, top-k"]
    columns += [f"{what}, ms | against `grouped_mm`" for what in PASSES]
    columns += ["against `eager`", "peak memory against `grouped_mm`"]
    rows = []
    for name, experts in EXPERTS.items():
        if case := report["cases"].get(name):
            at = f" (at {case['commit']})" if "commit" in case else ""
            row = [experts + at, f"{case['tokens']}, {case['top_k']}"]
            for ms in (case["ms"][what] for what in PASSES):
                row += [f"{ms['fusible']:.2f}", f"{ms['grouped_mm'] / ms['fusible']:.2f}x"]
            peak = case["peak_mb"]
            row += [f"{ms['eager'] / ms['fusible']:.1f}x"]
            row += [f"{peak['fusible'] / peak['grouped_mm']:.2f}x"]
            rows.append(row)
    where = f"{_measured_at(report)} transformers {report['environment']['transformers']}."
    few = report["cases"]["gpt-oss-20b, decoding"]["ms"]
    forward, both = (few[what]["batched_mm"] / few[what]["fusible"] for what in PASSES)
    below = (
        f"{where} `batched_mm`, which copies the weight of every row, was measured where tokens "
        f"are few: in decoding gpt-oss-20b ours is {forward:.1f} times as fast forward and "
        f"{both:.1f} times with the backward."
    )
    return markdown(columns, rows, below)


def dense_rules_table(h200: dict[str, Any], cpu: dict[str, Any]) -> str:
    """What each dense rule gives, ``benchmarks/rules.py``, as Markdown."""
    found: dict[str, dict[str, list[str]]] = {}
    for where, report in (("H200", h200), ("CPU", cpu)):
        for case in report["results"]:
            times = found.setdefault(case["rule"], {}).setdefault(where, [])
            times.append(f"{case['speedup']:.2f}")
    rows = []
    for name, times in found.items():
        rule, comma, form = name.partition(",")
        cells = [", ".join(times.get(where, [])) for where in ("H200", "CPU")]
        rows.append([f"`{rule}`{comma}{form}", *cells])
    return markdown(["rule", "H200", "CPU"], rows)


def steps_table(report: dict[str, Any]) -> str:
    """Host time and launches of training steps, ``benchmarks/training_step.py``, as Markdown."""
    cells = {(s["shape"], s["path"], s["way"]): s for s in report["steps"]}
    ways = list(dict.fromkeys(way for _, _, way in cells))
    rows = []
    for shape, path in dict.fromkeys((shape, path) for shape, path, _ in cells):
        steps = [cells[shape, path, way] for way in ways]
        row = [f"{s['host_us']:.0f} us, {s['launches']}" for s in steps]
        name = path.replace("bf16", "BF16").replace("mxfp8", "MXFP8").replace("fp8 b", "FP8 b")
        rows.append([SHAPES[shape], name, *row])
    return markdown(["shape", "run as", *ways], rows, _measured_at(report))


def quantizers_table(report: dict[str, Any]) -> str:
    """Bandwidth of the quantizers, ``benchmarks/quantize.py``, from BF16, as Markdown."""
    share = {row["case"]: row["of_copy"] for row in report["quantizers"]}
    columns = ["format", "row-wise", "column-wise", "both", "both, 128 groups"]
    rows = []
    for case, name in FORMATS.items():
        for both in ("both", "one for both"):
            cells = [
                [f"{case}, torch.bfloat16, {use}"] for use in ("row-wise", "column-wise", both)
            ]
            cells.append([f"{case}, torch.bfloat16, {both}, 128 {how} groups" for how in SPLITS])
            cells.append([key for key in share if key.startswith(f"{case}, dequantize ")])
            if cells[2][0] in share:
                row = [_range([share[key] for key in keys if key in share]) for keys in cells]
                rows.append([name, *row])
    return markdown([*columns, "dequantized to BF16"], rows, _measured_at(report))


def _range(shares: list[float]) -> str:
    """The least and the largest share, as percentages."""
    ends = sorted({f"{share:.0%}" for share in (min(shares), max(shares))}) if shares else []
    return " to ".join(ends).replace("%", " %")


def recipe_costs_table(report: dict[str, Any]) -> str:
    """Forward and backward of modules under recipes, ``benchmarks/quantize.py``, as Markdown."""
    costs: dict[str, list[str]] = {}
    for row in report["modules"]:
        module, _, recipe = row["case"].rpartition(", ")
        cell = f"{row['us'] / 1e3:.2f} ms" if recipe == "bf16" else f"{row['over_bf16']:.2f}"
        costs.setdefault(module, []).append(cell)
    columns = ["module", "BF16", "MXFP8", "FP8 block", "FP8 current", "NVFP4"]
    rows = [[module, *cells] for module, cells in costs.items()]
    return markdown(columns, rows, _measured_at(report))


def placed_table(report: dict[str, Any]) -> str:
    """Rows quantized into SM100's places, ``benchmarks/quantize.py``, as Markdown."""
    cases = {case["case"]: case for case in report["placed"]}
    columns = ["groups", "format", "us", "of a copy", "with sums, us"]
    columns += ["as passes of PyTorch, us", "the sums alone, us"]
    rows = []
    for groups in (8, 128):
        for name in ("mxfp8", "nvfp4"):
            one, sums, parts = (
                cases[f"{name} into places, {groups} groups, {how}"]
                for how in ("one kernel", "with sums", "in parts")
            )
            alone = cases[f"sums alone, {groups} groups"]
            row = [f"{groups}", name.upper(), f"{one['us']:.0f}", f"{one['of_copy']:.0%}"]
            row += [f"{case['us']:.0f}" for case in (sums, parts, alone)]
            rows.append(row)
    return markdown(columns, rows, _measured_at(report))


def layouts_table(layouts: Sequence[CheckpointLayout]) -> str:
    """The layouts of checkpoints that are read, one row each, as Markdown."""
    rows = []
    for layout in layouts:
        names, fmt = ", ".join(f"`X{ending}`" for ending in layout.endings), layout.format
        stored = "ordinary tensors" if fmt is None else f"{fmt.name}: {fmt.scaling}"
        rows.append([layout.name, names, stored])
    return markdown(["layout", "entries of a weight `X`", "stored as, bit for bit"], rows)


def _results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# By page, and by the name between the page's markers.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/checkpoints.md": {"layouts": lambda: layouts_table(LAYOUTS)},
    "README.md": {
        "gains": lambda: gains_table(
            _results("moe_block"),
            _results("grouped_mlp"),
            _results("transformers_experts"),
        ),
    },
    "docs/results.md": {
        "measured": lambda: measured_table(_results("grouped_mlp")),
        "block": lambda: block_table(_results("moe_block")),
    },
    "docs/expert_parallel.md": {
        "model": lambda: markdown(expert_parallel_model.COLUMNS, expert_parallel_model.rows()),
    },
    "docs/blackwell.md": {"placed": lambda: placed_table(_results("quantize_h200"))},
    "docs/porting.md": {
        "dense rules": lambda: dense_rules_table(_results("rules_h200"), _results("rules_cpu")),
    },
    "docs/recipes.md": {
        "quantizers": lambda: quantizers_table(_results("quantize_h200")),
        "recipe costs": lambda: recipe_costs_table(_results("quantize_h200")),
    },
    "docs/training.md": {"steps": lambda: steps_table(_results("training_step_h200"))},
    "docs/transformers.md": {"experts": lambda: experts_table(_results("transformers_experts"))},
    "docs/rules.md": {
        "rules": lambda: support_table(fusible.fused.RULES),
        "kernels": lambda: kernels_table(GroupedLinear, BasicLinear),
    },
}


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a table of a page."""
    return f"<!-- {name}: written by make docs -->", f"<!-- end of {name} -->"


def with_table(text: str, name: str, table: str) -> str:
    """A page's text with the table between its markers replaced.

    Raises:
        ValueError: the page has no such markers.
    """
    begin, end = markers(name)
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page of {name} must have the lines {begin} and {end}")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def with_tables(page: str) -> str:
    """A page's text with its tables brought up to date."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        text = with_table(text, name, table())
    return text


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(with_tables(page), encoding="utf-8")
