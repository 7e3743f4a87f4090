"""What `accel checkpoint` asks of a child process, which needs no torch."""
