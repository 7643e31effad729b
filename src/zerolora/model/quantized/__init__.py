"""Formats of quantized checkpoints: which stored tensors are a weight, and its values."""
