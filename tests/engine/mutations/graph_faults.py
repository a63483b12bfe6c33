"""Faults of streams, captures and uploads: work that nothing orders, memory and values that a graph keeps."""

from __future__ import annotations

from sidestream.errors import GraphError
from sidestream.streams.simulated import DeviceError
from tests.engine.mutations.fault import (
    ATTENDED_EARLY,
    BOTH,
    FULL,
    INDEXER,
    NONE,
    PIECES,
    REWRITTEN,
    Fault,
)
from tests.engine.mutations.findings import OtherTokens, Refused, StrayIndices, Unordered
from tests.engine.mutations.sites import Edit
from tests.engine.mutations.subject import Workload


def _on_another_stream(streams: str, statement: str) -> str:
    """The statement of a function's own level, issued to a stream that nothing orders."""
    return f"with {streams}.backend.use({streams}.new_stream('another')):\n        {statement}"


LATENT, CORE, KDA = "attention/latent.py", "engine/core.py", "layers/kda.py"
SPARSE_MLA = (
    "out, _ = sparse_mla(query, pool, rows, counts=counts, scale=scale, layout=layout, with_lse=False, out_rows=size)"
)
WRITE_ROWS = "write_rows(pool, inputs.slot_mapping[:rows], latent, rope=rope_key, layout=self._layout)"
LOGITS = "logits = self._runner.logits(output, last_rows)"
SAMPLE = "pending = self._sampled.keep(self._sampler.choose(logits, rows, bitmask=bitmask))"
MIX = "return self._mix(projected, inputs=inputs, cache=cache)"

OTHER_STREAMS = (
    Fault(
        "a third consumer of the physical rows",
        (Edit(LATENT, "PagedLatentAttention._sparse", SPARSE_MLA, _on_another_stream("group._streams", SPARSE_MLA)),),
        NONE,
        ATTENDED_EARLY,
    ),
    Fault(
        "KV rows written on another stream",
        (
            Edit(
                LATENT,
                "PagedLatentAttention.attend",
                WRITE_ROWS,
                _on_another_stream("self._groups[0]._streams", WRITE_ROWS),
            ),
        ),
        NONE,
        Unordered("read after write", "write_rows", "_attend"),
    ),
    Fault(
        "logits on another stream than the model",
        (Edit(CORE, "EngineCore._sample", LOGITS, _on_another_stream("self._runner.streams", LOGITS)),),
        BOTH,
        Unordered("read after write", "hold", "logits"),
    ),
    Fault(
        "sampler on another stream than the logits",
        (
            Edit(
                CORE,
                "EngineCore._sample",
                SAMPLE,
                _on_another_stream("self._runner.streams", SAMPLE),
            ),
        ),
        BOTH,
        Unordered("read after write", "logits", "draw_tokens"),
    ),
    Fault(
        "linear attention on another stream",
        (
            Edit(
                KDA,
                "KimiDeltaAttention._attend",
                MIX,
                _on_another_stream("context.attention.groups[0]._streams", MIX),  # the layer itself knows no stream
            ),
        ),
        Workload("none", "KD"),
        Unordered("read after write", "linear", "short_conv"),
    ),
)

BOUNDARY, UPLOAD = "layers/boundary.py", "streams/upload.py"
MADE_IN_CAPTURE = "topk = selected.shape[1]"

CAPTURES = (
    Fault(
        "a host read in a full graph",
        (Edit(INDEXER, "Indexer._select", MADE_IN_CAPTURE, f"int(inputs.positions.max()); {MADE_IN_CAPTURE}"),),
        FULL,
        Refused(DeviceError, ("not permitted",), ("_select", "_capture_full")),
    ),
    Fault(
        "a constant brought from the host in a segment",
        (
            Edit(
                INDEXER,
                "Indexer._select",
                MADE_IN_CAPTURE,
                f"torch.tensor([1.0], device=key.device); {MADE_IN_CAPTURE}",
            ),
        ),
        PIECES,
        Refused(DeviceError, ("not permitted",), ("_select", "_begin_segment")),
    ),
    Fault(
        "linear attention of any batch left in the segment",
        (
            Edit(
                KDA,
                "KimiDeltaAttention.__call__",
                'across_break(f"KDA of layer {self.layer}", "KDA", self._attend, projected, out=(x.shape[0], width))',
                "self._attend(projected)",
            ),
        ),
        Workload("full_and_piecewise", "KD"),
        Refused(DeviceError, ("not permitted",), ("_lay_out", "_begin_segment")),
    ),
    Fault(
        "indexer of any batch left in the segment",
        (Edit(INDEXER, "Indexer.__call__", "if get_forward_context().inputs.uniform:", "if True:"),),
        BOTH,
        StrayIndices(),
    ),
    Fault(
        "a body keeps the row count of its capture",
        (
            Edit(
                KDA,
                "KimiDeltaAttention._mix",
                "lengths=tuple(segment.length for segment in inputs.segments)",
                "lengths=(vars(self).setdefault(f'rows of {len(projected)}', inputs.num_tokens),)",
            ),
        ),
        Workload("full_and_piecewise", "KD"),
        Refused(RuntimeError, ("invalid for input", "in eager break 'KDA of layer 0' of capture 'piecewise")),
    ),
    Fault(
        "selection by the lengths of the warm-up",
        (
            Edit(
                INDEXER,
                "Indexer._select",
                "context_lens=inputs.context_lens",
                "context_lens=vars(self).setdefault(f'{rows}', inputs.context_lens.clone())",
            ),
        ),
        FULL,
        OtherTokens(),
    ),
    Fault(
        "padded rows of a break's result left unwritten",
        (
            Edit(
                BOUNDARY,
                "across_break",
                "result.copy_(body(*held))",
                "rows = get_forward_context().inputs.mixer_rows; result[:rows].copy_(body(*held)[:rows])",
            ),
        ),
        BOTH,
        Refused(AssertionError, ("padding rows",)),
    ),
    Fault(
        "result of a break in memory of its own",
        (Edit(BOUNDARY, "across_break", "result.copy_(body(*held))", "nonlocal result; result = body(*held).clone()"),),
        BOTH,
        Unordered("released memory in a graph", "by_head", "run"),
    ),
    Fault(
        "a static buffer first made in a capture",
        (Edit("engine/runner.py", "ModelRunner.capture", "runner.warm_up(self._forward_of(plan))", "pass"),),
        BOTH,
        Refused(AssertionError, ("static buffer", "first asked for inside a capture")),
    ),
)

SYNCHRONIZE = "self._backend.synchronize_event(copied)"
COPY, RECORD = "self._device[:end].copy_(host[:end], non_blocking=True)", "self._backend.record(copied)"
MOVE = f"self._device = torch.zeros_like(self._device); self._view.cache_clear(); {COPY}"
MOVED = (Edit(UPLOAD, "PackedUpload.place", COPY, MOVE),)

UPLOADS = (
    Fault(
        "one page-locked buffer that nobody waits for",
        (
            Edit(UPLOAD, "PackedUpload.place", SYNCHRONIZE, "pass"),
            Edit(UPLOAD, "PackedUpload.place", "turn = self._calls % len(self._hosts)", "turn = 0"),
        ),
        NONE,
        REWRITTEN,
    ),
    Fault(
        "the copy's event recorded before the copy",
        (
            Edit(UPLOAD, "PackedUpload.place", RECORD, "pass"),
            Edit(UPLOAD, "PackedUpload.place", COPY, f"{RECORD}; {COPY}"),
        ),
        NONE,
        REWRITTEN,
    ),
    Fault(
        "inputs uploaded to another address",
        MOVED,
        BOTH,
        Refused(GraphError, ("'positions', 'token_ids'", "at the address it was captured with")),
    ),
    Fault(
        "inputs uploaded to another address, unchecked",
        MOVED,
        Workload("full_and_piecewise", debug=False),
        Unordered("released memory in a graph", "__call__"),
    ),
)
