"""The parts of `Accelerator`, by what a script does with it."""
