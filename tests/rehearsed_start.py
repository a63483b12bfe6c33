"""Run by ``test_rehearsal.py`` in a process of its own: it pretends that there is a GPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_key

from benchmarks.rehearsal import HOPPER, LATE, Kernel, rehearse
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import SCRATCH_SLOT, Chunk, Split
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.compile_steps import SAMPLINGS
from sidestream.engine.scratch_steps import scratch_chunk

Step = tuple[Sequence[Chunk], SamplingParams]

SMALL: dict[str, Any] = {
    "device": "cuda",
    "cudagraph_mode": "full_and_piecewise",
    "load_format": "dummy",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_capture_tokens": 8,
    "max_model_len": 32768,
    "memory_limit": "100GiB",
}


class NotedError(Exception):
    """A compilation was asked for, and is not carried out."""


def key_of(source: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    """Triton's own name for a compilation in its cache on disk."""
    backend = triton.compiler.compiler.make_backend(target)
    return str(get_cache_key(source, backend, backend.parse_options(dict(options)), {}))


def differences(kernels: list[Kernel], launched: dict[tuple[str, str], str]) -> list[str]:
    """Kernels whose compilation from plain data would not be found by a launch."""
    wrong, keys = [], []

    def note(source: Any, target: GPUTarget, options: dict[str, Any], **others: Any) -> None:
        keys.append(key_of(source, target, options))
        raise NotedError

    for kernel in kernels:
        module, _, name = kernel.name.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        function.device_caches[0]
        keys.clear()
        with mock.patch.object(function, "compile", note), contextlib.suppress(NotedError):
            function.preload(kernel.data)
        if keys != [launched[kernel.name, kernel.specialised]]:
            wrong.append(kernel.name)
    return wrong


def service(count: int, *, sequences: int, tokens: int, longest: int, block_size: int) -> Iterator[Step]:
    """Steps as requests of all kinds would make them: decodes, and chunks of prompts, at contexts of all sizes; some
    chunks leave states behind the blocks within them."""
    draw = random.Random(11)

    def chunk(length: int, *, decode: bool) -> Chunk:
        start = draw.randrange(int(decode), context - length + 1)
        made = scratch_chunk(block_size, draw.choice((start, start, int(decode))), length, decode=decode)
        places = [place for place in range(made.start + 1, made.end) if place % block_size == 0]
        splits = tuple(Split(place, SCRATCH_SLOT) for place in places)
        return made if decode or made.start % 2 else replace(made, splits=splits)

    for _ in range(count):
        context = max(int(2 ** draw.uniform(0, math.log2(longest))), 2)  # the most of this step's sequences
        decodes = draw.choice((0, 1, draw.randint(0, sequences), sequences))
        step = [chunk(1, decode=True) for _ in range(decodes)]
        room = tokens - decodes
        for _ in range(draw.randint(0 if decodes else 1, max(sequences - decodes, 0 if decodes else 1))):
            if room > 0:
                length = min(room, context - 1, int(2 ** draw.uniform(0, math.log2(tokens + 1))))
                step.append(chunk(max(length, 1), decode=False))
                room -= max(length, 1)
        yield step, draw.choice(SAMPLINGS)


def main() -> None:
    launched: dict[tuple[str, str], str] = {}
    real = triton.JITFunction._do_compile

    def launch(
        self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warm: Any
    ) -> Any:
        source = self.ASTSource(self, signature, constexprs, attrs)
        launched.setdefault(
            (f"{self.module}.{self._fn_name.rpartition('.')[2]}", key), key_of(source, HOPPER, options.__dict__)
        )
        return real(self, key, signature, device, constexprs, options, attrs, warm)

    limits = {"sequences": SMALL["max_num_seqs"], "tokens": SMALL["max_num_batched_tokens"]}
    load = service(60, **limits, longest=SMALL["max_model_len"], block_size=64)
    with mock.patch.object(triton.JITFunction, "_do_compile", launch):
        kernels = rehearse(Path(sys.argv[1]), EngineConfig(**SMALL), load=load)
    found = {
        "counts": Counter(kernel.name.rpartition(".")[2] for kernel in kernels),
        "stages": Counter(kernel.stage for kernel in kernels),
        "late": [f"{kernel.name} {kernel.specialised}" for kernel in kernels if kernel.stage == LATE],
        "unlike": differences(kernels, launched),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
