"""`accel diff`: the first step, rank and number in which two runs differ."""
