"""Stage train: LoRA under DeepSpeed. launch/launcher.py starts the ranks, rank.py runs each of them."""
