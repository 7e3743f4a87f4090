"""The Ray launcher: a job of a Ray cluster, with one actor on each node that runs `accel launch` there."""
