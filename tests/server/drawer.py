"""Texts of a form, as a model would write them that only the form holds to anything."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
import xgrammar

from sidestream.engine.llm import bundled_model
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.server.call_forms import Form

MAX_TOKENS = 2000
ENDS = b'"<}]'
"""Bytes that lead out of values: without a liking for them most draws would be long."""


class Drawer:
    """Draws texts of a form token by token, as a model would write them that only knows whole characters."""

    def __init__(self) -> None:
        self.tokenizer: Any = load_tokenizer(bundled_model())
        self.vocab = len(self.tokenizer)
        self.info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.vocab, stop_token_ids=[0])
        self.texts = [bytes(token) for token in self.info.decoded_vocab]
        self.compiler = xgrammar.GrammarCompiler(self.info, max_threads=1)

    def compile(self, form: Form) -> Any:
        return self.compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))

    def draw(self, form: Form, seed: int) -> str:
        draws = random.Random(seed)
        matcher = xgrammar.GrammarMatcher(self.compile(form), override_stop_tokens=[0])
        mask = torch.zeros(1, -(-self.vocab // 32), dtype=torch.int32)
        tokens: list[int] = []
        while len(tokens) < MAX_TOKENS:
            matcher.fill_next_token_bitmask(mask, 0)
            bits = (mask[0].unsqueeze(1) >> torch.arange(32)) & 1
            allowed = bits.flatten()[: self.vocab].nonzero().flatten().tolist()
            if 0 in allowed and draws.random() < 0.7:
                break
            allowed = [t for t in allowed if t != 0]
            if not allowed:
                break
            allowed = [t for t in allowed if self.texts[t].isascii()] or allowed
            ends = [t for t in allowed if self.texts[t][:1] in ENDS]
            token = draws.choice(ends if ends and draws.random() < 0.5 else allowed)
            assert matcher.accept_token(token)
            tokens.append(token)
        else:
            raise AssertionError(f"no end after {MAX_TOKENS} tokens")
        return bytes(b for t in tokens for b in self.texts[t]).decode(errors="strict")

    def accepts(self, form: Form, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self.compile(form), terminate_without_stop_token=True)
        return bool(matcher.accept_string(text) and matcher.is_terminated())
