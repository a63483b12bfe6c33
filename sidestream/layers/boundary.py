"""Calls that may be eager breaks: what a layer hands over there, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sidestream.core.eager_break import eager_break_during_capture
from sidestream.core.forward_context import get_forward_context
from sidestream.core.protocols import Boundary


def across_break(
    name: str, kind: str, body: Callable[..., torch.Tensor], *inputs: torch.Tensor | None, out: tuple[int, ...]
) -> torch.Tensor:
    """``body(*inputs)``, as an eager break where breaks are recorded.

    There the inputs are copied into static buffers by the segment that ends, and the result into one by the break, at
    each replay; ``body`` reads the step's true sizes from the forward context. Elsewhere it is a plain call, on a
    device that captures with the same contiguous layouts: a product's bits may depend on strides.

    Args:
        name: of the break, for messages.
        kind: whose buffers to use. Breaks of one kind share them, since each is through before the next begins.
        inputs: [rows, ..] each, or None.
        out: shape of the result, in the dtype of the first input.
    """
    context = get_forward_context()
    boundary = context.boundary
    if boundary is None:
        if not context.inputs.capturable:
            return body(*inputs)
        return body(*_compact(inputs)).contiguous()
    held = _hold(boundary, kind, inputs)
    assert held[0] is not None, f"break {name!r} has no tensor to begin with"
    result = boundary.take(f"{kind}, result", out, held[0].dtype)

    def run() -> None:
        result.copy_(body(*held))

    eager_break_during_capture(run, name=name)()
    return result


def break_without_result(name: str, kind: str, body: Callable[..., None], *inputs: torch.Tensor | None) -> None:
    """``across_break`` of a body that leaves its result elsewhere, in memory that lasts, and whose bits depend on no
    strides: a plain call takes the inputs as they lie."""
    boundary = get_forward_context().boundary
    if boundary is None:
        body(*inputs)
        return
    eager_break_during_capture(body, name=name)(*_hold(boundary, kind, inputs))


def _hold(boundary: Boundary, kind: str, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if x is None else boundary.hold(f"{kind}, input {i}", x) for i, x in enumerate(inputs)]


def _compact(inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in inputs]
