"""The processes of a launch: how they are started, watched and ended."""
