"""The data of a run: whose sample is whose, and the loader that hands them out."""
