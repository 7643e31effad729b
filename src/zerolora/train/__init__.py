"""Stage train: LoRA under DeepSpeed. launcher.py starts the ranks, rank.py is what each of them does."""
