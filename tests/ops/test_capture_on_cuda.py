"""The same calls in captures of a real GPU: replays with other inputs give what eager calls give, bit for bit."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.operator import OPERATORS
from sidestream.streams import Streams
from sidestream.streams.cuda import CudaBackend
from tests.ops.operator_case import (
    Arguments,
    Case,
    Results,
    call,
    map_tensors,
    overwrite,
    results_of,
    rows_named,
    same,
    spoil,
)
from tests.ops.operator_cases import CASES

pytestmark = pytest.mark.gpu


def settled(case: Case, arguments: Arguments, returned: tuple[torch.Tensor, ...]) -> Results:
    """Results on the host, without rows that several tokens were written to: which one stays is not defined."""
    results = []
    for name, tensor in results_of(case, arguments, returned):
        host = tensor.cpu()
        rows = rows_named(case, arguments, name, written=True)
        if rows is not None:
            writers = torch.bincount(rows.cpu(), minlength=host.shape[0])
            host = host[writers < 2]
        results.append((name, host))
    return results


@pytest.mark.parametrize("case", [case for case in CASES if case.captured], ids=lambda case: case.name)
def test_captured_equals_eager(case: Case) -> None:
    variants, operator = [case.make(seed) for seed in (0, 1)], OPERATORS[case.operator]
    backend = CudaBackend()
    streams = Streams(backend)
    streams.begin_step()
    want = []
    with backend.use(streams.compute):
        for arguments in variants:
            own = map_tensors(arguments, lambda tensor: tensor.to(backend.device))
            want.append(settled(case, own, call(operator, own)))
        buffers = map_tensors(variants[0], lambda tensor: tensor.to(backend.device))
        with streams.capture(case.operator) as graph:
            returned = call(operator, buffers)
        for which in (0, 1, 0):
            overwrite(buffers, variants[which])
            spoil(returned)
            graph.replay()
            for (name, got), (_, expected) in zip(settled(case, buffers, returned), want[which], strict=True):
                assert same(got, expected), f"{name} differs in a replay of variant {which}"
