"""Files of a run: its folder and logs, the heartbeats of its ranks, and the memory that processes use."""
