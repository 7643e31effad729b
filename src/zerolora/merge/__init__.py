"""Stage merge: add the adapter to the base weights."""
