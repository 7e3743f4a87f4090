"""Prepared loaders under the names and in the place that scripts import them from."""

from accel_runtime.data.loader import PreparedLoader, skip_first_batches

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "skip_first_batches"]

DataLoaderShard = PreparedLoader
"""Its name in Accelerate, which scripts import to ask what an object is."""
DataLoaderDispatcher = PreparedLoader
"""The same: who reads is a matter of a prepared loader's options here."""
