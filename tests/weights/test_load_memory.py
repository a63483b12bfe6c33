"""Peak host memory of loading, measured by the kernel in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sidestream.engine.bundled import known_configs

_PEAK_RESET = Path("/proc/self/clear_refs")

_CHILD = """
import sys
import torch
from dataclasses import replace
from pathlib import Path
from sidestream.config.model import Fp8BlockConfig, ModelConfig
from sidestream.weights import SafetensorsSource

def status(key):
    text = Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0]) * 1024

torch.set_num_threads(1)
config = replace(ModelConfig.from_hf(sys.argv[2]), quantization=Fp8BlockConfig())
def load_all(source):
    shapes = {"wide.weight": (2048, 14336), "tall.weight": (14336, 2048), "fp8.weight": (4096, 8192)}
    kept = []
    for name, shape in shapes.items():
        kept.append(torch.empty(shape, dtype=torch.bfloat16))
        source.load(name, kept[-1])
    source.finish()
    return kept
source = SafetensorsSource(sys.argv[1], config)
warm = torch.empty(8, dtype=torch.bfloat16)
source.load("small", warm)  # brings in the code that loading needs
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS")
kept = load_all(source)
print(sum(t.numel() * t.element_size() for t in kept), status("VmHWM") - before)
"""


@pytest.mark.skipif(not _PEAK_RESET.exists(), reason="needs Linux: the peak is read from /proc/self/status")
def test_peak_memory_stays_near_the_loaded_form(tmp_path: Path) -> None:
    tensors = {
        "small": torch.ones(8, dtype=torch.bfloat16),
        "wide.weight": torch.ones(2048, 14336, dtype=torch.bfloat16),
        "tall.weight": torch.ones(14336, 2048, dtype=torch.bfloat16),
        "fp8.weight": torch.ones(4096, 8192).to(torch.float8_e4m3fn),
        "fp8.weight_scale_inv": torch.ones(32, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = known_configs()["glm-5.2"]
    command = [sys.executable, "-W", "error", "-c", _CHILD, str(tmp_path), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    loaded, peak = map(int, done.stdout.split())
    print(f"loaded {loaded / 2**20:.1f} MiB, peak {peak / 2**20:.1f} MiB: {peak / loaded:.3f}")
    assert loaded == 176 * 2**20
    assert peak > 0.9 * loaded  # the measurement sees the destinations, so it would see copies of them
    assert peak < 1.2 * loaded
