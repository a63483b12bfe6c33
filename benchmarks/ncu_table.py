"""What Nsight Compute measured of each kernel, as a table and a small file.

    PYTHONPATH=. python benchmarks/ncu_table.py build/o/ncu/ncu.csv [OUT.json]

The file is what ``ncu --csv`` prints of sections SpeedOfLight, MemoryWorkloadAnalysis, Occupancy, LaunchStats and
WarpStateStats, as job ``ncu`` of ``plans/checks.json`` writes it. Launches of one kernel with the same grid and threads
share a line, their figures are means. Under ``ncu`` each launch runs alone behind an emptied L2 cache, and none starts
early, so microseconds are longer than in a step.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.kernels.results import out_file

METRICS = {
    "us": "Duration",
    "memory_%": "DRAM Throughput",
    "l2_%": "L2 Cache Throughput",
    "l1_%": "L1/TEX Cache Throughput",
    "compute_%": "Compute (SM) Throughput",
    "warps_%": "Achieved Occupancy",
    "warps_that_fit_%": "Theoretical Occupancy",
    "registers": "Registers Per Thread",
    "cycles_an_instruction": "Warp Cycles Per Issued Instruction",
    "waves": "Waves Per SM",
}
"""Names in the table, and Nsight Compute's."""
SCALES = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
"""Units of a duration in microseconds."""


def kernels_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """A line for each kernel, grid and number of threads, the longest in all first.

    Raises:
        ValueError: there is no kernel in the text.
    """
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        one = launches.setdefault(
            row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "threads": row["Block Size"]}
        )
        for name, theirs in METRICS.items():
            if row["Metric Name"] == theirs:
                one[name] = float(row["Metric Value"].replace(",", "")) * SCALES.get(row["Metric Unit"], 1.0)
    if not launches:
        raise ValueError("no kernel: this is not what `ncu --csv` prints")
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in launches.values():
        alike.setdefault((one["kernel"], one["grid"], one["threads"]), []).append(one)
    found = []
    for (kernel, grid, threads), ones in alike.items():
        means = {name: round(fmean(one[name] for one in ones), 2) for name in METRICS if all(name in o for o in ones)}
        found.append({"kernel": kernel, "grid": grid, "threads": threads, "launches": len(ones), **means})
    return sorted(found, key=lambda line: -line["launches"] * line.get("us", 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("out", nargs="?", type=out_file)
    args = parser.parse_args()
    found = kernels_of(args.csv.read_text().splitlines())
    print(f"{'kernel':<20} {'grid':<16} {'launches':>8} " + " ".join(f"{name:>9.9}" for name in METRICS))
    for line in found:
        figures = " ".join(f"{line[name]:9.1f}" if name in line else f"{'-':>9}" for name in METRICS)
        print(f"{line['kernel']:<20.20} {line['grid']:<16} {line['launches']:>8} {figures}")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
