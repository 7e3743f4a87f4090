"""What all packages of the runtime share: progress, options, nested data, and private names of torch."""
