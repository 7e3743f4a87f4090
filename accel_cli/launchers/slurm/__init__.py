"""Slurm: a launcher that writes a batch script, submits it and follows the job."""
