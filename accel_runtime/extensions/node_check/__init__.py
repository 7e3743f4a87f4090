"""The check of the nodes of a run by its ranks: machines, connections, devices and collectives."""
