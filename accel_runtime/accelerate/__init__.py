"""Functions and classes that only scripts for Accelerate need; scripts import them by the module paths of Accelerate."""
