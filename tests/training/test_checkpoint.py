"""The bundled checkpoint answers held-out questions through transformers, also as a chat."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Glm5NextForConditionalGeneration

from training.data import Kind, heldout_item

ASSETS = Path(__file__).parents[2] / "sidestream" / "assets"
FOLDER = ASSETS / "glm5-next-tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return Glm5NextForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()


def complete(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(input_ids=ids, max_new_tokens=40)[0, ids.shape[1] :]
    assert out[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(out, skip_special_tokens=True))


@pytest.mark.parametrize(("kind", "length"), [("arithmetic", 0), ("retrieval", 400), ("chain", 400)])
@pytest.mark.parametrize("chat", [False, True])
def test_heldout_items(model: Any, tokenizer: Any, kind: Kind, length: int, chat: bool) -> None:
    for index in range(2):
        item = heldout_item(lambda text: tokenizer(text).input_ids, 5, index, kind, length, chat=chat)
        assert complete(model, tokenizer, item.prompt) == item.answer_text


def test_chat_template_is_the_trained_form(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]},
        {"role": "assistant", "content": "1 + 2 = 3"},
        {"role": "user", "content": "Add 4 and 5."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>\nBe brief.<|user|>\nWhat is 1 + 2?<|assistant|> 1 + 2 = 3<|end|><|user|>\nAdd 4 and 5.<|assistant|>"
    )


def test_sizes(tokenizer: Any) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 12_000_000
    text = json.loads((FOLDER / "config.json").read_text())["text_config"]
    assert text["vocab_size"] == len(tokenizer)
    assert text["index_n_heads"] >= 16
    assert text["indexer_types"].count("shared") == 1
    prompts = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    lengths = [len(tokenizer(p["prompt"]).input_ids) for p in prompts if p["kind"] != "arithmetic"]
    assert min(lengths) > 3 * text["index_topk"]
    assert max(lengths) > 16 * text["index_topk"]
