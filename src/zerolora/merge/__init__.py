"""Stage merge: the adapter becomes part of the base weights."""
