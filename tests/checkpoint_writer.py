"""Checkpoints made by hand: any tensors, cut into any parts."""

from __future__ import annotations

import itertools

from accel_runtime.checkpoint import safetensors_file
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manifest import NAME, Checkpoint, Chunk, Manifest, TensorEntry
from accel_runtime.checkpoint.serialization import serialize


def boxes(shape, cuts):
    """The parts of a tensor that is cut into so many along each dimension: offsets and sizes."""
    edges = []
    for size, count in itertools.zip_longest(shape, cuts, fillvalue=1):
        step = -(-size // count)
        edges.append([(start, min(step, size - start)) for start in range(0, size, step)])
    return [tuple(zip(*some, strict=True)) for some in itertools.product(*edges)]


def write(path, trees, *, cuts=None, step=7, own=None, world_size=1, saved_at="2026-11-21T15:00:00Z"):  # noqa: PLR0913
    """Write a checkpoint: items as trees, and into how many parts tensors are cut, by name."""
    path.mkdir(parents=True)
    values, tensors, files = {}, {}, {}
    for item, tree in trees.items():
        values[item], named = serialize(tree, item)
        ranks = {f"{name}#{rank}": t for name, some in (own or {}).items() for rank, t in enumerate(some)}
        kept = {name: t for name, t in named.items() if name not in (own or {})}
        kept |= {name: t for name, t in ranks.items() if name.startswith(f"{item}/")}
        parts = [
            (name, tensor, *box)
            for name, tensor in kept.items()
            for box in (
                boxes(tensor.shape, (cuts or {}).get(name, ()))
                if tensor.numel() and tensor.shape
                else [((0,) * tensor.ndim, tensor.shape)]
            )
        ]
        chunks = {name: [] for name in kept}
        for number, part in enumerate(parts):
            file = f"{item}-{number}.safetensors"
            files[file], chunk = one_file(path / file, file, *part)
            chunks[part[0]].append(chunk)
        for name, tensor in kept.items():
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
    return Checkpoint(path, manifest)


def one_file(path, file, name, tensor, offsets, sizes):  # noqa: PLR0913, PLR0917
    piece = tensor
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        piece = piece.narrow(dimension, offset, size)
    part = safetensors_file.TensorPart.from_tensor(name.split("/", 1)[1], piece, offsets)
    written = safetensors_file.write_safetensors(path, [part], {"save": "handmade"}, FileSystem())
    start, checksum = written.locations[0]
    return written.file, Chunk(file, start, part.bytes, checksum, tuple(offsets), tuple(sizes))


def flip(path, at):
    """Turn one bit of a file over; a negative place counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
