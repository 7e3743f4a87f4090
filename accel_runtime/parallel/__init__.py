"""Models that are divided over processes: how they are cut, what they compute in, and what is said of it."""
