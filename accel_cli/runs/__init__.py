"""What a run keeps on the disk: its folder and logs, the heartbeats of ranks, and the memory that processes use."""
