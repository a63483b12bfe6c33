"""Text from token ids, as they come: what is shown is never taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sidestream.core.request import FinishReason
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.stop_strings import StopStrings

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for bytes that are no character, or not yet."""
CONTEXT_TOKENS = 5
"""Prompt tokens that the first output token is decoded after, for its leading space."""
WINDOW_TOKENS = 16
"""Tokens decoded anew for each one, at most about twice that; a character has at most four."""
TAIL_TOKENS = 3
"""Tokens at the end of a run of broken bytes that could begin a character."""


class IncrementalDetokenizer:
    """Decodes one sequence token by token in time linear in its length.

    Each token is decoded behind a few earlier ones, because a decoder may treat the first token of a text apart; only
    the new end of that window is text. The bytes of an unfinished character are held back until it is complete, and
    any end of the text that may become a stop string until it cannot: both come out of ``finish`` at the latest.
    The pieces joined are the tokenizer's own decoding of the tokens, up to a stop string; only in a run of more than
    ``WINDOW_TOKENS`` tokens of broken bytes may the number of replacement characters differ.

    Args:
        tokenizer: a transformers tokenizer.
        params: ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and ``skip_special_tokens`` are used. A stop
            string counts only if the text of a token past ``min_tokens`` completes it.
        prompt_token_ids: what comes before; only their last tokens are looked at. Without them the text is decoded as
            if it stood alone.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, *, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = _decoder(tokenizer, params.skip_special_tokens)
        self._min_tokens = params.min_tokens
        self._stops = StopStrings(tuple(params.stop), include=params.include_stop_str_in_output)
        self._num_tokens = 0
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._shown = len(self._decode(self._window).rstrip(REPLACEMENT))
        """Characters of the decoded window that are text already."""
        self._complete = len(self._window)
        """Tokens of the window before the newest that ended with a complete character."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; no more tokens are taken then."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Take one token, return the text that can be shown now: "" if it may still change."""
        self._num_tokens += 1
        return self._stops.push(self._next_text(token_id), may_stop=self._num_tokens > self._min_tokens)

    def finish(self, reason: FinishReason) -> str:
        """The rest of the text, whatever ended it; "" after a stop string."""
        if self._stops.matched is not None:
            return ""
        rest = self._decode(self._window)[self._shown :]
        text = self._stops.push(rest, may_stop=self._num_tokens > self._min_tokens)
        self._window, self._shown = [], 0
        return text + self._stops.flush()

    def _next_text(self, token_id: int) -> str:
        window = self._window
        window.append(token_id)
        decoded = self._decode(window)
        stable = decoded.rstrip(REPLACEMENT)
        text = stable[self._shown :]
        self._shown = max(self._shown, len(stable))
        if len(stable) < len(decoded):
            if len(window) - self._complete >= WINDOW_TOKENS:
                text += self._give_up()
        elif text:
            if len(window) >= WINDOW_TOKENS:
                del window[: self._complete]
                self._shown = len(self._decode(window))
            self._complete = len(window)
        elif len(window) - self._complete >= WINDOW_TOKENS:
            del window[self._complete :]  # they gave no text, being special tokens that are skipped
        return text

    def _give_up(self) -> str:
        """Show a long run of broken bytes as such, but for an end that may still become a character."""
        window = self._window
        head = self._decode(window[:-TAIL_TOKENS])
        text = head[self._shown :]
        del window[:-TAIL_TOKENS]
        self._shown = max(self._shown - len(head), 0)
        self._complete = 0
        return text


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """The tokenizer's decoding, without clean-up of spaces, which would change text already shown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:

        def decode_fast(ids: list[int]) -> str:
            return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))

        return decode_fast

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    return decode
