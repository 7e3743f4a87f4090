"""Processes of tests: commands, forked interpreters, ranks, terminals, services, and time limits."""
