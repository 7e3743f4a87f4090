"""Jobs of schedulers and services: the interface of `accel jobs`."""
