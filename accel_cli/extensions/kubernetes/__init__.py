"""A job of a Kubernetes cluster: its manifests, and how it is submitted and followed."""
