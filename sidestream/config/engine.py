"""What the user asks of an engine: plain values, nothing resolved."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BLOCK_SIZE = 64
DEFAULT_MAX_NUM_SEQS = 32
DEFAULT_MAX_NUM_BATCHED_TOKENS = 1024
DEFAULT_MAX_FORM_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine settings; each is a keyword of ``LLM`` and an option of the command line.

    Args:
        device: "auto" (CUDA where there is one), "cpu", "cuda", or "sim": the simulated device, which runs the steps of
            a GPU on a CPU, graphs included, many times slower, and checks the order of everything.
        dtype: of weights and activations: "auto" (float32 on a CPU, else the checkpoint's, or bfloat16 where it
            names none), "float32", "bfloat16".
        load_format: "auto" reads the checkpoint; "dummy" draws seeded weights for its config.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens a step, decodes and prefill chunks together.
        prefill_pacing: let each prompt add no more time to a step than its decodes take alone, so that a long one at
            most doubles the inter-token latency of others; chunks then depend on how fast steps are. None is True in
            a server, and False in ``LLM``, whose schedules are a function of the requests alone.
        max_model_len: longest sequence, prompt and completion; None is the model's own limit, or less where the
            cache would not fit.
        block_size: tokens a KV block; a multiple of ``index_kpool``.
        num_blocks: KV blocks; None derives them from ``memory_limit``.
        kv_cache_dtype: "auto" (rows in the engine's dtype), "bf16", "fp8_ds_mla" or "mxfp8".
        cudagraph_mode: "none", "piecewise" (graph segments with eager breaks), "full" (one graph for a uniform decode,
            none for other batches), "full_and_piecewise", or "auto": the last on a device that has graphs, "none" on a
            CPU.
        max_capture_tokens: largest batch of any mix that is captured; None is ``max_num_batched_tokens``, or 16 on the
            simulated device, and no more than a step can hold. Decodes are captured up to ``max_num_seqs``.
        stream_policy: how a wait crosses the boundary of a capture: "external" events, whole "stream" waits, or
            "auto": the first where the device has them.
        graph_debug: at every replay check that inputs lie where the graph reads them, and poison static buffers.
        memory_limit: bytes ("8GiB", an integer) or a share of the device's memory ("60%", a float up to 1); None is
            60 %. On a GPU the driver's own figure of memory in use stays within it, the CUDA context included (where
            other processes use the GPU, what this one takes); on a CPU weights and caches together do.
        enable_prefix_caching: let requests take over blocks, and state of linear attention, that others computed.
        num_prefix_snapshots: slots for copies of that state; None is two for each of ``max_num_seqs``, and no more than
            a tenth of the memory left for caches. Models without linear attention need none.
        prefix_snapshot_interval: blocks between such copies within a prompt; None takes them only where prompts end or
            part, and behind the first 128, 256, 512 and so on tokens.
        hisparse_host_memory: host memory for KV rows that leave the device when it is short of room (HiSparse): bytes
            ("64GiB") or a share of the machine's ("40%"); None keeps all rows on the device. Index keys and the state
            of linear attention always stay there.
        hisparse_hot_factor: hot slots of a sequence, for rows of its host blocks that decode selects, as a multiple of
            the model's ``index_topk``.
        hisparse_watermark: share of the device's KV blocks that is kept free, by copies to the host ahead of need.
        hisparse_staged_tokens: of context, in all, that the prefills of one step may have behind them: the device keeps
            room for so many rows of one layer. None is two of the longest sequences.
        max_form_seconds: that compiling the form of a structured output, and trying it, may take.
        seed: of requests that bring none, and of dummy weights.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    prefill_pacing: bool | None = None
    max_model_len: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    cudagraph_mode: str = "auto"
    max_capture_tokens: int | None = None
    stream_policy: str = "auto"
    graph_debug: bool = False
    memory_limit: int | float | str | None = None
    enable_prefix_caching: bool = True
    num_prefix_snapshots: int | None = None
    prefix_snapshot_interval: int | None = None
    hisparse_host_memory: int | float | str | None = None
    hisparse_hot_factor: int = 2
    hisparse_watermark: float = 0.125
    hisparse_staged_tokens: int | None = None
    max_form_seconds: float = DEFAULT_MAX_FORM_SECONDS
    seed: int = 0
