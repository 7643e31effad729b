"""`zerolora check`: what this machine has, against what the config needs."""
