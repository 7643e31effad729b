"""What a base model is: its files, its specification, and its operations on the memory tracer."""
