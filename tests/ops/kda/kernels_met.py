"""A kernel that notes its launches and does nothing: for tests of which kernels are chosen."""

from __future__ import annotations

from collections.abc import Callable


class Met:
    """Stands for the kernel of that name; adds it to ``met`` at each launch."""

    def __init__(self, name: str, met: list[str]) -> None:
        self.name, self.met = name, met

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_args, **_options: self.met.append(self.name)
