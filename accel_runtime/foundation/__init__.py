"""Progress, options, nested data, types of steps and meshes, and private names of torch, which all packages share."""
