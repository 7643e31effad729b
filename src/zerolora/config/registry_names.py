"""The names in the registries, as `make schema` wrote them (commands/write_registry_names.py)."""

FORMS = ("alpaca", "labelled", "messages", "preference", "prompt", "sharegpt", "text", "tokens")
"""Forms of rows."""

FIELDS = (
    "instruction",
    "input",
    "output",
    "context",
    "history",
    "system",
    "system_prompt",
    "tools",
    "functions",
    "reasoning_content",
    "thinking",
    "reasoning",
    "prompt",
    "question",
    "messages",
    "conversations",
    "completion",
    "response",
    "label",
    "kto_tag",
    "role",
    "content",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    "weight",
    "loss_weight",
    "loss_scale",
    "loss",
    "train",
    "training",
    "loss_mask",
    "step_loss_mask",
    "from",
    "value",
    "chosen",
    "chosen_response",
    "chosen_messages",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "answers",
    "score_chosen",
    "score_rejected",
    "text",
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
)
"""Fields of all forms."""

PROMPT_FORMATS = (
    "alpaca",
    "alpaca-newline",
    "chatml",
    "command-r",
    "deepseek",
    "deepseek-3",
    "deepseek-2.5",
    "falcon-h1",
    "gemma",
    "llama-2",
    "llama-3",
    "llama-3-verbatim",
    "llama-4",
    "mistral",
    "phi-3",
    "phi-4",
    "vicuna",
    "zephyr",
)
"""Prompt formats."""

TASKS = {
    "bleu": "generate",
    "chrf": "generate",
    "exact": "generate",
    "f1": "generate",
    "json_schema": "generate",
    "multiple_choice": "choices",
    "numeric": "generate",
    "perplexity": "loss",
    "regex": "generate",
    "rouge": "generate",
    "sum": "generate",
}
"""Checks of answers, and what a model is to do."""

TARGETS = ("compressed_tensors", "gguf", "gguf_adapter", "ollama", "torchao", "vllm_adapter")
"""Targets of export."""

METHODS = ("dora", "full", "ia3", "lora", "qdora", "qlora", "vera")
"""Methods of training."""

OBJECTIVES = ("sft", "dpo", "ipo", "simpo", "orpo", "kto")
"""Objectives of training."""

OPTIMIZERS = (
    "adamw",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adafactor",
    "lion",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
)
"""Optimizers."""

STRATEGIES = {
    "ddp": "ddp",
    "zero0": "deepspeed",
    "zero1": "deepspeed",
    "zero1_offload": "deepspeed",
    "zero2": "deepspeed",
    "zero2_offload": "deepspeed",
    "zero3": "deepspeed",
    "zero3_hpz": "deepspeed",
    "zero3_quantized": "deepspeed",
    "zero3_qgz": "deepspeed",
    "zero3_offload_optimizer": "deepspeed",
    "zero3_offload": "deepspeed",
    "zero3_nvme": "deepspeed",
    "fsdp": "fsdp",
    "fsdp_hybrid": "fsdp",
    "fsdp_offload": "fsdp",
    "fsdp_hybrid_offload": "fsdp",
}
"""Strategies, and their engines."""

TRACKERS = ("dvclive", "mlflow", "swanlab", "tensorboard", "wandb")
"""Trackers."""
