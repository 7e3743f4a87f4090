"""The contract between the launcher and the processes: settings, topology and text; standard library only."""
