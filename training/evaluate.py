"""Held-out accuracy of a checkpoint, clean and with a faulty selection in one sparse layer alone.

`python -m training.evaluate FOLDER_OR_PT --json OUT` runs the trainable model (teacher-forced: an answer counts when
every token of it, the end-of-turn token too, is the most likely one, which is when greedy decoding writes it).
`--transformers` generates with transformers instead.
"""

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from training.data import END, KINDS, Encode, Item, Kind, Names, heldout_item
from training.export import from_hub
from training.model import TinyModel
from training.selection import FAULTS, Fault
from training.tokenizer import CachedEncoder, build_tokenizer

EVAL_SEED = 1


@dataclass(frozen=True)
class Suite:
    """A set of held-out items of one kind and context length."""

    kind: Kind
    length: int
    names: Names = "mixed"
    chat: bool = False
    words: bool = False  # only facts whose value is a word

    @property
    def label(self) -> str:
        parts = [self.kind, str(self.length) if self.length else "", "" if self.names == "mixed" else self.names]
        parts += ["word-values" if self.words else "", "chat" if self.chat else ""]
        return "-".join(part for part in parts if part)

    def items(self, encode: Encode, count: int) -> list[Item]:
        """The first `count` held-out items of the suite, the same on every machine."""
        drawn = (
            heldout_item(encode, EVAL_SEED, i, self.kind, self.length, names=self.names, chat=self.chat)
            for i in itertools.count()
        )
        return list(itertools.islice((i for i in drawn if not (self.words and i.answer_text[1].isdigit())), count))


def suites(lengths: Sequence[int]) -> list[Suite]:
    """The clean table: every kind, lengths, unseen words, and the chat form."""
    out = [Suite("arithmetic", 0), Suite("arithmetic", 0, chat=True)]
    for kind in KINDS[1:]:
        out += [Suite(kind, length) for length in lengths]
    out += [Suite("chain", 768, "words")]
    middle = lengths[len(lengths) // 2]
    for kind in KINDS[1:]:
        out += [Suite(kind, middle, "pseudo"), Suite(kind, middle, "unseen"), Suite(kind, middle, chat=True)]
    return out


def exact(
    model: TinyModel,
    encode: Encode,
    items: Sequence[Item],
    *,
    faults: dict[int, Fault] | None = None,
    tokens: int = 65536,
) -> float:
    """Share of items that greedy decoding answers exactly, under sparse selection."""
    device = next(model.parameters()).device
    coded = [(encode(item.prompt), encode(item.answer_text + END)) for item in items]
    coded.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    right, start = 0, 0
    while start < len(coded):
        stop = start + 1
        while stop < len(coded) and (stop + 1 - start) * (len(coded[stop][0]) + len(coded[stop][1])) <= tokens:
            stop += 1
        batch = coded[start:stop]
        width = max(len(p) + len(a) for p, a in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, (prompt, answer) in enumerate(batch):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        with torch.no_grad():
            hidden, _ = model(ids.to(device), "sparse", faults=faults)
            for row, (prompt, answer) in enumerate(batch):
                guess = model.head(hidden[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]).argmax(-1)
                right += int(guess.tolist() == answer)
        start = stop
    return right / len(items)


def evaluate(
    model: TinyModel, encode: Encode, *, lengths: Sequence[int], count: int, fault_suites: Sequence[Suite]
) -> dict[str, Any]:
    """{"clean": {suite: accuracy}, "faults": {suite: {layer: {fault: accuracy}}}}"""
    model.eval()
    clean = {}
    for suite in suites(lengths) if lengths else ():
        number = count if suite.length <= 4096 else max(16, count // 4)
        clean[suite.label] = exact(model, encode, suite.items(encode, number))
    faulty: dict[str, dict[str, dict[str, float]]] = {}
    for suite in fault_suites:
        items = suite.items(encode, count)
        faulty[suite.label] = {
            f"{layer}{model.spec.layers[layer]}": {f: exact(model, encode, items, faults={layer: f}) for f in FAULTS}
            for layer in model.sparse_layers()
        }
        faulty[suite.label]["all"] = {
            f: exact(model, encode, items, faults=dict.fromkeys(model.sparse_layers(), f)) for f in FAULTS
        }
    return {"clean": clean, "faults": faulty}


def with_transformers(folder: Path, encode: Encode, lengths: Sequence[int], count: int) -> dict[str, float]:
    """Exact match of greedy generation by transformers, fp32, one prompt at a time."""
    from transformers import Glm5NextForConditionalGeneration

    hub = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    table = {}
    for suite in [Suite("arithmetic", 0)] + [Suite(k, n) for k in KINDS[1:] for n in lengths]:
        right = 0
        for item in suite.items(encode, count):
            prompt, answer = encode(item.prompt), encode(item.answer_text + END)
            out = hub.generate(input_ids=torch.tensor([prompt]), max_new_tokens=len(answer), do_sample=False)
            right += int(out[0, len(prompt) :].tolist() == answer)
        table[suite.label] = right / count
    return table


def report(result: dict[str, Any]) -> str:
    """The result as text tables."""
    lines = [f"{label:26} {value:6.1%}" for label, value in result["clean"].items()]
    for label, layers in result["faults"].items():
        lines.append(f"{label:14}" + "".join(f"{fault:>14}" for fault in FAULTS))
        lines += [f"  layer {layer:6}" + "".join(f"{row[f]:14.1%}" for f in FAULTS) for layer, row in layers.items()]
    return "\n".join(lines)


FAULT_SUITES = (
    Suite("retrieval", 1024),
    Suite("retrieval", 1024, words=True),
    Suite("chain", 768, "words"),
    Suite("chain", 1024),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--faults", nargs="*", default=[suite.label for suite in FAULT_SUITES], metavar="SUITE")
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    started = time.time()
    tokenizer = (
        build_tokenizer() if args.checkpoint.is_file() else Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    )
    encode = CachedEncoder(tokenizer)
    if args.transformers:
        result: dict[str, Any] = {
            "clean": with_transformers(args.checkpoint, encode, args.lengths, args.count),
            "faults": {},
        }
    else:
        from training.train import load

        model = load(args.checkpoint) if args.checkpoint.is_file() else from_hub(args.checkpoint)
        chosen = [suite for suite in FAULT_SUITES if suite.label in args.faults]
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        result = evaluate(model, encode, lengths=args.lengths, count=args.count, fault_suites=chosen)
    print(report(result))
    if args.json:
        result["command"] = "python -m training.evaluate " + " ".join(sys.argv[1:])
        result["count"] = args.count
        result["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
        result["seconds"] = round(time.time() - started, 1)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
