"""Checks of how a script trains: bypassed calls, losses, gradients, inputs and weights of replicas, and equal objects."""
