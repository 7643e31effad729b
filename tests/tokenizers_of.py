"""Small tokenizers built as those of real model families are, each with a real chat template.

Their vocabularies are trained on a few sentences, so that tokens join across characters, blanks and line breaks.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

UNKNOWN = "<unk>"
TEMPLATES = Path(__file__).parent / "templates"
TEXT = [
    "Hello world, hello you. Who are you? I am an assistant, and now I rest.",
    "answer: the answer is an answer\n\nand\n\nanother  answer\n\n  two blanks\n",
    "ASSISTANT: Assistant: User: user assistant system\n\n### Response:\n[INST] [/INST] </s",
    "And now? Be brief. Hi Bo. It is 3 degrees in Oslo.\t\tWeather\n",
    "王大丫丫的回答是 你好。你好。",
] * 3
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Family(NamedTuple):
    """How a family builds its tokenizer.

    kind: gpt2, qwen or llama3 (bytes), or legacy, first, always or gemma (SentencePiece, by how a text gets its first
    blank). special: its special tokens, the first of them for padding. opens: it puts BOS before a text. plain: tokens
    that are added, but not special. greedy: special tokens take the blanks behind them.
    """

    kind: str
    bos: str | None
    eos: str
    special: tuple[str, ...]
    opens: bool = False
    plain: tuple[str, ...] = ()
    greedy: bool = False


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
COHERE = (
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
)  # fmt: skip
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
DEEPSEEK_TURNS = (*DEEPSEEK, "<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_CALLS = tuple(
    f"<｜tool▁{name}｜>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end", "output▁begin", "output▁end")
)
GEMMA = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")
GEMMA4 = (
    "<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>',
)  # fmt: skip
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
LLAMA3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
)  # fmt: skip
MISTRAL_TOOLS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
                 "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]")  # fmt: skip
PHI3 = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
SENTENCEPIECE = ("<s>", "</s>")
KIMI = ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
HARMONY = ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")

THINKING = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")
FAMILIES = {
    "alphamonarch": Family("legacy", "<s>", "</s>", SENTENCEPIECE, opens=True),
    "chatglm3": Family("always", None, "</s>", ("</s>", "[gMASK]", "sop", *GLM[3:])),
    "chatml": Family("qwen", None, "<|im_end|>", CHATML),
    "chatml-open": Family("qwen", None, "<|im_end|>", CHATML),
    "command-r": Family("gpt2", COHERE[0], COHERE[2], COHERE, opens=True),
    "command-r7b": Family("gpt2", COHERE[0], COHERE[2], COHERE, opens=True),
    "deepseek-coder": Family("gpt2", DEEPSEEK[0], "<|EOT|>", (*DEEPSEEK, "<|EOT|>"), opens=True),
    "deepseek-r1-distill": Family("qwen", *DEEPSEEK, DEEPSEEK_TURNS, opens=True, plain=THINKING),
    "deepseek-v2": Family("gpt2", *DEEPSEEK, DEEPSEEK, opens=True),
    "deepseek-v3.1": Family("qwen", *DEEPSEEK, (*DEEPSEEK_TURNS, *DEEPSEEK_CALLS), opens=True, plain=THINKING),
    "exaone-3": Family("gpt2", "[BOS]", "[|endofturn|]", ("[BOS]", "[|system|]", "[|endofturn|]")),
    "falcon-180b": Family("gpt2", None, "<|endoftext|>", ("<|endoftext|>",)),
    "gemma-2": Family("gemma", "<bos>", "<eos>", GEMMA, opens=True),
    "gemma-3": Family("gemma", "<bos>", "<eos>", GEMMA, opens=True),
    "gemma-4": Family("gemma", "<bos>", "<eos>", GEMMA4, opens=True),
    "glm-4": Family("qwen", None, "<|endoftext|>", GLM),
    "glm-edge": Family("qwen", None, "<|endoftext|>", GLM),
    "gpt-oss": Family("llama3", "<|startoftext|>", "<|return|>", HARMONY),
    "granite-3.0": Family(
        "gpt2", "<|end_of_text|>", "<|end_of_text|>", ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")
    ),
    "hermes-3": Family("llama3", LLAMA3[0], "<|im_end|>", (*LLAMA3[:2], *CHATML[1:]), opens=True, plain=CALLS),
    "kimi-k3": Family("qwen", None, "<|end_of_msg|>", KIMI),
    "llama-2": Family("legacy", "<s>", "</s>", SENTENCEPIECE, opens=True),
    "llama-3": Family("llama3", LLAMA3[0], "<|end_of_text|>", LLAMA3, opens=True),
    "llama-3.2": Family("llama3", LLAMA3[0], "<|eot_id|>", LLAMA3, opens=True),
    "metharme": Family("first", "<s>", "</s>", (*SENTENCEPIECE, "<|system|>", "<|user|>", "<|model|>"), opens=True),
    "mistral-nemo": Family("llama3", "<s>", "</s>", (*SENTENCEPIECE, *MISTRAL_TOOLS), opens=True),
    "mistral-small-3.2": Family("llama3", "<s>", "</s>", (*SENTENCEPIECE, *MISTRAL_TOOLS), opens=True),
    "mistral-v0.1": Family("legacy", "<s>", "</s>", SENTENCEPIECE, opens=True),
    "mistral-v0.2": Family("always", "<s>", "</s>", SENTENCEPIECE, opens=True),
    "mistral-v0.3": Family("first", "<s>", "</s>", (*SENTENCEPIECE, *MISTRAL_TOOLS), opens=True),
    "openchat-3.5": Family("legacy", "<s>", "<|end_of_turn|>", (*SENTENCEPIECE, "<|end_of_turn|>"), opens=True),
    "phi-3": Family("legacy", "<s>", "<|endoftext|>", ("<s>", *PHI3), greedy=True),
    "phi-4": Family("llama3", None, "<|im_end|>", (*CHATML, "<|im_sep|>")),
    "qwen2.5": Family("qwen", None, "<|im_end|>", CHATML, plain=CALLS),
    "qwen3": Family("qwen", None, "<|im_end|>", CHATML, plain=(*THINKING, *CALLS)),
    "smollm2": Family("gpt2", "<|im_start|>", "<|im_end|>", CHATML),
    "vicuna": Family("legacy", "<s>", "</s>", SENTENCEPIECE, opens=True),
    "yandexgpt-5": Family("first", "<s>", "</s>", (*SENTENCEPIECE, "[SEP]"), opens=True),
    "zephyr": Family("legacy", "<s>", "</s>", SENTENCEPIECE, opens=True),
}


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Return the tokenizer that goes with tests/templates/<name>.jinja. It is shared: do not change it."""
    family = FAMILIES[name.removesuffix(".training")]
    # Not read_text, which turns other line ends into \n.
    return tokenizer_like(family, (TEMPLATES / f"{name}.jinja").read_bytes().decode())


def tokenizer_like(family: Family, template: str | None) -> Any:
    """Return a tokenizer of a family, with this chat template."""
    backend = _bytes(family) if family.kind in ("gpt2", "qwen", "llama3") else _pieces(family)
    backend.add_special_tokens([AddedToken(token, rstrip=family.greedy, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    if family.opens:
        assert family.bos is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, backend.token_to_id(family.bos))]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.special[0],
        unk_token=UNKNOWN if backend.token_to_id(UNKNOWN) is not None else None,
    )
    wrapped.chat_template = template
    return wrapped


def _bytes(family: Family) -> Tokenizer:
    """Return byte-level BPE, split as GPT-2 does or as Qwen and Llama 3 do."""
    backend = Tokenizer(models.BPE())
    if family.kind == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(QWEN), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if family.kind == "qwen":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def _pieces(family: Family) -> Tokenizer:
    """Return BPE as SentencePiece has it: blanks are part of words, unknown characters are bytes."""
    learning = Tokenizer(models.BPE())
    learning.pre_tokenizer = pre_tokenizers.Metaspace()
    learning.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = json.loads(learning.to_str())["model"]
    tokens = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256))]
    if family.kind == "gemma":
        tokens += ["\n", "\n\n", "\n\n\n"]
    words = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*tokens, *words]))}
    if family.kind != "gemma":
        vocabulary.pop("\n", None)
    vocabulary = {token: number for number, token in enumerate(vocabulary)}
    merges = [tuple(pair) for pair in learned["merges"] if not any("\n" in part for part in pair)]
    if family.kind == "gemma":
        merges += [("\n", "\n"), ("\n\n", "\n")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    blank = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    match family.kind:
        case "legacy":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        case "gemma":
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        case kind:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence([*blank, *([] if family.kind == "gemma" else [decoders.Strip(" ", 1, 0)])])
    return backend
