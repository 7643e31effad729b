"""How much memory training takes, from config.json alone: shapes → model states, activations → one estimate."""
