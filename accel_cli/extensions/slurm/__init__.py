"""The Slurm launcher: a job of a Slurm cluster, submitted and followed from a login node."""
