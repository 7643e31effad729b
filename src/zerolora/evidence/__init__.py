"""Statements about a published model, in-toto's: who made it from what, and who made it again."""
