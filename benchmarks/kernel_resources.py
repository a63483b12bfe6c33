"""What the compiler says of each kernel of a plan's starts, without a GPU: registers, spills, shared memory, how many
programs a multiprocessor of an H200 holds, and which instructions do the work.

    PYTHONPATH=. python benchmarks/kernel_resources.py benchmarks/plans/whole-engine.json --json resources.json

Starts are rehearsed and compiled as by ``precompile.py``; binaries are taken apart by the ``cuobjdump`` of Triton's
package. Counts are static: how often an instruction stands in the code, and how often between a branch backwards and
its target, that is in a loop. A loop that was unrolled whole counts as none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from benchmarks.kernels.results import out_file
from benchmarks.precompile import Start, begin, kernels_of, starts_of
from benchmarks.rehearsal import Kernel

REGISTERS, WARPS, PROGRAMS = 65_536, 64, 32
SHARED, SHARED_A_PROGRAM = 228 << 10, 1 << 10
"""Of a multiprocessor of compute capability 9.0: what its programs share, and what the driver takes of each."""
REGISTERS_AT_ONCE, SHARED_AT_ONCE = 256, 128
"""How finely they are handed out: registers a warp, bytes a program."""

_WIDTH = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
_MEMORY = {"LDG", "STG", "LDGSTS", "LDS", "STS", "LDL", "STL"}
_KINDS = {
    "HMMA": "mma",
    "IMMA": "mma",
    "HGMMA": "wgmma",
    "QGMMA": "wgmma",
    "UBLKCP": "bulk copy",
    "UTMALDG": "bulk copy",
    "BAR": "barrier",
    "MUFU": "special",
    "DFMA": "fp64",
    "DADD": "fp64",
    "DMUL": "fp64",
    "DSETP": "fp64",
    "FFMA": "FFMA",
    "SHFL": "shuffle",
    "ATOMG": "atomic",
    "RED": "atomic",
}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)((?:\.[A-Z0-9_]+)*)\s*([^;]*);")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Code:
    """Instructions of a kernel.

    Attributes:
        instructions: how many there are, ``in_loops`` those of them that stand in one.
        counts: by kind, and for memory by width in bits: how many, and how many in loops.
        spilled: bytes that its instructions store to and load from local memory, each counted once.
        turns: how often a load of global memory comes behind a store. Compilers do not move it ahead, so where nothing
            else runs meanwhile each turn is a trip to memory.
    """

    instructions: int
    in_loops: int
    counts: dict[str, tuple[int, int]]
    spilled: tuple[int, int]
    turns: int


@dataclass(frozen=True, slots=True)
class Resources:
    """One compilation. ``resident`` programs fit a multiprocessor, ``limit`` says what allows no more."""

    function: str
    constants: str
    starts: str
    stage: str
    registers: int
    stack: int
    shared: int
    warps: int
    resident: int
    limit: str
    code: Code


def read_code(listing: str) -> Code:
    """Of what ``cuobjdump -sass`` prints of one kernel."""
    found = [(int(at, 16), name, parts.split(".")[1:], rest) for at, name, parts, rest in _INSTRUCTION.findall(listing)]
    loops = _loops(found)
    counts: dict[str, list[int]] = {}
    spilled = Counter[str]()
    inside = turns = 0
    stored = False
    for at, name, parts, _ in found:
        if name == "NOP":
            continue
        kind = _KINDS.get(name)
        if name in _MEMORY:
            width = next((_WIDTH[part] for part in parts if part in _WIDTH), 32)
            kind = f"{name}.{width}"
            spilled[name] += width // 8
        turns += stored and name == "LDG"
        stored = name == "STG" or (stored and name != "LDG")
        looped = any(first <= at <= last for first, last in loops)
        inside += looped
        if kind is not None:
            count = counts.setdefault(kind, [0, 0])
            count[0] += 1
            count[1] += looped
    total = sum(name != "NOP" for _, name, _, _ in found)
    by_kind = {kind: (a, b) for kind, (a, b) in sorted(counts.items())}
    return Code(total, inside, by_kind, (spilled["STL"], spilled["LDL"]), turns)


def _loops(found: Sequence[tuple[int, str, list[str], str]]) -> list[tuple[int, int]]:
    """First and last address of each. Neither the loop in which warps with roles wait for one, whose branch crosses a
    change of registers, nor what stands behind the end: ways back from waits that were moved there."""
    changes = [at for at, name, _, _ in found if name == "USETMAXREG"]
    ended = max((at for at, name, _, _ in found if name == "EXIT"), default=0)
    loops = []
    for at, name, _, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" and at < ended else None
        if target is not None and int(target[1], 16) < at:
            first = int(target[1], 16)
            if not any(first <= change <= at for change in changes):
                loops.append((first, at))
    return loops


def residency(registers: int, shared: int, warps: int) -> tuple[int, str]:
    """(programs that a multiprocessor holds at once, what is used up then)."""

    def up(amount: int, step: int) -> int:
        return -(-amount // step) * step

    limits = {
        "registers": REGISTERS // (up(32 * registers, REGISTERS_AT_ONCE) * warps),
        "shared memory": SHARED // up(shared + SHARED_A_PROGRAM, SHARED_AT_ONCE),
        "warps": WARPS // warps,
        "programs": PROGRAMS,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def constants_of(kernel: Kernel, names: Sequence[str]) -> str:
    """Numbers and flags that the code was made for, as text; ``names`` of the function's arguments."""
    data = json.loads(kernel.data)
    found = {}
    for (at, *_), value in zip(data["constant_keys"], data["constant_vals"], strict=True):
        found[names[at] if isinstance(at, int) else at] = value["constexpr"] if isinstance(value, dict) else value
    found |= {name: data["options"][name] for name in ("num_warps", "num_stages", "maxnreg") if data["options"][name]}
    return ", ".join(f"{name}={value}" for name, value in found.items())


def resources_of(kernel: Kernel, starts: str = "") -> Resources:
    """Compile it, in a process that ``begin`` was called in, and take it apart.

    Raises:
        FileNotFoundError: Triton's package has no ``cuobjdump``.
    """
    module, _, name = kernel.name.rpartition(".")
    function = getattr(import_module(module), name)
    compiled = function.preload(kernel.data)
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        commands = ([tool, "-res-usage", file.name], [tool, "-sass", file.name])
        usage, listing = (subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in commands)
    numbers = _USAGE.search(usage)
    assert numbers is not None, f"no usage of {kernel.name} in {usage!r}"
    registers, stack = int(numbers[1]), int(numbers[2]) + int(numbers[4])
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", compiled.asm["ptx"])  # with warps that a kernel adds to its own
    warps = int(threads[1]) // 32 if threads else compiled.metadata.num_warps
    resident, limit = residency(registers, compiled.metadata.shared, warps)
    return Resources(
        kernel.name.removeprefix("sidestream.ops."),
        constants_of(kernel, function.arg_names),
        starts,
        kernel.stage,
        registers,
        stack,
        compiled.metadata.shared,
        warps,
        resident,
        limit,
        read_code(listing),
    )


def resources(starts: Iterable[Start], *, workers: int) -> list[Resources]:
    """Of every kernel of the starts once, with the names of those that launch it."""
    spawn = get_context("spawn")
    of: dict[tuple[str, str], tuple[Kernel, set[str]]] = {}
    with ProcessPoolExecutor(workers, spawn, max_tasks_per_child=1) as rehearsals:
        starts = list(starts)
        for start, kernels in zip(starts, rehearsals.map(kernels_of, starts), strict=True):
            for kernel in kernels:
                of.setdefault((kernel.name, kernel.specialised), (kernel, set()))[1].add(start.config.stem)
    with ProcessPoolExecutor(workers, spawn, begin) as compilers:
        tasks = [compilers.submit(resources_of, kernel, ", ".join(sorted(names))) for kernel, names in of.values()]
        return sorted((task.result() for task in tasks), key=lambda one: (one.function, one.constants))


def shown(one: Resources) -> str:
    """A line of the table."""
    code = one.code
    counts = " ".join(f"{kind}:{a}/{b}" if b else f"{kind}:{a}" for kind, (a, b) in code.counts.items())
    spills = f" SPILLS {code.spilled[0]}+{code.spilled[1]}" if any(code.spilled) or one.stack else ""
    return (
        f"{one.function} [{one.constants}]\n    {one.registers} registers{spills}, {one.shared} B shared, "
        f"{one.warps} warps, {one.resident} resident ({one.limit}), {code.turns} turns, "
        f"{code.instructions}/{code.in_loops}: {counts}"
    )


def written(found: Sequence[Resources], about: Mapping[str, Any]) -> str:
    """JSON with a kernel a line."""
    lines = ",\n".join("  " + json.dumps(asdict(one)) for one in found)
    return json.dumps(about)[:-1] + ', "kernels": [\n' + lines + "\n]}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="part of a function's name")
    parser.add_argument("--json", type=out_file)
    args = parser.parse_args()
    starts = starts_of(args.plans)
    if not starts:
        parser.error("these plans start no engine whose kernels could be compiled")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there is not to be asked
    found = resources(starts, workers=args.workers)
    for one in found:
        if args.only in one.function:
            print(shown(one))
    spilling = [one.function for one in found if any(one.code.spilled)]
    print(f"{len(found)} kernels, {len(spilling)} of them spill: {', '.join(sorted(set(spilling))) or 'none'}")
    if args.json:
        args.json.write_text(
            written(found, {"triton": triton.__version__, "target": "sm_90a", "counts": "all, in loops"})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
