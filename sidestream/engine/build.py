"""The only wiring: from settings and a checkpoint to a runner with its pools. Nothing else builds engine parts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from sidestream.attention.index_group import BlockTableResolver, SparseMLAIndexGroup, SparseMLAIndexGroupBuilder
from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import ROW_BUCKET, StepInputsBuilder
from sidestream.cache.groups import CacheGroups, plan_cache_groups
from sidestream.cache.pools import CachePools
from sidestream.config.engine import EngineConfig
from sidestream.config.model import AttentionKind, IndexerKind, ModelConfig
from sidestream.config.resolved import ResolvedConfig, resolve, resolve_cudagraph_mode
from sidestream.core.protocols import LayerObserver
from sidestream.engine.runner import ModelRunner, StepGraphs
from sidestream.errors import CapacityError
from sidestream.graphs.dispatch import GraphDispatcher
from sidestream.graphs.runner import GraphRunner
from sidestream.graphs.static_buffers import StaticBuffers
from sidestream.layers.loader import LayerLoader
from sidestream.layers.parallel import SINGLE
from sidestream.layers.weight_format import DenseFormat
from sidestream.models.decoder import DecoderModel
from sidestream.models.registry import MODELS
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout
from sidestream.streams import InlineBackend, Policy, StreamBackend, Streams
from sidestream.streams.upload import PackedUpload
from sidestream.weights import LoadReport, Shard, WeightSource, open_weights


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes that the engine holds, by part; together at most the budget."""

    weights: int
    blocks: int
    slots: int
    budget: int


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """Everything that runs steps, complete.

    Attributes:
        num_blocks, num_slots: of the pools, scratch included.
        max_model_len: longest sequence, by the model, the user and the pools.
    """

    config: ResolvedConfig
    model: DecoderModel
    runner: ModelRunner
    pools: CachePools
    load_report: LoadReport
    ledger: Ledger
    num_blocks: int
    num_slots: int
    max_model_len: int


def build_engine(
    model_path: str | os.PathLike[str], user: EngineConfig, *, backend: StreamBackend | None = None
) -> BuiltEngine:
    """Resolve the settings, load the weights, size and allocate the caches, capture graphs.

    Args:
        backend: of the device that ``user.device`` names; None makes one.
    Raises:
        ConfigError, CheckpointError: settings or files are wrong.
        CapacityError: weights or caches do not fit ``memory_limit``.
    """
    folder = Path(model_path)
    model_config = ModelConfig.from_hf(folder)
    config = resolve(
        user, model_config, cuda_available=torch.cuda.is_available(), device_memory=_device_memory(user.device)
    )
    dtype, layout = getattr(torch, config.dtype), _row_layout(config)
    groups = plan_cache_groups(
        model_config,
        block_size=config.block_size,
        row_elems=layout.row_elems,
        row_dtype=layout.dtype,
        model_dtype=dtype,
        rollback=config.rollback,
    )
    weights = weight_bytes(config, dtype)
    num_blocks, num_slots, max_model_len = size_pools(config, groups, weights=weights)
    backend = open_backend(config.device) if backend is None else backend
    model, report = load_model(folder, config, device=backend.device, dtype=dtype)
    assert _bytes_of(model) == weights, f"the weights take {_bytes_of(model)} bytes, {weights} were foreseen"
    pools = CachePools(groups, num_blocks, num_slots, device=backend.device)
    runner = start_runner(model, config, pools, backend=backend, max_model_len=max_model_len, weight_bytes=weights)
    return BuiltEngine(
        config=config,
        model=model,
        runner=runner,
        pools=pools,
        load_report=report,
        ledger=Ledger(
            weights=weights,
            blocks=num_blocks * groups.bytes_per_block,
            slots=num_slots * groups.bytes_per_slot,
            budget=config.memory_budget,
        ),
        num_blocks=num_blocks,
        num_slots=num_slots,
        max_model_len=max_model_len,
    )


def in_graph_mode(built: BuiltEngine, cudagraph_mode: str, *, observer: LayerObserver | None = None) -> BuiltEngine:
    """An engine over the same weights and pools that runs its steps in another mode; use one of them at a time.

    Waits until ``built`` is idle: a step of it that failed may have left work on streams of its own.

    Args:
        observer: sees what each decoder layer puts out, in captured graphs too; its memory is on the same device.
    """
    config = replace(built.config, cudagraph_mode=resolve_cudagraph_mode(cudagraph_mode, built.config.device))
    built.runner.settle()
    runner = start_runner(
        built.model,
        config,
        built.pools,
        backend=built.runner.streams.backend,
        max_model_len=built.max_model_len,
        weight_bytes=built.ledger.weights,
        observer=observer,
    )
    return replace(built, config=config, runner=runner)


def start_runner(
    model: DecoderModel,
    config: ResolvedConfig,
    pools: CachePools,
    *,
    backend: StreamBackend,
    max_model_len: int,
    weight_bytes: int,
    observer: LayerObserver | None = None,
) -> ModelRunner:
    """Connect a model to its caches on streams of its own, and capture."""
    policy = None if config.stream_policy is None else Policy(config.stream_policy)
    streams = Streams(backend, policy=policy)
    with backend.use(streams.compute):
        runner = wire_runner(
            model,
            config,
            pools,
            streams=streams,
            max_model_len=max_model_len,
            weight_bytes=weight_bytes,
            observer=observer,
        )
        runner.capture()
    return runner


def _row_layout(config: ResolvedConfig) -> KVRowLayout:
    mla = config.model.mla
    return kv_row_layout(
        config.kv_cache_dtype,
        latent_dim=mla.kv_lora_rank,
        rope_dim=mla.qk_rope_head_dim,
        model_dtype=getattr(torch, config.dtype),
    )


def load_model(
    folder: Path, config: ResolvedConfig, *, device: torch.device, dtype: torch.dtype
) -> tuple[DecoderModel, LoadReport]:
    """Construct the model from its checkpoint, or from seeded dummy weights."""
    source = open_weights(folder, config.model, load_format=config.load_format, seed=config.seed)
    return _construct(source, config, device=device, dtype=dtype), source.finish()


class _NoWeights:
    """A source of nothing: layers take their memory and leave it as it is."""

    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        return None

    def finish(self) -> LoadReport:
        return LoadReport((), (), {})


def weight_bytes(config: ResolvedConfig, dtype: torch.dtype) -> int:
    """Bytes that the loaded model will take: it is constructed without memory, and counted."""
    return _bytes_of(_construct(_NoWeights(), config, device=torch.device("meta"), dtype=dtype))


def _construct(
    source: WeightSource, config: ResolvedConfig, *, device: torch.device, dtype: torch.dtype
) -> DecoderModel:
    loader = LayerLoader(
        source=source, prefix="", dtype=dtype, device=device, format=DenseFormat(dtype, device), group=SINGLE
    )
    return MODELS[config.model.architecture](loader, config.model, config.max_model_len)


def size_pools(config: ResolvedConfig, groups: CacheGroups, *, weights: int) -> tuple[int, int, int]:
    """Blocks, slots (scratch included) and the longest sequence that fit the budget beside the weights.

    Blocks are as many as all ``max_num_seqs`` sequences of ``max_model_len`` could fill, or as fit.
    """
    budget = config.memory_budget
    if weights > budget:
        raise CapacityError(
            f"the weights take {weights} bytes, more than the memory budget of {budget} bytes; raise memory_limit"
        )
    num_slots = config.max_num_seqs + 1
    left = budget - weights - num_slots * groups.bytes_per_slot
    longest = -(-config.max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks + 1
    elif groups.bytes_per_block:
        num_blocks = min(config.max_num_seqs * longest + 1, max(left, 0) // groups.bytes_per_block)
    else:
        num_blocks = 1
    if left < num_blocks * groups.bytes_per_block or (config.uses_blocks and num_blocks < 2):
        needed = weights + num_slots * groups.bytes_per_slot + max(num_blocks, 2) * groups.bytes_per_block
        raise CapacityError(
            f"weights ({weights} bytes), {num_slots} state slots ({num_slots * groups.bytes_per_slot} bytes) and "
            f"{max(num_blocks, 2)} KV blocks of {groups.bytes_per_block} bytes need {needed} bytes, more than the "
            f"memory budget of {budget} bytes; raise memory_limit or lower max_num_seqs"
        )
    room = (num_blocks - 1) * config.block_size if config.uses_blocks else config.max_model_len
    if room < config.max_model_len and not config.shrink_max_model_len:
        raise CapacityError(
            f"one sequence of max_model_len {config.max_model_len} needs {longest} KV blocks of {config.block_size} "
            f"tokens, and there are {num_blocks - 1}; lower max_model_len, or raise num_blocks or memory_limit"
        )
    return num_blocks, num_slots, min(config.max_model_len, room)


def wire_runner(
    model: DecoderModel,
    config: ResolvedConfig,
    pools: CachePools,
    *,
    streams: Streams,
    max_model_len: int,
    weight_bytes: int,
    observer: LayerObserver | None = None,
) -> ModelRunner:
    """Connect a model to its caches, and to the graphs of a device that has them."""
    model_config = config.model
    graphs = None if config.device == "cpu" else step_graphs(config, streams, max_model_len=max_model_len)
    builder = StepInputsBuilder(
        block_size=config.block_size,
        conv_size=model_config.kda.conv_size if model_config.kda is not None else 0,
        kpool=config.kpool,
        rollback=config.rollback,
        max_blocks=-(-max_model_len // config.block_size),
        max_model_len=max_model_len,
    )
    if graphs is not None:
        capacity = builder.upload_elements(max_seqs=config.max_num_seqs, max_tokens=graphs.dispatcher.mixed_sizes[-1])
        upload = PackedUpload(streams.backend, capacity)
        builder = replace(builder, place=upload.place, capturable=True)
    attention = PagedLatentAttention(
        layout=_row_layout(config),
        scale=model_config.mla.softmax_scale,
        groups=index_groups(config, streams, max_model_len=max_model_len),
    )
    caches = tuple(pools.layer(i) for i in range(model_config.num_layers))
    return ModelRunner(
        model,
        caches=caches,
        attention=attention,
        builder=builder,
        streams=streams,
        graphs=graphs,
        weight_bytes=weight_bytes,
        observer=observer,
    )


def step_graphs(config: ResolvedConfig, streams: Streams, *, max_model_len: int) -> StepGraphs:
    """Which steps are captured, and where their static memory lies."""
    dispatcher = GraphDispatcher(
        config.cudagraph_mode,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len),
        max_capture_tokens=config.max_capture_tokens,
    )
    most = dispatcher.mixed_sizes[-1]
    buffers = StaticBuffers(most, streams.backend.device, fewer_rows={"logits": dispatcher.decode_sizes[-1]})
    rows = PackedUpload(streams.backend, most + ROW_BUCKET)
    return StepGraphs(dispatcher, GraphRunner(streams, buffers, debug=config.graph_debug), rows)


def index_groups(config: ResolvedConfig, streams: Streams, *, max_model_len: int) -> tuple[SparseMLAIndexGroup, ...]:
    """The model's index groups, leaders in layer order; a row is never wider than the longest sequence needs."""
    indexer = config.model.indexer
    if indexer is None:
        return ()
    builder = SparseMLAIndexGroupBuilder()
    for layer in config.model.layers_of(AttentionKind.SPARSE_MLA):
        leads = config.model.layers[layer].indexer is IndexerKind.FULL
        builder.register_layer(layer, is_index_producing_layer=leads)
    return builder.build(
        streams=streams,
        width=indexer.topk_width(max_model_len),
        decode_rows=config.max_num_seqs * (1 + config.rollback),
        resolver=BlockTableResolver(),
    )


def open_backend(device: str) -> StreamBackend:
    """Streams, events and graphs of a device named in the settings; what a device needs is imported with it."""
    if device == "cpu":
        return InlineBackend()
    if device == "sim":
        from sidestream.streams.simulated import SimulatedBackend

        return SimulatedBackend()
    from sidestream.streams.cuda import CudaBackend

    return CudaBackend()


def _device_memory(device: str) -> int:
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return int(psutil.virtual_memory().total)


def _bytes_of(model: DecoderModel) -> int:
    """Bytes of every tensor reachable from the model, shared storage counted once, allocators' rounding left out."""
    storages: dict[int, int] = {}
    pending: list[object] = [model]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            span = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True))
            extent = int(item.storage_offset() + span) + 1
            key = item.untyped_storage()._cdata
            storages[key] = max(storages.get(key, 0), extent * item.itemsize)
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif type(item).__module__.startswith("sidestream."):
            slots = getattr(type(item), "__slots__", ())
            pending.extend(vars(item).values() if hasattr(item, "__dict__") else (getattr(item, s) for s in slots))
    return sum(storages.values())
