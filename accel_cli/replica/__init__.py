"""What a replica of torch_xla needs around it that a process has by itself: standard library only."""
