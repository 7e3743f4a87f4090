"""DeepSpeed's ZeRO on the command line: its section of the profile, JSON file and operators."""
