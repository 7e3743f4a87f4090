"""The command that estimates memory."""
