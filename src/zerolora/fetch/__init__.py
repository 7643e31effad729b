"""Stages fetch and fetch_data: download pinned base models and data sets, and verify their hashes."""
