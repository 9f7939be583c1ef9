"""Training parity of the recipes: the demo's model in every number format, three seeds each.

    python benchmarks/recipe_parity.py            # the demo's size; on the CPU a smaller one
    python benchmarks/recipe_parity.py --steps 2000

All runs of a seed see the same bytes in the same order from the same initial parameters. The
experts' products are in the recipe's format; the baseline, and everything else, is in BF16 on CUDA
and in FP32 on the CPU. Prints each recipe's plan and the final held-out losses; writes the numbers
and one picture of the curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import moe_block  # noqa: E402 - found through the line above
from matplotlib import pyplot as plt  # noqa: E402 - after the example has chosen its backend

SMALL = ["--layers=1", "--experts=4", "--context=64", "--batch=8"]  # for the CPU
TARGETS = {"nvfp4": 3.0}  # percent; the FP8 formats' is 1
PERCENT = 1.0


def train(
    name: str, seed: int, arguments: list[str], text: tuple[torch.Tensor, torch.Tensor]
) -> tuple[moe_block.History, str]:
    """One run; its history, and the explained plan of what its first MoE block ran as."""
    options = moe_block.parse_options([*arguments, "--seed", str(seed), "--recipe", name])
    torch.manual_seed(seed)
    model = moe_block.LanguageModel(options).to(options.device)
    with moe_block.under_recipe(name):
        history = moe_block.train(model, *text, options)
        plan = moe_block.explain_block(model, options, None)
    ran = model.blocks[0].moe.plan.recipe
    if ran != moe_block.RECIPES[name]:
        raise RuntimeError(f"the MoE block must have run under {name}, got {ran}")
    return history, str(plan)


def compare(runs: dict[str, list[moe_block.History]]) -> dict[str, dict[str, Any]]:
    """Final held-out losses by recipe, and how far their mean is from the baseline's."""
    final = {name: [run.held_out[-1][1] for run in of_name] for name, of_name in runs.items()}
    base = statistics.mean(final["none"])
    spread = 100 * (max(final["none"]) - min(final["none"])) / base
    rows = {}
    for name, losses in final.items():
        difference = 100 * (statistics.mean(losses) / base - 1)
        target = TARGETS.get(name, PERCENT)
        rows[name] = {
            "final": losses,
            "mean": statistics.mean(losses),
            "difference_percent": difference,
            "baseline_spread_percent": spread,
            "target_percent": target,
            "met": abs(difference) < target or abs(difference) < spread,
            "curves": [run.held_out for run in runs[name]],
            "seconds": [run.seconds for run in runs[name]],
        }
    return rows


def report(rows: dict[str, dict[str, Any]], baseline: str) -> None:
    """Print a table."""
    spread = rows["none"]["baseline_spread_percent"]
    print(f"\nheld-out bits per byte at the end; {baseline} spreads {spread:.2f} % over its seeds")
    for name, row in rows.items():
        losses = " ".join(f"{loss:.4f}" for loss in row["final"])
        verdict = "" if name == "none" else ("  ok" if row["met"] else "  NOT MET")
        print(
            f"{baseline if name == 'none' else name:12s} mean {row['mean']:.4f} "
            f"{row['difference_percent']:+6.2f} %  ({losses}){verdict}"
        )


def plot(rows: dict[str, dict[str, Any]], baseline: str, path: Path) -> None:
    """Held-out curves: the mean over seeds, and each seed faintly."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    first_look = 1  # untrained, all are far above the rest
    for i, (name, row) in enumerate(rows.items()):
        steps = [step for step, _ in row["curves"][0][first_look:]]
        losses = [[loss for _, loss in curve[first_look:]] for curve in row["curves"]]
        for curve in losses:
            axes.plot(steps, curve, color=f"C{i}", alpha=0.2, linewidth=0.8)
        mean = [statistics.mean(at) for at in zip(*losses, strict=True)]
        label = baseline if name == "none" else f"{name} ({row['difference_percent']:+.2f} %)"
        axes.plot(steps, mean, color=f"C{i}", label=label)
    axes.set(xlabel="step", ylabel="held-out loss (bits per byte)")
    axes.set_title(f"Training under recipes, {len(losses)} seeds each")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, help="steps of a run; 300 on the CPU, 2000 on CUDA")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--device", default="auto", help="as the demo's")
    parser.add_argument("--machine", default="", help="what to call the machine in the results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    cpu = moe_block.pick_device(args.device).type == "cpu"
    steps = args.steps or (300 if cpu else 2000)
    arguments = ["--steps", str(steps), "--device", args.device, *(SMALL if cpu else [])]
    text = moe_block.read_text()
    runs: dict[str, list[moe_block.History]] = {}
    plans: dict[str, str] = {}
    start = time.perf_counter()
    for name in moe_block.RECIPES:
        for seed in range(args.seeds):
            history, plans[name] = train(name, seed, arguments, text)
            runs.setdefault(name, []).append(history)
        print(f"\n{name}: the experts' plan\n{plans[name]}", flush=True)
    rows, baseline = compare(runs), "FP32" if cpu else "BF16"
    report(rows, baseline)
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "cpu" if cpu else "cuda"
    machine = args.machine or ("CPU" if cpu else torch.cuda.get_device_name())
    results = {
        "machine": machine,
        "torch": torch.__version__,
        "arguments": arguments,
        "baseline": baseline,
        "minutes": (time.perf_counter() - start) / 60,
        "recipes": rows,
        "plans": plans,
    }
    (args.out / f"recipe_parity_{kind}.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(rows, f"{baseline}, {machine}", args.out / f"recipe_parity_{kind}.png")


if __name__ == "__main__":
    main()
