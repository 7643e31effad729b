"""The code that strategies of one engine share, one file for each engine."""
