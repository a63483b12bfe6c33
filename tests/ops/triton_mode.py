"""How Triton kernels run in tests: on the GPU where there is one, else on the CPU in Triton's interpreter.

Triton reads the variable when it is first imported, and other libraries import it too, so ``tests/conftest.py``
imports this module before any test module is collected.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
"""Where the tensors of a kernel test live."""


def _let_scalars_bound_loops() -> None:
    """The interpreter of Triton 3.6 holds a scalar as an array of one element, which numpy 2.4 refuses to convert."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index


if INTERPRETED:
    early = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
    assert not early, "triton was imported before its interpreter was chosen"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _let_scalars_bound_loops()
