"""Stage report: one page that says what a run did, how much it needed and what it was made of."""
