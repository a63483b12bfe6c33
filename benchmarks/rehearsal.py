"""Which kernels a start compiles, found without a GPU: its own steps on tensors that have shapes and no memory.

Tensors of the pretended device are torch's fake ones, so a model of any size fits. Whatever reads a value on the host
gets zeros: nothing that a step launches may depend on them. Triton specialises each launch as on the real device, and a
hook keeps what it would have compiled, without compiling or launching it.

The process pretends for good, so it is to be one of its own: ``precompile.py`` runs it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

from sidestream.cache.groups import plan_cache_groups
from sidestream.cache.pools import CachePools
from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import ResolvedConfig, resolve
from sidestream.core.batch import Chunk
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import start_runner
from sidestream.engine.compile_steps import compile_steps
from sidestream.engine.largest_steps import largest_steps
from sidestream.engine.load import Zeros, construct
from sidestream.engine.memory_probe import without_graphs
from sidestream.engine.runner import ModelRunner
from sidestream.engine.scratch_steps import run_step
from sidestream.ops.kv_rows import kv_row_layout
from sidestream.streams import InlineBackend
from sidestream.streams.backend import Graph

HOPPER = GPUTarget("cuda", 90, 32)
DEVICE_MEMORY = 140 << 30
DEVICE = torch.device("cuda", 0)
LATE = "load"
"""The stage behind the start."""
BASE = 1 << 20
"""Where every fake tensor's storage begins: aligned, as the allocator's are."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compilation.

    Attributes:
        name: of the function, with its module.
        specialised: what the compilation holds for, as Triton's own text.
        data: for ``JITFunction.preload``.
        stage: of the start that met it first.
    """

    name: str
    specialised: str
    data: str
    stage: str


class PretendedDriver:
    """Tells Triton that a Hopper GPU is there; launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def is_active(self) -> bool:
        return True


class PretendedBackend(InlineBackend):
    """Streams of the pretended device; a capture runs what it should record, a replay does nothing."""

    name = "a pretended device"
    device = DEVICE

    def __init__(self) -> None:
        super().__init__()
        self._capturing = False

    def new_pool(self) -> Any:
        return object()

    def begin_capture(self, name: str, pool: Any) -> Graph:  # type: ignore[override]
        self._capturing = True
        return Graph(name)

    def end_capture(self, graph: Graph) -> None:
        self._capturing = False

    abort_capture = end_capture

    def is_capturing(self) -> bool:
        return self._capturing

    def replay(self, graph: Graph) -> None:
        pass


class HostGenerator(torch.Generator):
    """Of random numbers for any device; they are never drawn."""

    def __new__(cls, device: object = None) -> HostGenerator:
        return super().__new__(cls)


class Pretence(TorchFunctionMode):
    """Makes fake tensors wherever the pretended device is named; tensors on the host stay real."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            if func is torch.Tensor.data_ptr:
                return BASE + first.storage_offset() * first.itemsize
            if func is torch.allclose:
                return True
            if func is torch.Tensor.__getitem__:
                return _part(first, args[1])
            if func is torch.Tensor.__setitem__:
                part, value = _part(first, args[1]), args[2]
                return _copy(part, value) if isinstance(value, torch.Tensor) else part.fill_(value)
            if func is torch.Tensor.copy_:
                return _copy(first, args[1])
            if func is torch.Tensor.__invert__:
                return first.bitwise_not()
            if func is torch.Tensor.contiguous:
                return first if first.is_contiguous() else first.clone(memory_format=torch.contiguous_format)
        kwargs.pop("pin_memory", None)
        kwargs.pop("generator", None)
        if any(_is_device(value) for value in (*args, *kwargs.values())):
            if func is torch.tensor:  # torch would follow its values, and copy them to the device
                kwargs["dtype"] = kwargs.get("dtype") or torch.tensor(first).dtype
                func, args = torch.empty, (torch.tensor(first).shape,)
            with self.fake:
                if isinstance(first, torch.Tensor) and not isinstance(first, FakeTensor):
                    args = (torch.empty(first.shape, dtype=first.dtype), *args[1:])  # its values likewise
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_device(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value == "cuda")


def _part(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]`` by operators: torch's own indexing asks for the device, which a torch without CUDA lacks."""
    indices = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [each for each in indices if not isinstance(each, torch.Tensor)]:
        at = next(i for i, each in enumerate(indices) if each is Ellipsis)
        named = sum(each is not None for each in indices) - 1
        indices = (*indices[:at], *[slice(None)] * (tensor.dim() - named), *indices[at + 1 :])
    gathered: list[torch.Tensor | None] = []
    dim = 0
    for each in indices:
        if isinstance(each, int):
            tensor = torch.ops.aten.select.int(tensor, dim, each)
            continue
        if isinstance(each, slice):
            start, stop, step = each.indices(tensor.shape[dim])
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, max(start, stop), step)
        elif each is None:
            tensor = tensor.unsqueeze(dim)
        gathered.append(each if isinstance(each, torch.Tensor) else None)
        dim += 1
    if any(each is not None for each in gathered):
        tensor = torch.ops.aten.index.Tensor(tensor, gathered)
    return tensor


_copy: Any = torch.ops.aten.copy_.default
"""Likewise."""


def _zeros(tensor: torch.Tensor) -> Any:
    """What a fake tensor holds, for the host."""
    return np.zeros(tuple(tensor.shape), dtype=np.int64).tolist()


@contextmanager
def pretended_device() -> Iterator[None]:
    """In the block there is a GPU, as far as torch's tensors, streams of ``PretendedBackend`` and Triton go.

    Raises:
        RuntimeError: kernels are interpreted in this process, so that nothing would be specialised.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    triton.runtime.driver.set_active(PretendedDriver())
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(fake_tensor, "init_gpu_context", return_value=None),  # it would allocate on a real one
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch, "Generator", HostGenerator),
        mock.patch.object(FakeTensor, "tolist", _zeros),
        Pretence(),
    ):
        yield


@contextmanager
def kernels_met(stage: Callable[[], str]) -> Iterator[dict[tuple[str, str], Kernel]]:
    """What launches in the block would compile, by name and specialisation: they compile and launch nothing."""
    found: dict[tuple[str, str], Kernel] = {}

    def keep(*, fn: Any, key: str, compile: Mapping[str, Any], **others: Any) -> bool:
        name = f"{fn.module}.{fn.name}"
        found.setdefault((name, key), Kernel(name, key, compile["specialization_data"], stage()))
        return True  # no compilation, and so no launch

    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", keep):
        yield found


def rehearse(
    config_file: Path,
    user: EngineConfig,
    *,
    every_layer: bool = False,
    load: Iterable[tuple[Sequence[Chunk], SamplingParams]] = (),
    tell: Callable[[str, int], None] = lambda stage, count: None,
) -> list[Kernel]:
    """Kernels of a start, in the order in which they are met.

    Args:
        config_file: of the model.
        user: with ``device`` "cuda"; no host pool.
        every_layer: instead of one of each kind.
        load: steps of service, once the start is over; what they compile is late.
        tell: of each stage's end, with the number of kernels so far.
    """
    config = _resolved(config_file, user, distinct=not every_layer)
    stage = ""
    with pretended_device(), kernels_met(lambda: stage) as found:
        runner = _runner(config)
        longest, vocab = config.max_model_len, config.model.vocab_size
        with runner.on_device():
            stage = "captures"
            runner.capture()
            tell(stage, len(found))
            with without_graphs(runner):
                stage = "largest steps"
                for largest in largest_steps(config, longest=longest):
                    run_step(runner, largest, vocab_size=vocab)
                tell(stage, len(found))
                stage = "steps of every kind"
                for step, params in compile_steps(config, longest=longest):
                    run_step(runner, step, vocab_size=vocab, params=params)
                tell(stage, len(found))
            stage = LATE
            for step, params in load:
                run_step(runner, step, vocab_size=vocab, params=params)
    return list(found.values())


def distinct_layers(model: ModelConfig) -> ModelConfig:
    """The model with one layer of each kind, since equal layers launch equal kernels."""
    return replace(model, layers=tuple(dict.fromkeys(model.layers)))


def _resolved(config_file: Path, user: EngineConfig, *, distinct: bool) -> ResolvedConfig:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config_file, Path(folder) / "config.json")
        model = distinct_layers(ModelConfig.from_hf(folder)) if distinct else ModelConfig.from_hf(folder)
        return resolve(user, model, cuda_available=True, device_memory=DEVICE_MEMORY)


def _runner(config: ResolvedConfig) -> ModelRunner:
    """Over weights without memory and caches of two blocks, as in the trial of a real start."""
    dtype, mla = getattr(torch, config.dtype), config.model.mla
    layout = kv_row_layout(
        config.kv_cache_dtype, latent_dim=mla.kv_lora_rank, rope_dim=mla.qk_rope_head_dim, model_dtype=dtype
    )
    groups = plan_cache_groups(
        config.model,
        block_size=config.block_size,
        row_elems=layout.row_elems,
        row_dtype=layout.dtype,
        model_dtype=dtype,
        rollback=config.rollback,
    )
    backend = PretendedBackend()
    model = construct(Zeros(), config, device=backend.device, dtype=dtype)
    pools = CachePools(groups, 2, 2, device=backend.device)
    return start_runner(
        model, config, pools, backend=backend, max_model_len=config.max_model_len, weight_bytes=1, capture=False
    )
