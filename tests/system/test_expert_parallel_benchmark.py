"""``benchmarks/expert_parallel.py`` on two processes, without GPUs."""

import json
import os
import subprocess
import sys

import pytest
from scripts import ROOT, torchrun
from torch import distributed as dist

SCRIPT = ROOT / "benchmarks" / "expert_parallel.py"


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
def test_every_part_runs(tmp_path):
    """Values agree, all ways are timed, and the results are written and drawn."""
    path = tmp_path / "found.json"
    torchrun(SCRIPT, "--tiny", f"--json={path}")
    found = json.loads(path.read_text())
    assert found["failures"] == []
    compared = found["correctness"]
    for way in ("all", "tokens", "rows", "all-to-all path"):
        for case in ("even", "uneven", "none on the first"):
            cell = compared[way][case]
            assert all(of["error"] < 1e-2 for of in cell.values()), (way, case)
            assert way != "rows" or all(of["same bits"] for of in cell.values()), case
    assert compared["one process against FP32"] < 1e-2
    assert found["skew"]["of the mean"] == pytest.approx(1.5, abs=0.1)
    assert set(found["ratios"]) == set(found["wire"]) == {"all", "tokens", "rows"}
    assert set(found["stack"]["ms a block"]) == {"16", "64"}
    # In a process of its own: modules of examples and of the tests have the names of benchmarks.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, SCRIPT, f"--draw={path}"], check=True, env=environment)
    assert (tmp_path / "found.png").stat().st_size > 10_000
