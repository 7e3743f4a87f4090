"""XLA devices: the launcher of a TPU machine, and the command of a pod."""
