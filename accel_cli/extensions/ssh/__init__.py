"""The ssh launcher: `accel launch` on several hosts, each reached by the system's `ssh`."""
