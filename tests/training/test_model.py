"""The trainable model against transformers, the faults, and training end to end at toy size."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training.export import from_hub, to_hub, write_checkpoint
from training.model import TinyModel
from training.selection import FAULTS, Selection, corrupt, select
from training.spec import Spec

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4


def tiny(layers: str) -> TinyModel:
    """A small model whose every parameter and buffer is away from its initial value."""
    torch.manual_seed(0)
    spec = Spec(
        layers=layers, vocab_size=100, hidden=64, intermediate=96, moe_intermediate=32, heads=4, head_dim=16, latent=24,
        q_latent=32, index_topk=16, kda_heads=2, kda_dim=16,
    )  # fmt: skip
    model = TinyModel(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("router_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.eval()


@pytest.mark.parametrize("layers", ["KKDKKD", "KDSKD"])
def test_logits_equal_transformers_under_sparse_selection(layers: str, tmp_path: Path) -> None:
    from transformers import Glm5NextForConditionalGeneration

    torch.set_num_threads(1)
    model = tiny(layers)
    write_checkpoint(model, tmp_path, None, dtype=torch.float32)
    hub = Glm5NextForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(6, 100, (2, 101))  # the sequence outgrows index_topk = 16
    with torch.no_grad():
        ours = model.logits(ids).log_softmax(-1)
        dense = model.logits(ids, "dense").log_softmax(-1)
        theirs = hub(input_ids=ids).logits.log_softmax(-1)
    assert (ours - theirs).abs().max() < TOLERANCE
    assert (dense - theirs).abs().max() > 100 * TOLERANCE
    again = from_hub(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(to_hub(again).values(), to_hub(model).values(), strict=True))


def test_every_fault_changes_what_a_query_reads() -> None:
    positions = torch.arange(203)
    scores = torch.rand(2, 203, 50, generator=torch.Generator().manual_seed(0))
    right = select(scores, positions, 4, 4)
    rows = right.rows()
    assert rows.shape == (2, 203, 19)
    assert all(sorted(r for r in rows[0, t].tolist() if r >= 0) == list(range(t + 1)) for t in range(16))
    last = [r for r in rows[1, 202].tolist() if r >= 0]
    assert len(last) == len(set(last)) == 19
    assert {200, 201, 202} <= set(last)
    for fault in FAULTS:
        changed = corrupt(right, fault)
        wrong = changed.rows()
        assert int(wrong.max()) <= 202
        assert bool((wrong <= positions.view(1, -1, 1)).all()), fault
        assert set(wrong[0, 202].tolist()) != set(rows[0, 202].tolist()), fault


def test_a_query_without_complete_pools_reads_its_tail() -> None:
    selection = Selection(torch.full((1, 3, 2), -1), torch.arange(3), 4)
    assert [[r for r in row if r >= 0] for row in selection.rows()[0].tolist()] == [[0], [0, 1], [0, 1, 2]]


def test_smoke_training_exports_a_checkpoint_that_reloads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.train", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    model = from_hub(tmp_path / "tiny").eval()
    with torch.no_grad():
        assert model.logits(torch.randint(6, 100, (1, 40))).isfinite().all()
