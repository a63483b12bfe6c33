"""Run by ``test_step_operators.py`` in a process of its own: it pretends that there is a GPU, and lists what torch does
there in a captured decode, and in a step with a prompt, besides launching kernels of ours."""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import rehearsal
from sidestream.config.engine import EngineConfig
from sidestream.engine.memory_probe import without_graphs
from sidestream.engine.scratch_steps import scratch_chunk
from tests.rehearsed_start import SMALL


class Operators(TorchDispatchMode):
    """Counts those that launch something, by name and the module of ours that called them: no views, no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, FakeTensor) and result.is_cuda and "empty" not in str(func):
            shared = [given for given in args if isinstance(given, FakeTensor) and _memory(given) == _memory(result)]
            if func._schema.is_mutable or not shared:
                frames = [frame.filename for frame in traceback.extract_stack() if "/sidestream/" in frame.filename]
                self.found[f"{func} of {frames[-1].rpartition('/sidestream/')[2]}"] += 1
        return result


def _memory(tensor: FakeTensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def main() -> None:
    settings = EngineConfig(**{**SMALL, "max_num_seqs": 8})
    config = rehearsal._resolved(Path(sys.argv[1]), settings, distinct=True)
    with (
        rehearsal.pretended_device(),
        rehearsal.kernels_met(lambda: ""),
    ):
        runner = rehearsal._runner(config)
        assert runner.graphs is not None
        with runner.on_device():
            shapes = [plan for plan in runner.graphs.dispatcher.captures() if plan.key.uniform and plan.key.tokens == 8]
            runner.capture(shapes=shapes)  # constants and static buffers are there now
            with Operators() as decode:
                runner.graphs.runner._captured.clear()
                runner.capture(shapes=shapes)
            chunks = [scratch_chunk(config.block_size, 5000, 1, decode=True)] * 3
            chunks.append(scratch_chunk(config.block_size, 5000, 40, decode=False))  # padded, since 43 is no bucket
            tokens = [0] * sum(chunk.length for chunk in chunks)
            with without_graphs(runner), torch.inference_mode():
                runner.forward(chunks, tokens)
                with Operators() as prompt:
                    runner.forward(chunks, tokens)
    print(json.dumps({"decode": decode.found, "prompt": prompt.found}))


if __name__ == "__main__":
    main()
