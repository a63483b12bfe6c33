"""Small tokenizers of the two families that the supported models use."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "The quick brown fox jumps over the lazy dog. STOP here, or stop there.",
    "Größe, naïve café, 北京大学, こんにちは, привет мир, שלום",
    "emoji 🙂🙃 👩‍👩‍👧‍👦 🇩🇪 ✈️ and math ∑∫≠",
    "abc abcd abcde ababab aabb    spaces   and\nnew\n\nlines\t",
)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """BPE over bytes, with few merges, so that most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """BPE over characters with a leading-space mark and single bytes for what is not in the vocabulary."""
    words = ["▁", "▁is", "▁Lee", "is", "L", "e", "a", "b", "s", "."]
    vocab = {token: i for i, token in enumerate(["<unk>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
