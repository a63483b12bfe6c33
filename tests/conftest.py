"""One thread for the whole suite: tiny tensors gain nothing from two, and runs beside others stay predictable."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
