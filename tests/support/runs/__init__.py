"""Runs that train and save, the file systems they save to, and what they have written."""
