"""What training measures of itself while it runs."""
