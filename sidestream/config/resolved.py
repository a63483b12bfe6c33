"""What the engine will do: every cross-check of settings, checkpoint and machine, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from sidestream.config.engine import DEFAULT_MAX_FORM_SECONDS, EngineConfig
from sidestream.config.memory_size import MOST, parse_memory
from sidestream.config.model import AttentionKind, ModelConfig
from sidestream.errors import ConfigError

DTYPES = ("float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8_ds_mla", "mxfp8")
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("cpu", "cuda", "sim")
CUDAGRAPH_MODES = ("none", "piecewise", "full", "full_and_piecewise")
STREAM_POLICIES = ("external", "stream")
SIMULATED_CAPTURE_TOKENS = 16
"""Largest batch of any mix that the simulated device captures by default: each size costs it seconds."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Settings that fit together.

    Attributes:
        memory_budget: bytes: on a GPU of everything in use on it, elsewhere of weights and caches.
        stream_policy: None takes the best that the device can do.
        shrink_max_model_len: the user named none, so it may be lowered to what the pools hold.
        prefill_pacing: whoever serves decides what the user left open, before this.
        prefix_caching: off too where no layer keeps KV rows.
        num_snapshots: of the state of linear attention; None is derived from the memory left.
        snapshot_interval: blocks between them within a prompt; None for none there.
        host_memory: bytes of the host pool of HiSparse; 0 without one.
        hot_factor: hot slots of a sequence in multiples of ``index_topk``.
        watermark: share of the device's blocks that is kept free with a host pool.
        staged_tokens: of context behind the prefills of one step; None is two of the longest sequences.
        max_form_seconds: for the form of a structured output to be compiled and tried.
        rollback: tokens that a sequence may take back (0 without speculation).
    """

    model: ModelConfig
    device: str
    dtype: str
    load_format: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    shrink_max_model_len: bool
    block_size: int
    num_blocks: int | None
    kv_cache_dtype: str
    cudagraph_mode: str
    max_capture_tokens: int
    stream_policy: str | None
    graph_debug: bool
    memory_budget: int
    seed: int
    prefill_pacing: bool = False
    prefix_caching: bool = False
    num_snapshots: int | None = None
    snapshot_interval: int | None = None
    host_memory: int = 0
    hot_factor: int = 2
    watermark: float = 0.125
    staged_tokens: int | None = None
    max_form_seconds: float = DEFAULT_MAX_FORM_SECONDS
    rollback: int = 0

    @property
    def kpool(self) -> int:
        return self.model.indexer.kpool if self.model.indexer is not None else 1

    @property
    def uses_blocks(self) -> bool:
        """Some layer keeps KV rows."""
        return bool(_mla_layers(self.model))

    @property
    def needs_snapshots(self) -> bool:
        """A prefix is of use only with the state behind it; an unfinished index pool is empty at the end of a block."""
        return self.model.kda is not None

    @property
    def uses_slots(self) -> bool:
        """Some layer keeps state a sequence: a KDA layer, or an indexer with an unfinished pool."""
        return self.model.kda is not None or self.kpool > 1


def resolve(user: EngineConfig, model: ModelConfig, *, cuda_available: bool, device_memory: int) -> ResolvedConfig:
    """Check the user's settings against the model and the machine.

    Args:
        device_memory: bytes of the device that the engine would use.
    Raises:
        ConfigError: naming the value, the limit, where it comes from and the knob.
    """
    device = ("cuda" if cuda_available else "cpu") if user.device == "auto" else user.device
    _one_of("device", device, DEVICES, auto=True)
    if device == "cuda" and not cuda_available:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; use device='cpu'")
    dtype = user.dtype
    if dtype == "auto":
        wanted = model.dtype if model.dtype in DTYPES else "bfloat16"  # what such models are served in
        dtype = str(wanted) if device == "cuda" else "float32"
    _one_of("dtype", dtype, DTYPES, auto=True)
    _one_of("load_format", user.load_format, LOAD_FORMATS)
    _one_of("kv_cache_dtype", user.kv_cache_dtype, KV_CACHE_DTYPES)
    mode = resolve_cudagraph_mode(user.cudagraph_mode, device)
    policy = None if user.stream_policy == "auto" else user.stream_policy
    if policy is not None:
        _one_of("stream_policy", policy, STREAM_POLICIES, auto=True)
    if not isinstance(user.graph_debug, bool):
        raise ConfigError(f"graph_debug must be True or False, got {user.graph_debug!r}")
    if user.kv_cache_dtype == "mxfp8" and model.mla.qk_rope_head_dim:
        raise ConfigError(
            f"kv_cache_dtype 'mxfp8' has no place for a rope part, and this model has qk_rope_head_dim "
            f"{model.mla.qk_rope_head_dim}; use 'fp8_ds_mla', 'bf16' or 'auto'"
        )
    if not isinstance(user.enable_prefix_caching, bool):
        raise ConfigError(f"enable_prefix_caching must be True or False, got {user.enable_prefix_caching!r}")
    if user.prefill_pacing is not None and not isinstance(user.prefill_pacing, bool):
        raise ConfigError(f"prefill_pacing must be True, False or None, got {user.prefill_pacing!r}")
    snapshots = user.num_prefix_snapshots
    if snapshots is not None and (isinstance(snapshots, bool) or not isinstance(snapshots, int) or snapshots < 0):
        raise ConfigError(f"num_prefix_snapshots must be an integer of at least 0, got {snapshots!r}")
    optional = ("max_model_len", "num_blocks", "max_capture_tokens", "prefix_snapshot_interval")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", *optional):
        value = getattr(user, name)
        if value is None and name in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")
    seconds = user.max_form_seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= 86400:
        raise ConfigError(f"max_form_seconds must be a number from 0.001 to 86400 (a day), got {seconds!r}")
    if isinstance(user.seed, bool) or not isinstance(user.seed, int):
        raise ConfigError(f"seed must be an integer, got {user.seed!r}")
    if user.max_num_batched_tokens < user.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {user.max_num_batched_tokens} is smaller than max_num_seqs {user.max_num_seqs}: "
            "each running sequence decodes one token a step; raise the first or lower the second"
        )
    kpool = model.indexer.kpool if model.indexer is not None else 1
    if user.block_size % kpool:
        raise ConfigError(f"block_size {user.block_size} is not a multiple of the model's index_kpool {kpool}")
    limit = model.max_position_embeddings
    if user.max_model_len is not None and user.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {user.max_model_len} is larger than the model's max_position_embeddings {limit}"
        )
    return ResolvedConfig(
        model=model,
        device=device,
        dtype=dtype,
        load_format=user.load_format,
        max_num_seqs=user.max_num_seqs,
        max_num_batched_tokens=user.max_num_batched_tokens,
        max_model_len=user.max_model_len or limit,
        shrink_max_model_len=user.max_model_len is None,
        block_size=user.block_size,
        num_blocks=user.num_blocks,
        kv_cache_dtype=user.kv_cache_dtype,
        cudagraph_mode=mode,
        max_capture_tokens=min(
            user.max_capture_tokens or (SIMULATED_CAPTURE_TOKENS if device == "sim" else user.max_num_batched_tokens),
            user.max_num_batched_tokens,
        ),
        stream_policy=policy,
        graph_debug=user.graph_debug,
        memory_budget=parse_memory(user.memory_limit, device_memory),
        seed=user.seed,
        prefill_pacing=bool(user.prefill_pacing),
        prefix_caching=user.enable_prefix_caching and bool(_mla_layers(model)),
        num_snapshots=user.num_prefix_snapshots,
        snapshot_interval=user.prefix_snapshot_interval,
        host_memory=_host_memory(user, model),
        hot_factor=user.hisparse_hot_factor,
        watermark=user.hisparse_watermark,
        staged_tokens=user.hisparse_staged_tokens,
        max_form_seconds=float(seconds),
    )


def check(user: EngineConfig, model: ModelConfig) -> None:
    """Refuse what ``resolve`` would refuse on every machine, without knowing this one's GPU.

    Raises:
        ConfigError: as ``resolve`` does.
    """
    there = int(psutil.virtual_memory().total) if user.device in ("cpu", "sim") else MOST
    resolve(user, model, cuda_available=True, device_memory=there)


def _host_memory(user: EngineConfig, model: ModelConfig) -> int:
    """Bytes of the host pool.

    Raises:
        ConfigError: a layer reads all of its context, so that no row is ever cold; or a wrong setting.
    """
    factor = user.hisparse_hot_factor
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
        raise ConfigError(f"hisparse_hot_factor must be a positive integer, got {factor!r}")
    share = user.hisparse_watermark
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"hisparse_watermark must be a share from 0 to 1, got {share!r}")
    staged = user.hisparse_staged_tokens
    if staged is not None and (isinstance(staged, bool) or not isinstance(staged, int) or staged < 1):
        raise ConfigError(f"hisparse_staged_tokens must be a positive integer or None, got {staged!r}")
    if user.hisparse_host_memory is None:
        return 0
    dense = model.layers_of(AttentionKind.DENSE_MLA)
    if dense or not model.layers_of(AttentionKind.SPARSE_MLA):
        why = f"layers {dense} read their whole context" if dense else "no layer has KV rows"
        raise ConfigError(
            f"hisparse_host_memory is {user.hisparse_host_memory!r}, but {why}, so nothing of it is cold; leave it out"
        )
    total = int(psutil.virtual_memory().total)
    return parse_memory(user.hisparse_host_memory, total, name="hisparse_host_memory")


def _mla_layers(model: ModelConfig) -> tuple[int, ...]:
    return model.layers_of(AttentionKind.SPARSE_MLA, AttentionKind.DENSE_MLA)


def resolve_cudagraph_mode(asked: object, device: str) -> str:
    """One of ``CUDAGRAPH_MODES`` for a device; ConfigError if it cannot run there."""
    mode = asked.lower() if isinstance(asked, str) else asked
    if mode == "auto":
        return "none" if device == "cpu" else "full_and_piecewise"
    _one_of("cudagraph_mode", mode, CUDAGRAPH_MODES, auto=True)
    if device == "cpu" and mode != "none":
        raise ConfigError(
            f"cudagraph_mode is {asked!r}, but device is 'cpu', where work runs at once and there are no graphs; use "
            "'none' or 'auto', or device 'cuda' or 'sim'"
        )
    return str(mode)


def _one_of(name: str, value: object, allowed: tuple[str, ...], *, auto: bool = False) -> None:
    if value not in allowed:
        choices = ("auto", *allowed) if auto else allowed
        raise ConfigError(f"{name} is {value!r}, allowed are {', '.join(map(repr, choices))}")
