"""The ways to train a model, one file each; registry.py finds them.

A method is added by a file here with a subclass of `Method` (method.py), or of `TrainableMethod` if `zerolora train`
can run it. Nothing here imports torch or peft before it builds or merges an adapter.
"""
