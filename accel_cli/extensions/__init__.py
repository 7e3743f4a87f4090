"""What a user chooses by name: launchers, commands and parts of a launch; each folder can be deleted."""
