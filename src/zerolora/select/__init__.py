"""Selects rows to train on from sampled answers: the stage select."""
