"""Stage export: what a run leaves behind, in the forms that other programs serve."""
