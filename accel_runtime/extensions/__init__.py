"""What a user chooses by name: engines, devices, stores, formats, trackers and tools; each folder can be deleted."""
