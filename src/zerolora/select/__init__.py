"""Stage select: sampled answers become rows to train on."""
