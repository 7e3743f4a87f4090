"""Write and read weights and objects in files for other programs."""
