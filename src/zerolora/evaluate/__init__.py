"""Stage evaluate: the same held-out rows, asked of base and merged model."""
