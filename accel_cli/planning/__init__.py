"""Turn a launch request into a plan: layers, nodes, machine, network."""
