"""Prints the floor of a model's decode step: see ``sidestream.engine.bench.floor``.

python benchmarks/floor.py benchmarks/configs/glm5-next-slice-a.json --batch 1 8 32 64 --context 8192
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sidestream.config.model import ModelConfig
from sidestream.engine.bench.floor import decode_floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[8192])
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    model = ModelConfig.from_hf(args.config)
    print(f"{'batch':>6} {'context':>8} {'ms':>7}   GB: dense  experts     rows     keys   states")
    for batch in args.batch:
        for context in args.context:
            floor = decode_floor(model, batch=batch, context=context, kv_cache_dtype=args.kv_cache_dtype)
            parts = (floor.dense, floor.experts, floor.rows, floor.index_keys, floor.states)
            print(f"{batch:6} {context:8} {floor.ms():7.2f}   " + " ".join(f"{part / 1e9:8.3f}" for part in parts))


if __name__ == "__main__":
    main()
