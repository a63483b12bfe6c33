"""A tokenizer that needs nothing but its file is read by the plain class, and is the same as by the automatic one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sidestream.engine import tokenizer
from sidestream.engine.bundled import bundled_model
from sidestream.errors import CheckpointError

TEXTS = ("Question: What is 12 + 30?\nAnswer:", " leading", "naïve 你好 🙂", "<|user|>\nhi<|assistant|>", "")
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": " 3"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled_model(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("architecture", ["glm5_next", "glm_moe_dsa", "deepseek_v32", "kimi_linear", "deepseek_v3"])
def test_the_plain_class_reads_what_the_automatic_one_does(folder: Path, named: str, architecture: str) -> None:
    rewrite(folder / "tokenizer_config.json", tokenizer_class=named)
    rewrite(folder / "config.json", model_type=architecture)
    plain = tokenizer.load_tokenizer(folder)
    automatic = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert plain is not None
    assert type(plain) is type(automatic)
    assert plain.get_vocab() == automatic.get_vocab()
    assert plain.special_tokens_map == automatic.special_tokens_map
    for text in TEXTS:
        assert plain.encode(text) == automatic.encode(text)
    assert plain.decode(plain.encode(TEXTS[2])) == automatic.decode(automatic.encode(TEXTS[2]))
    chat = {"tokenize": False, "add_generation_prompt": True}
    assert plain.apply_chat_template(MESSAGES, **chat) == automatic.apply_chat_template(MESSAGES, **chat)


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer_class": "LlamaTokenizerFast"}, {"tokenizer_class": None}, {"auto_map": {"AutoTokenizer": []}}],
)
def test_any_other_is_left_to_the_automatic_class(folder: Path, changes: dict[str, Any]) -> None:
    assert tokenizer._loader(folder) is not AutoTokenizer
    rewrite(folder / "tokenizer_config.json", **changes)
    assert tokenizer._loader(folder) is AutoTokenizer


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"tokenizer_class": []}'])
def test_a_config_that_is_none_is_left_to_the_automatic_class(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    assert tokenizer._loader(folder) is AutoTokenizer


def test_a_broken_tokenizer_is_the_checkpoints_fault(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        tokenizer.load_tokenizer(folder)


def test_no_files_are_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer.load_tokenizer(tmp_path) is None
