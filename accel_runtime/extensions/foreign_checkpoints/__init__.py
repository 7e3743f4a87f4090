"""Checkpoints of other programs: folders of DeepSpeed and of torch.distributed.checkpoint. Imports no torch."""
