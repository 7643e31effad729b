"""The commands of `zerolora`: those of the stages, and those that are called by hand."""
