"""Reproducible LoRA fine-tuning of large language models under DeepSpeed ZeRO."""

__version__ = "0.2.0"
