"""What bounds the Hopper kernels: bytes, tensor cores, occupancy, from Nsight Compute's counters.

    python benchmarks/sm90_profile.py [--config NAME] [--split SPLIT] [--out FILE]

Needs ``ncu`` and the permission to read performance counters. Clocks are left as they are, caches
are flushed before each kernel.
"""

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from grouped_gemm_sm90 import fusible_calls
from measuring import CONFIGS, SPLITS, environment, parser_of, split_sizes, tensors, write

# Column: counter. Those that the installed version does not know are left out.
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "GHz": "sm__cycles_elapsed.avg.per_second",
    "DRAM read": "dram__bytes_read.sum",
    "DRAM written": "dram__bytes_write.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 to SM %": "l1tex__m_xbar2l1tex_read_sectors.avg.pct_of_peak_sustained_elapsed",
    "SM to L2 %": "l1tex__m_l1tex2xbar_write_sectors.avg.pct_of_peak_sustained_elapsed",
    "L1/shared %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "shared banks read %": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "shared banks written %": "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",
    "tensor %": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor instructions %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "warps/SM": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    "blocks/SM, registers": "launch__occupancy_limit_registers",
    "blocks/SM, shared": "launch__occupancy_limit_shared_mem",
    "shared bytes": "launch__shared_mem_per_block",
}


def target(config: str, split: str) -> None:
    """Run every kernel once warm, then once profiled."""
    shape = CONFIGS[config]
    calls = fusible_calls(tensors(shape, split_sizes(shape, split)))
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for name, call in calls.items():
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.nvtx.range_push(name)
        call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        torch.cuda.cudart().cudaProfilerStop()


def known(ncu: str) -> dict[str, str]:
    """The counters that this version of ``ncu`` has."""
    listed = subprocess.run(
        [ncu, "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, check=True
    )
    names = set(re.findall(r"^(\w+__\w+)", listed.stdout, re.MULTILINE))
    return {
        column: counter
        for column, counter in COUNTERS.items()
        if counter.startswith("launch__") or counter.split(".")[0] in names
    }


def profile(config: str, split: str) -> list[dict[str, str]]:
    """A row of counters for each kernel of each call."""
    ncu = shutil.which("ncu") or next(map(str, Path("/usr/local").glob("cuda*/bin/ncu")), None)
    if ncu is None:
        raise SystemExit("ncu must be installed; it comes with the CUDA toolkit")
    counters = known(ncu)
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--cache-control", "all", "--profile-from-start", "off", "--nvtx"]
    command += ["--print-nvtx-rename", "kernel", "--metrics", ",".join(counters.values())]
    command += [sys.executable, __file__, "--target", "--config", config, "--split", split]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"ncu measured nothing:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]  # the first: units
    return [
        {"kernel": row["Kernel Name"][:40]}
        | {column: row.get(counter, "") for column, counter in counters.items()}
        for row in rows
    ]


def main() -> None:
    """Profile and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", default="qwen3-30b", choices=list(CONFIGS))
    parser.add_argument("--split", default="balanced", choices=SPLITS)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        target(options.config, options.split)
        return
    rows = profile(options.config, options.split)
    for row in rows:
        print("  ".join(f"{column} {value}" for column, value in row.items()))
    report = {"environment": environment(), "config": options.config, "split": options.split}
    write(options.out, {**report, "kernels": rows})


if __name__ == "__main__":
    main()
