"""Records of the numbers of a training, by which `accel diff` finds the first difference of two runs."""
