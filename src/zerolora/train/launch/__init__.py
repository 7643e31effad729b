"""The start of ranks, their rendezvous, heartbeat and stop signals."""
