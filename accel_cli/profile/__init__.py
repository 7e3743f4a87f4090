"""The profile: what a person said once about how scripts run on this machine."""
