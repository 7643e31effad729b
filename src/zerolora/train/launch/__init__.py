"""Starting ranks, their rendezvous, heartbeat and stop signals."""
