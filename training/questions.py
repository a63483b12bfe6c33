"""Writes arithmetic questions, held out from training, in GSM8K's format: `python -m training.questions OUT.jsonl`."""

import json
import random
import sys
from pathlib import Path

from training.data import arithmetic

COUNT = 100
SEED = 3


def questions() -> list[dict[str, str]]:
    """Different questions, the same on every machine."""
    rng = random.Random(f"questions/{SEED}")
    found: dict[str, str] = {}
    while len(found) < COUNT:
        drawn = arithmetic(rng, "heldout")
        found.setdefault(drawn.text, "".join(piece.text for piece in drawn.answer).strip())
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def main() -> None:
    Path(sys.argv[1]).write_text("".join(json.dumps(item) + "\n" for item in questions()))


if __name__ == "__main__":
    main()
