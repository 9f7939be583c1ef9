"""Training parity of the recipes: the demo's model in every number format, five seeds each.

    python benchmarks/recipe_parity.py                       # every format, against the baseline
    python benchmarks/recipe_parity.py --recipes fp8_block   # one
    python benchmarks/recipe_parity.py --steps 4000 --learning-rate 2e-3   # options of the demo

The experts' products are in the recipe's format; the baseline, and everything else, is in BF16 on
CUDA and in FP32 on the CPU, where the model is smaller. The runs of a seed start from the same
parameters and read the same bytes in the same order. So formats are compared seed by seed: by the
mean of the differences of the final held-out losses, in percent, and by their spread (the sample
standard deviation), which must be small enough for that mean to say something; more steps make it
smaller, as long as the text is not memorized: on CUDA it is PyTorch's sources as well as those of
the standard library. On Hopper `FP8_PRODUCTS` must multiply in FP8. Prints plans and differences;
writes the numbers and one picture of the curves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import moe_block  # noqa: E402 - found through the line above
from matplotlib import pyplot as plt  # noqa: E402 - after the example has chosen its backend

RECIPES = {
    **moe_block.RECIPES,
    "mxfp8_fp8": measuring.RECIPES["mxfp8_fp8"],
    "nvfp4_plain": measuring.RECIPES["nvfp4"],
}
FP8_PRODUCTS = "fp8_block", "fp8_current", "mxfp8_fp8"  # on Hopper
SMALL = ["--steps=300", "--layers=1", "--experts=4", "--context=64", "--batch=8"]  # for the CPU
LARGE = ["--steps=2000", "--batch=128", "--learning-rate=2e-3"]  # for CUDA
TARGETS = {"nvfp4_plain": 3.0}  # percent; the others' is 1
PERCENT, SPREAD = 1.0, 0.3
HELD_OUT = 32  # batches at the end

Runs = dict[str, tuple[moe_block.History, str]]
"""Of one seed, by recipe: the history, and the explained plan of its first MoE block."""


def train(
    name: str, seed: int, arguments: Sequence[str], text: tuple[torch.Tensor, torch.Tensor]
) -> tuple[moe_block.History, str]:
    """One run."""
    options = moe_block.parse_options([*arguments, "--seed", str(seed)])
    torch.manual_seed(seed)
    model = moe_block.LanguageModel(options).to(options.device)
    with measuring.under(RECIPES[name]):
        plan = moe_block.explain_block(model, options, None)
        check_plans(name, plan.plans)  # of training
        history = moe_block.train(model, *text, options)
        step, _ = history.held_out.pop()
        history.held_out.append((step, held_out_loss(model, text[1], options)))
    for block in model.blocks:
        check_plans(name, [block.moe.plan])  # of the last call, an inference
    return history, str(plan)


def held_out_loss(
    model: moe_block.LanguageModel, text: torch.Tensor, options: argparse.Namespace
) -> float:
    """Bits per byte of more text than the demo looks at, on which small differences are chance."""
    places = torch.linspace(0, len(text) - options.context - 1, HELD_OUT * options.batch).long()
    return moe_block.evaluate(
        model,
        [
            moe_block.windows(text, starts, options.context, options.device)
            for starts in places.split(options.batch)
        ],
    )[0]


def check_plans(name: str, plans: Sequence[Any]) -> None:
    """Raise RuntimeError unless a block runs under its recipe, on Hopper by the products meant."""
    recipes, on = {plan.recipe for plan in plans}, {plan.target.family for plan in plans}
    if recipes != {RECIPES[name]}:
        raise RuntimeError(f"the MoE block must have run under {name}, got {recipes}")
    fired = [name for plan in plans for name in (*plan.fired, *plan.kernels)]
    in_fp8 = any(name.endswith("sm90_fp8") for name in fired)
    if on == {"sm90"} and in_fp8 != (name in FP8_PRODUCTS):
        meant = "in FP8" if name in FP8_PRODUCTS else "of decoded operands"
        raise RuntimeError(f"products under {name} must be {meant} on Hopper, got {fired}")


def train_seed(
    seed: int, names: Sequence[str], arguments: Sequence[str], more_text: Sequence[Path]
) -> Runs:
    """The baseline's run and those of the recipes; ``more_text``: see `moe_block.read_text`."""
    text, runs = moe_block.read_text(*more_text), {}
    for name in names:
        runs[name] = train(name, seed, arguments, text)
        history = runs[name][0]
        print(f"seed {seed}, {name}: {history.summary()}, {history.seconds:.0f} s", flush=True)
    return runs


def train_seeds(
    seeds: int,
    names: Sequence[str],
    arguments: Sequence[str],
    jobs: int,
    more_text: Sequence[Path] = (),
) -> list[Runs]:
    """All runs, ``jobs`` seeds at a time in processes: on CUDA, small steps wait for the host."""
    of_seed = partial(train_seed, names=names, arguments=arguments, more_text=more_text)
    if jobs == 1:
        return [*map(of_seed, range(seeds))]
    os.environ["TQDM_DISABLE"] = "1"  # bars of several processes
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (threads,)) as pool:
        return [*pool.map(of_seed, range(seeds))]


def compare(runs: dict[str, list[moe_block.History]]) -> dict[str, dict[str, Any]]:
    """Final held-out losses by recipe, and their differences to the baseline's, seed by seed."""
    final = {name: [run.held_out[-1][1] for run in of_name] for name, of_name in runs.items()}
    rows = {}
    for name, losses in final.items():
        pairs = zip(losses, final["none"], strict=True)
        differences = [100 * (loss / base - 1) for loss, base in pairs]
        mean, spread = statistics.mean(differences), statistics.stdev(differences)
        target = TARGETS.get(name, PERCENT)
        rows[name] = {
            "final": losses,
            "mean": statistics.mean(losses),
            "differences_percent": differences,
            "difference_percent": mean,
            "spread_percent": spread,
            "target_percent": target,
            "met": abs(mean) < target and spread < SPREAD,
            "curves": [run.held_out for run in runs[name]],
            "seconds": [run.seconds for run in runs[name]],
        }
    return rows


def report(rows: dict[str, dict[str, Any]], baseline: str) -> None:
    """Print a table."""
    print(f"\nheld-out bits per byte at the end, and differences to {baseline} with the same seed")
    for name, row in rows.items():
        if name == "none":
            print(f"{baseline}: mean {row['mean']:.4f}")
            continue
        differences = " ".join(f"{difference:+.2f}" for difference in row["differences_percent"])
        verdict = "ok" if row["met"] else "NOT MET"
        print(
            f"{name}: mean {row['mean']:.4f}, {row['difference_percent']:+.2f} % ({differences}), "
            f"spread {row['spread_percent']:.2f} %: {verdict}, "
            f"needs less than {row['target_percent']} % and {SPREAD} %"
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
        label = baseline
        if name != "none":
            label = f"{name} ({row['difference_percent']:+.2f} ± {row['spread_percent']:.2f} %)"
        axes.plot(steps, mean, color=f"C{i}", label=label)
    axes.set(xlabel="step", ylabel="held-out loss (bits per byte)")
    axes.set_title(f"Training under recipes, {len(losses)} seeds each")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, compare, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Other options are the demo's (examples/moe_block.py).",
    )
    formats = [name for name in RECIPES if name != "none"]
    parser.add_argument("--recipes", nargs="+", choices=formats, default=formats, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each recipe, at least 2")
    parser.add_argument("--jobs", type=int, help="seeds at a time; all on CUDA, 1 on the CPU")
    parser.add_argument("--device", default="auto", help="as the demo's")
    parser.add_argument("--machine", default="", help="what to call the machine in the results")
    parser.add_argument("--out", type=Path, default=measuring.RESULTS)
    args, others = parser.parse_known_args()
    if args.seeds < 2:
        parser.error(f"--seeds must be at least 2, for a spread, got {args.seeds}")
    cpu = moe_block.pick_device(args.device).type == "cpu"
    arguments = [*(SMALL if cpu else LARGE), f"--device={args.device}", *others]
    moe_block.parse_options(arguments)  # exits where they are wrong
    start, jobs = time.perf_counter(), args.jobs or (1 if cpu else args.seeds)
    more_text = [] if cpu else [Path(torch.__file__).parent]
    found = train_seeds(args.seeds, ["none", *args.recipes], arguments, jobs, more_text)
    plans = {name: plan for name, (_, plan) in found[0].items()}
    for name, plan in plans.items():
        print(f"\n{name}: the experts' plan\n{plan}")
    rows = compare({name: [of_seed[name][0] for of_seed in found] for name in plans})
    baseline = "FP32" if cpu else "BF16"
    report(rows, baseline)
    kind = "cpu" if cpu else "cuda"
    machine = args.machine or ("CPU" if cpu else torch.cuda.get_device_name())
    results = {
        "machine": machine,
        "torch": torch.__version__,
        "arguments": arguments,
        "baseline": baseline,
        "jobs": jobs,
        "minutes": (time.perf_counter() - start) / 60,
        "recipes": rows,
        "plans": plans,
    }
    measuring.write(args.out / f"recipe_parity_{kind}.json", results)
    plot(rows, f"{baseline}, {machine}", args.out / f"recipe_parity_{kind}.png")


if __name__ == "__main__":
    main()
