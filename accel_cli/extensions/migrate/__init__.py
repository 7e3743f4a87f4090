"""`accel migrate`: conversion of scripts to accel; `conversion` is for Python, and `shell` for shell scripts."""
