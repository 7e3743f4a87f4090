"""What tests read from the sources, the documentation and the tests themselves."""
