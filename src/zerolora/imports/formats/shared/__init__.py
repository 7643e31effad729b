"""What the formats share: one file for each part of a training, and the table of keys from transformers."""
