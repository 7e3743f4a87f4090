"""Which cases run, and what they are compared with."""
