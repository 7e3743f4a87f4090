"""One module a command: parse, call, print. Each imports what it needs when it runs."""
