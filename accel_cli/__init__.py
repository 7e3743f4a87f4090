"""The command line: profiles, the wizard, and launchers that turn a profile into processes."""
