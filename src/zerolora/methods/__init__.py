"""Training methods, one file each, which registry.py imports.

To add a method, write a file here with a subclass of `Method` (method.py), or of `TrainableMethod` if the stage `train`
can run it. torch and peft are imported only to build or merge an adapter.
"""
