"""What makes the host wait for the device, made an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_waits_raise() -> Iterator[None]:
    """What makes the host wait for the device raises in here. torch warns that this mode does not notice everything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
