"""Stage evaluate: base and merged model on the same held-out rows."""
