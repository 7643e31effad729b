"""Models with drawn weights: shapes from a config.json, a tokenizer trained on the project's texts."""

import gc
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from zerolora.data.reference import records
from zerolora.train.engines.engine import DTYPES

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "config/recipes/models"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 4096  # tokens of the tokenizer, or as many as the model has
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_of(model: str) -> Path:
    """Return the config.json of a model of config/recipes/models, of the stand-in `tiny`, or at a path."""
    if model == "tiny":
        return Path(__file__).with_name("tiny.json")
    return MODELS / f"{model}.json" if "/" not in model else Path(model)


def write_model(model: str, directory: Path, precision: str, device: str) -> Path:
    """Write a model to `directory`: drawn weights as safetensors, and a tokenizer. Weights are drawn on the device,
    which is free again afterwards."""
    directory.mkdir(parents=True)
    shutil.copyfile(config_of(model), directory / "config.json")
    config: Any = AutoConfig.from_pretrained(directory)
    build: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    with torch.device(device):
        made = build(config, dtype=DTYPES[precision])
    made.save_pretrained(directory)
    del made
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a ChatML template, trained on the reference task and on the documents that
    chat_rows.py cuts conversations from."""
    texts = [text for row in records("tens", 42) for text in row.values()]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=min(VOCABULARY, vocabulary), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=trained, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
