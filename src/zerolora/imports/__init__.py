"""`zerolora import`: configs of other tools, translated key by key."""
