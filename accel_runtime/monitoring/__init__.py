"""Logs, metrics and trackers, profiles, and facts for reports."""
