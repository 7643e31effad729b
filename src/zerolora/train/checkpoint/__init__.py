"""Checkpoints: small, and independent of ZeRO stage and world size."""
