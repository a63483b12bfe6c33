"""One thread for the whole suite: tiny tensors gain nothing from two, and runs beside others stay predictable.

Importing ``triton_mode`` chooses how Triton kernels run, before anything imports Triton.
"""

from __future__ import annotations

import torch

from tests.ops import triton_mode

torch.set_num_threads(1)
assert triton_mode.DEVICE in ("cpu", "cuda")
