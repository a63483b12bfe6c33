"""The script that runs all GPU benchmarks: its table, and what it does with one that fails."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.gpu_bench import Bench, benches, run, table_of, timings
from benchmarks.kernels import bench_moe, results

KERNELS = Path(__file__).parents[1] / "benchmarks" / "kernels"


def test_every_kernel_benchmark_is_run() -> None:
    named = [part for bench in benches() for part in bench.arguments]
    for path in KERNELS.glob("bench_*.py"):
        assert f"benchmarks/kernels/{path.name}" in named
    assert all("OUT" in bench.arguments for bench in benches())
    assert len({bench.name for bench in benches()}) == len(benches())


def test_the_fastest_launch_stands_in_the_table() -> None:
    rows = [{"tokens": t, "heads": 64, "us": us, "floor": 2.0, "bar": 9} for t, us in ((1, 8.0), (1, 6.0), (8, 20.0))]
    found = {"times": rows, "more": {"deep": [{"shape": "x", "us": 1.5, "bar_us": 2}]}}
    assert len(list(timings(found))) == 4
    lines = table_of("mla", found)
    assert len(lines) == 3
    assert "tokens 1, heads 64" in lines[0]
    assert "6.00 us  bar 9  3.00 x floor" in lines[0]
    assert lines[2].endswith("1.50 us  bar 2")


def test_decodes_stand_beside_their_floor() -> None:
    decode = [{"batch": 8, "context": 8192, "median": 4.5, "to_floor": 1.05, "vllm_ms": 4.86}]
    lines = table_of("A", {"decode": decode, "prefill": [{"tokens": 8192, "tokens_per_s": 81234.5}]})
    assert "4.500 ms   1.05 x floor  vLLM 0.33 4.86 ms" in lines[0]
    assert "81,234 tokens/s" in lines[1] or "81,235 tokens/s" in lines[1]


def test_a_failure_is_kept_with_its_reason() -> None:
    found = run(Bench("broken", ("-c", "import sys; sys.exit('no such device')", "OUT")), 60)
    assert found["result"] is None
    assert "no such device" in found["wrong"]
    slow = run(Bench("slow", ("-c", "import time; time.sleep(60)", "OUT")), 0.4)
    assert slow["wrong"].startswith("at its limit of 0 s")
    fine = run(Bench("fine", ("-c", "import sys; open(sys.argv[1], 'w').write('[1]')", "OUT")), 60)
    assert (fine["wrong"], fine["result"]) == ("", [1])


def test_results_of_kernels_are_written_where_they_can_be(tmp_path: Path) -> None:
    """Said before anything is measured, and not when all is."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"there is no folder {tmp_path}/none"):
        results.out_file(str(tmp_path / "none" / "out.json"))
    path = results.out_file(str(tmp_path / "out.json"))
    for found in ({"rows": [1]}, {"rows": [1, 2]}):
        results.keep(path, found)
        assert json.loads(path.read_text()) == found


def test_a_report_is_written_after_each_row(tmp_path: Path) -> None:
    report = bench_moe.Report(out=tmp_path / "out.json")
    shape = bench_moe.Shape("a shape", 2.0, 1, 1)
    for count in (1, 2):
        report.add(shape, f"variant {count}", lambda call: None, lambda: 1.0)
        assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == count
