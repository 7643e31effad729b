"""Talk to trained models, in a terminal or by a server (docs/export.md)."""
