"""Byte-level BPE for the synthetic text: digits singly, turn markers as special tokens, and a fast cached encoder.

`python -m training.tokenizer OUT` writes what AutoTokenizer reads: tokenizer, its config and the chat template.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data import ASSISTANT, END, KINDS, MEDIA, PAD, SYSTEM, USER, document

VOCAB_SIZE = 1536
SPECIALS = (
    PAD,
    END,
    USER,
    ASSISTANT,
    SYSTEM,
    MEDIA,
)  # ids 0 to 5; END is the end-of-turn (eos) token, MEDIA is never used
PATTERN = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s"
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|> ' + text(message.content) | trim + '<|end|>' -}}
{%- elif message.role == 'system' -%}
{{- '<|system|>\\n' + text(message.content) -}}
{%- else -%}
{{- '<|user|>\\n' + text(message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def corpus(documents: int, seed: int) -> Iterator[str]:
    """Training text without its markers, for the merges."""
    rng = random.Random(f"tokenizer/{seed}")
    for _ in range(documents):
        segments = document(rng, rng.choice(KINDS), 600, lambda text: len(text) // 3)
        text = "".join(segment.text for segment in segments)
        yield re.sub(r"<\|\w+\|>", "\n", text)


def build_tokenizer(*, documents: int = 3000, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tokenizer:
    """Trains the merges; deterministic in its arguments."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(documents, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the three files that AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM, MEDIA],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


class CachedEncoder:
    """Text to ids through a dictionary of pre-tokens: the same ids as the tokenizer, several times as fast."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.markers = re.compile("(" + "|".join(re.escape(marker) for marker in SPECIALS) + ")")
        self.pieces = re.compile(PATTERN)
        self.cache: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        parts = self.markers.split(text) if "<|" in text else [text]
        pieces = [p for part in parts for p in ([part] if part in SPECIALS else self.pieces.findall(part))]
        for piece in pieces:
            known = self.cache.get(piece)
            if known is None:
                known = self.cache[piece] = self.tokenizer.encode(piece).ids
                if len(self.cache) > 300_000:
                    self.cache.clear()
            ids += known
        return ids


if __name__ == "__main__":
    save_tokenizer(build_tokenizer(), Path(sys.argv[1]))
