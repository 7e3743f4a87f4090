"""A job on a cluster that SkyPilot starts: its task, and how it is submitted and followed."""
