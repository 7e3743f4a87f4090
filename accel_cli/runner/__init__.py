"""Run the processes of a launch: start, watch and end them."""
