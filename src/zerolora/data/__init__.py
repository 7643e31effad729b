"""Rows: the reference task, the loss mask, Arrow files on disk."""
