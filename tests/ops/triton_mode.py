"""How Triton kernels run in tests: on the GPU where there is one, else on the CPU in Triton's interpreter.

Triton reads the variable when it is first imported, and other libraries import it too, so ``tests/conftest.py``
imports this module before any test module is collected.
"""

from __future__ import annotations

import os
import sys

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
"""Where the tensors of a kernel test live."""

if INTERPRETED:
    early = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
    assert not early, "triton was imported before its interpreter was chosen"
    os.environ.setdefault("TRITON_INTERPRET", "1")
