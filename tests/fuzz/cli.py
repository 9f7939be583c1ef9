"""``python -m tests.fuzz``: cases by seed and number, for minutes or hours."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

import torch

from .cases import Case, InvalidError, from_json
from .execute import Outcome, run
from .generate import GENERATORS, USUAL, case_of
from .shrink import shrunk


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 if a case failed."""
    asked = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if asked.replay:
        outcome = run(from_json(asked.replay))
        print(outcome.kind, outcome.text)
        return int(outcome.kind == "failed")
    if asked.case is not None:
        kind, case = case_of(asked.seed, asked.case, asked.kind)
        return _one(kind, case, asked.shrink)
    return _many(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, in words")
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--minutes", type=float, help="for so long, rather than so many")
    parser.add_argument("--kind", action="append", choices=list(GENERATORS))
    parser.add_argument("--replay", help="a case as JSON, as a failure prints it")
    parser.add_argument("--shrink", type=int, default=3, help="shrink so many failures of a label")
    return parser


def _one(kind: str, case: Case, shrink: int) -> int:
    print(kind, case.to_json())
    outcome = _outcome(case)
    print(outcome.kind, outcome.text)
    if outcome.kind == "failed" and shrink:
        print(f"shrunk: python -m tests.fuzz --replay '{shrunk(case, outcome).to_json()}'")
    return int(outcome.kind == "failed")


def _outcome(case: Case) -> Outcome:
    try:
        return run(case)
    except InvalidError:
        return Outcome("invalid")


def _many(asked: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    labels: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    first: dict[str, int] = {}
    kinds = asked.kind or USUAL
    end = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    number = 0
    while number < asked.cases if end is None else time.monotonic() < end:
        kind, case = case_of(asked.seed, number, asked.kind)
        outcome = _outcome(case)
        counts[kind, outcome.kind] += 1
        rules.update(outcome.fired)
        if outcome.kind in ("failed", "refused", "undecided"):
            labels[outcome.label] += 1
            first.setdefault(outcome.label, number)
        if outcome.kind == "failed" and labels[outcome.label] <= asked.shrink:
            causes[_report(asked, kind, number, case, outcome)] += 1
        number += 1
    _summary(counts, labels, first, kinds)
    print("cases by rule:", ", ".join(f"{rule} {n}" for rule, n in rules.most_common()))
    for cause, n in causes.most_common():
        print(f"{n:6d} shrunk to: {cause}")
    return int(any(label.startswith("failed") for label in labels))


def _report(asked: argparse.Namespace, kind: str, number: int, case: Case, out: Outcome) -> str:
    only = "".join(f" --kind {kind}" for kind in asked.kind or ())
    print(f"FAILED {kind}: python -m tests.fuzz --seed {asked.seed}{only} --case {number}")
    print(f"  {out.text[:600]}")
    smaller = shrunk(case, out)
    print(f"  python -m tests.fuzz --replay '{smaller.to_json()}'")
    print(f"  {_outcome(smaller).text[:400]}", flush=True)
    return smaller.outline


def _summary(counts: Counter, labels: Counter, first: dict[str, int], kinds: list[str]) -> None:
    for kind in kinds:
        of_kind = {o: n for (k, o), n in sorted(counts.items()) if k == kind}
        print(f"{kind}: {', '.join(f'{n} {o}' for o, n in of_kind.items()) or 'none'}")
    for label, n in labels.most_common():
        print(f"{n:6d} {label} (first: case {first[label]})")


if __name__ == "__main__":
    sys.exit(main())
