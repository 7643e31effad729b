"""Stage render: chooses a configuration and renders the options of its engine."""
