"""Engines of these tests compile what they run and nothing else, except where that is what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestream.engine import build


@pytest.fixture(scope="session", autouse=True)
def _no_compile_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "compile_steps", lambda config, longest: iter(()))
        yield
