"""S3 for tests: servers on loopback, and a proxy of faults in front of them."""
