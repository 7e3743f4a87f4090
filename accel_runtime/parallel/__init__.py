"""Models larger than one device: meshes of processes, and how a model is divided over them."""
