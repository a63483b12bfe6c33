"""Flags of ``vllm serve`` that have another name here, or none: what an error says about them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_PARALLEL = "tensor parallelism is not here yet, a server has one GPU"
_PARSER = "give --answer-parser; auto, the default, goes by the checkpoint's architecture"
HINTS = {
    "--tensor-parallel-size": _PARALLEL,
    "-tp": _PARALLEL,
    "--pipeline-parallel-size": "pipeline parallelism is not here yet, a server has one GPU",
    "--data-parallel-size": "start one server a GPU, with CUDA_VISIBLE_DEVICES",
    "--gpu-memory-utilization": "give --memory-limit, as '60%' or '80GiB'",
    "--num-gpu-blocks-override": "give --num-blocks",
    "--enable-prefix-caching": "give --prefix-caching, which is the default",
    "--no-enable-prefix-caching": "give --no-prefix-caching",
    "--enable-chunked-prefill": "prefills are always chunked; --max-num-batched-tokens bounds a chunk",
    "--enforce-eager": "give --cudagraph-mode none",
    "--cpu-offload-gb": "weights stay on the device; --hisparse-host-memory is for KV rows",
    "--tool-call-parser": _PARSER,
    "--reasoning-parser": _PARSER,
    "--enable-auto-tool-choice": "tools need no flag",
    "--allowed-origins": "give --cors-origin, once for each",
    "--disable-log-requests": "give --no-access-log; prompts are never logged",
    "--no-enable-log-requests": "give --no-access-log; prompts are never logged",
    "--enable-log-requests": "give --access-log, which is the default; prompts are never logged",
    "--disable-uvicorn-access-log": "give --no-access-log",
    "--disable-log-stats": "the line every 10 seconds stays; --no-access-log leaves out the lines of requests",
    "--trust-remote-code": "code of a checkpoint is never run; leave it out",
    "--quantization": "the checkpoint's config says how weights are stored; leave it out",
}


def hint(arguments: Sequence[str], known: Collection[str]) -> str | None:
    """About the first of vLLM's flags that a command does not know; what follows ``--`` is not the command's."""
    for word in arguments:
        if word == "--":
            return None
        name = word.partition("=")[0]
        if name in HINTS and name not in known:
            return f"{name} is a flag of vLLM's: {HINTS[name]}"
    return None
