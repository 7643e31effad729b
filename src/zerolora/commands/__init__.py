"""The commands of `zerolora`: those of the stages and those for users."""
