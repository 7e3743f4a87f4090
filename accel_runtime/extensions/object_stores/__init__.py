"""Checkpoints in object stores: S3, Google Cloud Storage, Azure Blob Storage. Imports no torch."""
