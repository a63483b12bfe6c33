"""A place in the source is the user's line, not one of torch or of the device, also through a linked folder."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import sidestream
from sidestream.streams.simulated.site import here


def test_here_is_the_calling_line() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    site, line = here(), frame.f_lineno
    assert (site.file, site.line, site.function) == (__file__, line, "test_here_is_the_calling_line")
    assert str(site) == f"{__file__}:{line} (test_here_is_the_calling_line)"


def test_a_linked_package_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "sidestream").symlink_to(Path(sidestream.__file__).parent)
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from sidestream.streams.simulated import SimulatedBackend\n"
        "backend = SimulatedBackend()\n"
        "x = torch.zeros(3, device='sim')\n"
        "with backend.use(backend.new_stream('side')):\n"
        "    x.add_(1)\n"
        "print(*(f'{h.first.line} {h.second.line}' for h in backend.hazards()))\n"
    )
    result = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == "4 6\n", result.stderr
