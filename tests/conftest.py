"""One thread for the whole suite: tiny tensors gain nothing from two, and runs beside others stay predictable.

Importing ``triton_mode`` chooses how Triton kernels run, before anything imports Triton. Whatever is marked ``gpu`` is
skipped where there is none, here and not in each module: one that forgot to ask would fail everywhere else.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops import triton_mode

torch.set_num_threads(1)
assert triton_mode.DEVICE in ("cpu", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
