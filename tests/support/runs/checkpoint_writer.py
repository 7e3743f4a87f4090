"""Write checkpoints without a run: any tensors, split into any parts."""

from __future__ import annotations

import itertools
from functools import partial

from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.storage import tensor_file as safetensors_file
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME, Checkpoint, Chunk, Manifest, TensorEntry


def split_shape(shape, num_parts):
    """Return the offsets and sizes of the parts of a tensor that is split along each dimension."""
    edges = []
    for size, count in itertools.zip_longest(shape, num_parts, fillvalue=1):
        step = -(-size // count)
        edges.append([(start, min(step, size - start)) for start in range(0, size, step)])
    return [tuple(zip(*edges_of_part, strict=True)) for edges_of_part in itertools.product(*edges)]


def write(  # noqa: PLR0913
    path, trees, *, cuts=None, step=7, tensors_by_rank=None, world_size=1, saved_at="2026-11-21T15:00:00Z"
):
    """Write a checkpoint of items given as trees; `cuts` is the number of parts along each dimension, by tensor name."""
    path.mkdir(parents=True)
    values, tensors, files = {}, {}, {}
    for item, tree in trees.items():
        values[item], named_tensors = serialize(tree, item)
        ranks = {
            f"{name}#{rank}": t
            for name, rank_tensors in (tensors_by_rank or {}).items()
            for rank, t in enumerate(rank_tensors)
        }
        saved_tensors = {name: t for name, t in named_tensors.items() if name not in (tensors_by_rank or {})}
        saved_tensors |= {name: t for name, t in ranks.items() if name.startswith(f"{item}/")}
        parts = [
            (name, tensor, *box)
            for name, tensor in saved_tensors.items()
            for box in (
                split_shape(tensor.shape, (cuts or {}).get(name, ()))
                if tensor.numel() and tensor.shape
                else [((0,) * tensor.ndim, tensor.shape)]
            )
        ]
        chunks = {name: [] for name in saved_tensors}
        for number, part in enumerate(parts):
            file = f"{item}-{number}.safetensors"
            files[file], chunk = write_part(path / file, file, *part)
            chunks[part[0]].append(chunk)
        for name, tensor in saved_tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = TensorEntry(dtype, tuple(tensor.shape), tuple(chunks[name]))
    manifest = Manifest(
        "handmade",
        saved_at,
        world_size,
        step,
        {"accel": "0", "torch": "2"},
        values,
        tensors=tensors,
        files=files,
    )
    (path / NAME).write_text(manifest.text())
    return Checkpoint(str(path), manifest)


def write_part(path, file, name, tensor, offsets, sizes):  # noqa: PLR0913, PLR0917
    piece = tensor
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        piece = piece.narrow(dimension, offset, size)
    part = safetensors_file.TensorPart.from_tensor(name.split("/", 1)[1], piece, offsets)
    written = safetensors_file.write_safetensors(
        partial(FileSystem().put, path), [part], {"save": "handmade"}
    )
    result = written.parts[0]
    return written.file, Chunk(
        file, result.start, part.bytes, result.checksum, tuple(offsets), tuple(sizes), result.blocks
    )


def flip(path, at):
    """Invert one bit of a file; a negative index counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
