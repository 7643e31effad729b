"""Base models on disk: where they come from, what they are, what shape they have."""
