"""Models and batches sharded over the devices of torch_xla."""
