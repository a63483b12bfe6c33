"""Foresees what an engine takes beside weights and caches: captures a few of its graphs and runs its largest steps.

That is done before a byte of the checkpoint is read, with weights of zero and caches of two blocks, since neither
changes how much memory a step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sidestream.core.batch import Chunk
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.device_memory import DeviceMemory, release
from sidestream.engine.ledger import (
    ACTIVATIONS,
    CONTEXT,
    FIXED,
    GRAPHS,
    KEPT,
    LIBRARIES,
    RESERVE,
    SLACK,
    STATIC,
)
from sidestream.engine.runner import ModelRunner
from sidestream.engine.scratch_steps import run_step
from sidestream.graphs.dispatch import GraphDispatcher, StepPlan

RESERVE_BYTES = 128 * 2**20
"""Kept free for what differs between the trial and the engine: kernels of sizes that the trial does not run."""


def make_ready(
    runner: ModelRunner,
    steps: Sequence[Sequence[Chunk]],
    memory: DeviceMemory,
    *,
    vocab_size: int,
    counted: int,
    shapes: Sequence[StepPlan] | None = None,
    on_capture: Callable[[StepPlan], None] | None = None,
    on_captured: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """Capture, then run steps; afterwards every kernel is there, and the allocator holds what steps need.

    Args:
        steps: on scratch sequences, the largest among them.
        counted: bytes of the weights and caches.
        shapes: to capture; None is all of them.
        on_capture: told of each shape when it is captured.
        on_captured: called between the captures and the steps.
    Returns:
        Bytes of every part but weights and caches: together the driver's figure.
    """
    release()
    before, beside = memory.segments(), memory.beside_torch()
    with runner.on_device():
        runner.capture(on_capture, shapes=shapes)
        nodes = memory.beside_torch() - beside
        on_captured()
        for step in steps:
            run_step(runner, step, vocab_size=vocab_size)
    after = memory.segments()
    static = 0 if runner.graphs is None else runner.graphs.runner.buffers.nbytes
    return {
        CONTEXT: memory.context,
        LIBRARIES: memory.beside_torch() - memory.context - nodes,
        FIXED: before.live - counted,
        KEPT: after.live - before.live - static,
        ACTIVATIONS: after.free - before.free,
        STATIC: static,
        GRAPHS: after.pools - before.pools + nodes,
        SLACK: before.free,
    }


def telling_shapes(runner: ModelRunner, steps: Sequence[Sequence[Chunk]]) -> tuple[StepPlan, ...]:
    """The largest of each mode, which take nearly all of the pool, and those of the steps, in order of capture."""
    if runner.graphs is None:
        return ()
    dispatcher = runner.graphs.dispatcher
    chosen: dict[CUDAGraphMode, StepPlan] = {}
    for shape in dispatcher.captures():
        chosen.setdefault(shape.mode, shape)
    needed = set(chosen.values())
    for step in steps:
        tokens = sum(chunk.length for chunk in step)
        plan = dispatcher.plan(tokens, uniform=all(chunk.is_decode and chunk.length == 1 for chunk in step))
        if plan.mode is not CUDAGraphMode.NONE:
            needed.add(plan)
    return tuple(sorted(needed, key=lambda plan: plan.key, reverse=True))


def foresee(
    make: Callable[[], ModelRunner],
    steps: Sequence[Sequence[Chunk]],
    memory: DeviceMemory,
    *,
    vocab_size: int,
    counted: int,
    first: Iterable[tuple[Sequence[Chunk], SamplingParams]] = (),
) -> dict[str, int]:
    """Bytes of every part but weights and caches, by name.

    Args:
        make: a runner over weights of zero and the smallest caches.
        steps: that the engine will be made ready with.
        first: other steps, run once in the process, so that their kernels are compiled and counted.
        counted: bytes of those weights and caches.
    """
    runner = make()
    with without_graphs(runner), runner.on_device():
        for step, params in first:
            run_step(runner, step, vocab_size=vocab_size, params=params)
    shapes = telling_shapes(runner, steps)
    parts = make_ready(runner, steps, memory, vocab_size=vocab_size, counted=counted, shapes=shapes)
    del runner
    release()
    left = memory.segments().live  # constants that the engine will use too, and workspaces of streams that are gone
    libraries = memory.beside_torch() - memory.context
    return parts | {KEPT: left + parts[KEPT], LIBRARIES: libraries, RESERVE: RESERVE_BYTES}


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    """Steps of the block run kernel by kernel, whatever graphs the runner will have, padded as ever."""
    graphs = runner.graphs
    if graphs is not None:
        sizes = graphs.dispatcher
        plain = GraphDispatcher(
            "none",
            max_num_seqs=sizes.decode_sizes[-1],
            max_num_batched_tokens=sizes.mixed_sizes[-1],
            max_capture_tokens=sizes.largest_mixed,
        )
        runner.graphs = replace(graphs, dispatcher=plain)
    try:
        yield
    finally:
        runner.graphs = graphs
