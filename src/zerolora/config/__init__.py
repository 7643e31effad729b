"""The config: its schema, the file, its rules, and the settings of every stage."""
