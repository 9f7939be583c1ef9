"""The fuser's own host work in a cached call.

Counted in function calls, of Python and of C, since times on a shared machine vary by more than a
regression would; ``benchmarks/fuser_overhead.py`` measures those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: others have such names

import fuser_overhead
import other_cpu
import pytest

ADDED_CALLS = {"no grad": 204, "forward": 258, "forward + backward": 454}
"""At most: what was counted with Python 3.11 and torch 2.13, and 5 % for other versions."""


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


@pytest.mark.skipif(not other_cpu.is_nearest(), reason="--other-cpu computes sums in Python")
def test_a_cached_call_adds_few_function_calls_to_its_formulas() -> None:
    calls = {
        name: function_calls(run)
        for compared in fuser_overhead.cases()
        for name, run in compared.items()
    }
    added = {what: calls[f"Sequential, {what}"] - calls[f"plain, {what}"] for what in ADDED_CALLS}
    assert all(added[what] <= most for what, most in ADDED_CALLS.items()), added
