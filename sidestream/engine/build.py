"""The only wiring: from settings and a checkpoint to a runner with its pools. Nothing else builds engine parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sidestream.attention.index_group import BlockTableResolver, SparseMLAIndexGroup, SparseMLAIndexGroupBuilder
from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import ROW_BUCKET, StepInputsBuilder
from sidestream.cache.groups import CacheGroups, plan_cache_groups
from sidestream.cache.hisparse import HiSparseRuntime
from sidestream.cache.host_pool import require_room
from sidestream.cache.hosted_rows import HOT_TABLES, HostedRows
from sidestream.cache.pools import CachePools
from sidestream.config.engine import EngineConfig
from sidestream.config.model import AttentionKind, IndexerKind, ModelConfig
from sidestream.config.resolved import ResolvedConfig, resolve, resolve_cudagraph_mode
from sidestream.core.batch import SCRATCH_SLOT, SlotCopy
from sidestream.core.protocols import LayerObserver
from sidestream.engine.backends import kernels_made_ready, memory_size, open_backend
from sidestream.engine.compile_steps import compile_steps
from sidestream.engine.device_memory import DeviceMemory
from sidestream.engine.held_bytes import bytes_of
from sidestream.engine.hosting import open_hisparse
from sidestream.engine.largest_steps import largest_steps
from sidestream.engine.ledger import CONTEXT, WEIGHTS, Ledger, in_use
from sidestream.engine.load import Zeros, construct, load_model, weight_bytes
from sidestream.engine.memory_probe import foresee, make_ready
from sidestream.engine.pool_plan import plan_pools
from sidestream.engine.runner import ModelRunner, StepGraphs
from sidestream.engine.startup_clock import CONFIG, StartupClock
from sidestream.graphs.dispatch import GraphDispatcher, StepPlan
from sidestream.graphs.runner import GraphRunner
from sidestream.graphs.static_buffers import StaticBuffers
from sidestream.models.decoder import DecoderModel
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout
from sidestream.streams import Policy, StreamBackend, Streams
from sidestream.streams.upload import PackedUpload
from sidestream.weights import LoadReport, open_weights


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """Everything that runs steps, complete.

    Attributes:
        ledger: as of start.
        num_blocks, num_slots: of the pools, scratch included; with a host pool more blocks than the device has places.
        num_snapshots: slots behind them that hold copies of state for the prefix cache.
        max_model_len: longest sequence, by the model, the user and the pools.
        startup: phase -> seconds, in order; the first begins with the process.
        memory: of a CUDA device.
        kernels_at_ready: how many Triton had made ready when the engine was.
    """

    config: ResolvedConfig
    model: DecoderModel
    runner: ModelRunner
    pools: CachePools
    load_report: LoadReport
    ledger: Ledger
    num_blocks: int
    num_slots: int
    num_snapshots: int
    max_model_len: int
    weight_bytes: int
    startup: Mapping[str, float]
    memory: DeviceMemory | None = None
    kernels_at_ready: int = 0

    def compiled_after_ready(self) -> tuple[str, ...]:
        """Kernels that no warm-up met, so that a request had to wait for them; see ``compilations``."""
        return kernels_made_ready(self.config.device)[self.kernels_at_ready :]

    def ledger_now(self) -> Ledger:
        """The ledger as of start, beside what is in use now."""
        return replace(self.ledger, in_use=in_use(self.memory))


def build_engine(
    model_path: str | os.PathLike[str],
    user: EngineConfig,
    *,
    backend: StreamBackend | None = None,
    clock: StartupClock | None = None,
) -> BuiltEngine:
    """Resolve the settings, load the weights, size and allocate the caches, capture graphs.

    Args:
        backend: of the device that ``user.device`` names; None makes one.
        clock: of a start that goes on behind this; None makes one, which ends here.
    Raises:
        ConfigError, CheckpointError: settings or files are wrong.
        CapacityError: weights or caches do not fit ``memory_limit``.
    """
    timed = clock if clock is not None else StartupClock()
    timed.begin(CONFIG)
    folder = Path(model_path)
    model_config = ModelConfig.from_hf(folder)
    config = resolve(
        user, model_config, cuda_available=torch.cuda.is_available(), device_memory=memory_size(user.device)
    )
    if config.host_memory:
        require_room(config.host_memory)
    dtype, layout = getattr(torch, config.dtype), row_layout(config)
    groups = plan_cache_groups(
        model_config,
        block_size=config.block_size,
        row_elems=layout.row_elems,
        row_dtype=layout.dtype,
        model_dtype=dtype,
        rollback=config.rollback,
    )
    weights = weight_bytes(config, dtype)
    backend = open_backend(config.device) if backend is None else backend
    kernels_made_ready(config.device)
    source = open_weights(folder, model_config, load_format=config.load_format, seed=config.seed)
    memory = _device_memory(backend)
    foreseen = {} if memory is None else _foresee(config, groups, backend, memory, weights=weights, clock=timed)
    plan = plan_pools(config, groups, weights=weights, beside=foreseen)
    timed.begin("weights", total=weights)
    model, report = load_model(source, config, device=backend.device, dtype=dtype, on_bytes=timed.advance)
    assert bytes_of(model) == weights, f"the weights take {bytes_of(model)} bytes, {weights} were foreseen"
    timed.begin("caches")
    rows = None if plan.hosted is None else HostedRows(groups, plan.hosted, plan.places, device=backend.device)
    pools = CachePools(
        groups,
        plan.num_blocks,
        plan.num_slots,
        device=backend.device,
        num_snapshots=plan.num_snapshots,
        hosted=rows,
    )
    runner = start_runner(
        model,
        config,
        pools,
        backend=backend,
        max_model_len=plan.max_model_len,
        weight_bytes=weights,
        capture=memory is None,
        clock=timed,
    )
    caches = groups.bytes_by_kind(plan.num_blocks, plan.num_slots, kv_places=plan.places)
    predicted = {WEIGHTS: weights, **plan.beside, **caches}
    measured = {WEIGHTS: weights, **pools.bytes_by_kind()}
    if runner.hisparse is not None:
        measured[HOT_TABLES] = runner.hisparse.table_bytes
    if memory is not None:
        measured |= make_ready(
            runner,
            largest_steps(config, longest=plan.max_model_len),
            memory,
            vocab_size=model_config.vocab_size,
            counted=sum(measured.values()),
            on_capture=_counted_captures(runner, timed),
            on_captured=lambda: timed.begin("largest steps"),
        )
        memory.enforce(config.memory_budget)
    if clock is None:
        timed.end()
    return BuiltEngine(
        config=config,
        model=model,
        runner=runner,
        pools=pools,
        load_report=report,
        ledger=Ledger.of(predicted, measured, budget=config.memory_budget, memory=memory),
        num_blocks=plan.num_blocks,
        num_slots=plan.num_slots,
        num_snapshots=plan.num_snapshots,
        max_model_len=plan.max_model_len,
        weight_bytes=weights,
        startup=timed.phases,
        memory=memory,
        kernels_at_ready=len(kernels_made_ready(config.device)),
    )


def _foresee(
    config: ResolvedConfig,
    groups: CacheGroups,
    backend: StreamBackend,
    memory: DeviceMemory,
    *,
    weights: int,
    clock: StartupClock,
) -> dict[str, int]:
    """Bytes beside weights and caches, before a byte of the checkpoint is read.

    Raises:
        CapacityError: what is known already does not fit.
    """
    # More will count in the end; snapshots that are not asked for give way to it.
    known = replace(config, num_snapshots=config.num_snapshots or 0)
    longest = plan_pools(known, groups, weights=weights, beside={CONTEXT: memory.context}).max_model_len
    clock.begin("memory probe")
    memory.lift()
    dtype = getattr(torch, config.dtype)

    def trial() -> ModelRunner:
        model = construct(Zeros(), config, device=backend.device, dtype=dtype)
        pools = CachePools(groups, 2, 2, device=backend.device)
        return start_runner(
            model,
            config,
            pools,
            backend=backend,
            max_model_len=config.max_model_len,
            weight_bytes=weights,
            capture=False,
        )

    return foresee(
        trial,
        largest_steps(config, longest=longest),
        memory,
        vocab_size=config.model.vocab_size,
        counted=weights + groups.bytes_total(2, 2),
        first=clock.counted("compile", compile_steps(config, longest=longest), then="memory probe"),
    )


def in_graph_mode(built: BuiltEngine, cudagraph_mode: str, *, observer: LayerObserver | None = None) -> BuiltEngine:
    """An engine over the same weights and pools that runs its steps in another mode; use one of them at a time.

    Waits until ``built`` is idle: a step of it that failed may have left work on streams of its own.

    Args:
        observer: sees what each decoder layer puts out, in captured graphs too; its memory is on the same device.
    """
    config = replace(built.config, cudagraph_mode=resolve_cudagraph_mode(cudagraph_mode, built.config.device))
    built.runner.settle()
    if built.memory is not None:
        built.memory.lift()  # it foresaw one set of graphs
    runner = start_runner(
        built.model,
        config,
        built.pools,
        backend=built.runner.streams.backend,
        max_model_len=built.max_model_len,
        weight_bytes=built.weight_bytes,
        observer=observer,
    )
    return replace(built, config=config, runner=runner, kernels_at_ready=len(kernels_made_ready(config.device)))


def start_runner(
    model: DecoderModel,
    config: ResolvedConfig,
    pools: CachePools,
    *,
    backend: StreamBackend,
    max_model_len: int,
    weight_bytes: int,
    observer: LayerObserver | None = None,
    capture: bool = True,
    clock: StartupClock | None = None,
) -> ModelRunner:
    """Connect a model to its caches on streams of its own, and capture, which is a phase of ``clock``."""
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
        if config.prefix_caching and config.needs_snapshots:
            pools.copy_slots([SlotCopy(SCRATCH_SLOT, SCRATCH_SLOT)])  # compiles: no step does, until there is a hit
        if capture and runner.graphs is not None:
            runner.capture(None if clock is None else _counted_captures(runner, clock))
    return runner


def _counted_captures(runner: ModelRunner, clock: StartupClock) -> Callable[[StepPlan], None]:
    """Begin the phase of captures, to be told of each."""
    assert runner.graphs is not None, "there is nothing to capture"
    return clock.counting("graphs", len(runner.graphs.dispatcher.captures()))


def row_layout(config: ResolvedConfig) -> KVRowLayout:
    """How an engine of this config keeps its KV rows."""
    mla = config.model.mla
    return kv_row_layout(
        config.kv_cache_dtype,
        latent_dim=mla.kv_lora_rank,
        rope_dim=mla.qk_rope_head_dim,
        model_dtype=getattr(torch, config.dtype),
    )


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
    hisparse = open_hisparse(config, pools, streams, max_blocks=builder.max_blocks)
    if hisparse is not None:
        builder = replace(builder, kv_places=hisparse)
    if graphs is not None:
        capacity = builder.upload_elements(max_seqs=config.max_num_seqs, max_tokens=graphs.dispatcher.mixed_sizes[-1])
        upload = PackedUpload(streams.backend, capacity)
        builder = replace(builder, place=upload.place, capturable=True)
    attention = PagedLatentAttention(
        layout=row_layout(config),
        scale=model_config.mla.softmax_scale,
        groups=index_groups(config, streams, max_model_len=max_model_len, hisparse=hisparse),
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
        hisparse=hisparse,
    )


def step_graphs(config: ResolvedConfig, streams: Streams, *, max_model_len: int) -> StepGraphs:
    """Which steps are captured, and where their static memory lies."""
    dispatcher = GraphDispatcher(
        config.cudagraph_mode,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len),
        max_capture_tokens=config.max_capture_tokens,
    )
    most = max((plan.key.tokens for plan in dispatcher.captures()), default=1)
    buffers = StaticBuffers(most, streams.backend.device, fewer_rows={"logits": dispatcher.decode_sizes[-1]})
    rows = PackedUpload(streams.backend, dispatcher.mixed_sizes[-1] + ROW_BUCKET)
    return StepGraphs(dispatcher, GraphRunner(streams, buffers, debug=config.graph_debug), rows)


def index_groups(
    config: ResolvedConfig, streams: Streams, *, max_model_len: int, hisparse: HiSparseRuntime | None = None
) -> tuple[SparseMLAIndexGroup, ...]:
    """The model's index groups, leaders in layer order; a row is never wider than the longest sequence needs."""
    indexer = config.model.indexer
    if indexer is None:
        return ()
    builder = SparseMLAIndexGroupBuilder()
    for layer in config.model.layers_of(AttentionKind.SPARSE_MLA):
        leads = config.model.layers[layer].indexer is IndexerKind.FULL
        builder.register_layer(layer, is_index_producing_layer=leads)
    decode_rows = config.max_num_seqs * (1 + config.rollback)
    groups = builder.build(
        streams=streams,
        width=indexer.topk_width(max_model_len),
        decode_rows=decode_rows,
        resolver=BlockTableResolver(),
    )
    for group in groups:
        if hisparse is None:
            break
        resolver = hisparse.new_group(decode_rows)
        group.resolver = resolver
        group.fetch_with(resolver)
    return groups


def _device_memory(backend: StreamBackend) -> DeviceMemory | None:
    """Readings of a CUDA device."""
    return DeviceMemory(backend.device) if backend.device.type == "cuda" else None
