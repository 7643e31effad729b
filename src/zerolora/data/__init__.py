"""Rows: the reference task, the mask of what is learned, Arrow files on disk."""
