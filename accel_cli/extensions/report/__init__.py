"""The report of a run: its data, its plots, and the page."""
