"""`zerolora rebuild`: makes a run again in a folder of its own, and compares what comes out with what was recorded."""
