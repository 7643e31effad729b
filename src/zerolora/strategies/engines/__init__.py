"""What the strategies of one engine share, one file an engine."""
