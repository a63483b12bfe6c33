"""Writes the demonstration prompts, held out from training: `python -m training.prompts FOLDER OUT.jsonl`."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from training.data import Kind, Names, heldout_item
from training.tokenizer import CachedEncoder

PROMPT_SEED = 2
PLAN: tuple[tuple[Kind, int, Names], ...] = (
    *(("arithmetic", 0, "mixed"),) * 4,
    ("retrieval", 256, "mixed"),
    ("retrieval", 512, "unseen"),
    ("retrieval", 1024, "mixed"),
    ("retrieval", 2048, "mixed"),
    ("chain", 256, "words"),
    ("chain", 512, "pseudo"),
    ("chain", 512, "unseen"),
    ("chain", 1024, "mixed"),
)


def main() -> None:
    encode = CachedEncoder(Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json")))
    with Path(sys.argv[2]).open("w") as out:
        for index, (kind, length, names) in enumerate(PLAN):
            item = heldout_item(encode, PROMPT_SEED, index, kind, length, names=names)
            out.write(json.dumps({"prompt": item.prompt, "answer": item.answer_text, "kind": kind}) + "\n")


if __name__ == "__main__":
    main()
