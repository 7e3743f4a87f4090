"""From what was typed to a plan: nodes, the machine, the network, and the plan itself."""
