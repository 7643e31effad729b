"""Small checkpoints, independent of stage and world size."""
