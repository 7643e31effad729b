"""Rows: read from files of many forms, tokenized, masked and packed; Arrow files on disk.

The kinds of data files, by their endings, are here, for `fetch_data` and `prepare`. A kind of text has an entry in
chunking.CUTS and records.RECORDS, a kind of table in tables.py and records.RECORDS.
"""

import re

TEXTS = ("json", "jsonl", "ndjson", "csv", "tsv", "txt")
TABLES = ("parquet", "arrow")
COMPRESSIONS = ("gz", "bz2", "xz", "zst")
ENDINGS = f".{', .'.join(TEXTS)} (each also .{', .'.join(COMPRESSIONS)}), .{', .'.join(TABLES)}"
"""The endings, for messages."""
DATA_FILE = re.compile(rf".+\.(({'|'.join(TEXTS)})(\.({'|'.join(COMPRESSIONS)}))?|{'|'.join(TABLES)})", re.IGNORECASE)
"""Matches the name of a data file."""
