"""The fuser's own host work in a cached call.

Counted in function calls, of Python and of C, since times on a shared machine vary by more than a
regression would; ``benchmarks/fuser_overhead.py`` measures those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: others have such names

import fuser_overhead
import other_cpu
import pytest
import torch

ADDED_CALLS = {"no grad": 214, "forward": 287, "forward + backward": 521}
"""At most: what was counted with Python 3.11 and torch 2.13, and 5 % for other versions."""
if torch.__version__ >= "2.14":  # an autograd function of the formulas calls less without gradients
    ADDED_CALLS["no grad"] = 240


def function_calls(run: Callable[[], Any]) -> int:
    """How many functions a call of ``run`` calls, when the caches are filled.

    The fewest of some calls: in others the garbage collector may run.
    """
    counts: list[int] = []

    def count(frame: Any, event: str, arg: Any) -> None:
        counts[-1] += event in ("call", "c_call")

    before = sys.getprofile()
    for _ in range(6):
        counts.append(0)
        sys.setprofile(count)
        try:
            run()
        finally:
            sys.setprofile(before)
    return min(counts)


def added_calls() -> dict[str, int]:
    """How many more functions a `Sequential` calls than the formulas of its ops."""
    calls = {
        name: function_calls(run)
        for compared in fuser_overhead.cases()
        for name, run in compared.items()
    }
    return {what: calls[f"Sequential, {what}"] - calls[f"plain, {what}"] for what in ADDED_CALLS}


@pytest.mark.skipif(not other_cpu.is_nearest(), reason="--other-cpu computes sums in Python")
def test_a_cached_call_adds_few_function_calls_to_its_formulas() -> None:
    """In a process of its own: what other tests leave behind adds some."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    counted = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
    )
    added = json.loads(counted.stdout)
    assert all(added[what] <= most for what, most in ADDED_CALLS.items()), added


if __name__ == "__main__":
    sys.stdout.write(json.dumps(added_calls()))
