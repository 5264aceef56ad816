"""A model directory from one layout and dtype to another, layer by layer: no model is built.

In memory is one layer, and of the files what the system keeps of its own accord.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from afmoe.checkpoint.atomic import flush, recover
from afmoe.checkpoint.compare import differing_keys, non_finite
from afmoe.checkpoint.config_file import CONFIG, config_fields, read_config, write_json
from afmoe.checkpoint.layouts import convert, layer_of, stored_specs
from afmoe.checkpoint.marker import CONVERSION, PRIME_MARKER, write_markers
from afmoe.checkpoint.model_directory import (
    DOCUMENTS,
    EMBEDDING,
    GENERATION_CONFIG,
    MAX_SHARD_SIZE,
    TOKENIZER_FILES,
    generation_fields,
    is_weights_file,
    replaced_model_directory,
)
from afmoe.checkpoint.model_files import ModelFiles
from afmoe.checkpoint.progress import OnProgress, no_progress
from afmoe.checkpoint.shapes import canonical_specs
from afmoe.checkpoint.tensor_file import TensorWriter
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError, MachineError


@dataclass
class Conversion:
    """What a conversion did."""

    source_layout: str
    layout: str
    dtype: str
    """Of the embedding, as `config.json` says."""
    is_lossless: bool
    """Every weight keeps its value."""
    num_tensors: int
    num_bytes: int
    dropped: list[str]
    """Keys of a trainer's state that were left out."""
    zero_biases: int
    """Selection biases that the source lacks and that are zero now."""
    not_copied: list[str]
    """Files of the source that are no weights and no part of a model that we know."""
    non_finite: dict[str, str] | None = None
    """Key to what it holds that is no number, in the destination; None: not checked."""


def convert_checkpoint(
    source: Path,
    destination: Path,
    layout: str,
    dtype: torch.dtype | None = None,
    *,
    check: bool = False,
    force: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    on_progress: OnProgress = no_progress,
) -> Conversion:
    """Write `destination` whole or not at all, in `layout`; `dtype` None keeps that of each tensor.

    `check`: read everything back before it gets its name, undo the conversion, compare bitwise. `force`:
    replace an older model there. Raises `ConfigError` for a source that is not whole, `MachineError` for a
    disk that refuses or gives back something else.
    """
    _refuse_overwriting(source, destination, force)
    config = read_config(source)
    fields = config_fields(config, layout, torch.float32)
    files = ModelFiles(source, canonical_specs(config))
    unchanged = _source_specs(files, config, layout)
    specs = stored_specs(unchanged, dtype)
    fields["dtype"] = str(specs[EMBEDDING].dtype).removeprefix("torch.")
    num_bytes = sum(spec.nbytes for spec in specs.values())
    _check_disk(destination, num_bytes)
    copied, not_copied = _other_files(source)

    with replaced_model_directory(destination, set()) as temporary:
        for path in copied:
            # the content alone: a read-only source must not make a read-only copy
            shutil.copyfile(path, temporary / path.name)
        write_json(temporary / CONFIG, fields)
        if not (temporary / GENERATION_CONFIG).exists():
            write_json(temporary / GENERATION_CONFIG, generation_fields(config))
        _write_weights(files, temporary, layout, specs, max_shard_size, num_bytes, on_progress)
        found = None
        if check:
            _forget(temporary)
            found = _check_back(files, temporary, config, num_bytes, on_progress)
        write_markers(temporary, layout, fields["dtype"], source, files.layout)
    return Conversion(
        source_layout=files.layout,
        layout=layout,
        dtype=fields["dtype"],
        is_lossless=all(
            torch.promote_types(spec.dtype, specs[key].dtype) == specs[key].dtype
            for key, spec in unchanged.items()
        ),
        num_tensors=len(specs),
        num_bytes=num_bytes,
        dropped=files.dropped,
        zero_biases=len(files.absent),
        not_copied=not_copied,
        non_finite=found,
    )


def _refuse_overwriting(source: Path, destination: Path, force: bool) -> None:
    if not source.is_dir():
        raise ConfigError(f"SOURCE {source} is no directory; give one with {CONFIG} and safetensors")
    if destination.resolve() == source.resolve():
        raise ConfigError(f"DESTINATION {destination} is SOURCE itself; choose another directory")
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"DESTINATION {destination} is a file; choose another place")
    recover(destination.absolute())
    if destination.is_dir() and any(destination.iterdir()) and not force:
        raise ConfigError(f"DESTINATION {destination} is not empty; --force replaces a model there")


def _source_specs(files: ModelFiles, config: AfmoeConfig, layout: str) -> dict[str, Tensor]:
    """Keys, shapes and the source's dtypes in `layout`: the conversion of tensors that hold nothing."""
    state = {key: files.specs[key] for key in files.top_keys}
    for layer in files.layers:
        state |= {key: files.specs[key] for key in files.keys_of(layer)}
    canonical = convert(state, files.layout, "canonical")
    expected = canonical_specs(config)
    return convert(canonical | {key: expected[key] for key in files.absent}, "canonical", layout)


def _check_disk(destination: Path, num_bytes: int) -> None:
    place = destination.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise MachineError(
            f"DESTINATION {destination} needs {num_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there; "
            "free some space or choose another place"
        )


def _other_files(source: Path) -> tuple[list[Path], list[str]]:
    """What to copy, and the names of what is left behind (code, pickles, unknown things)."""
    copied, left = [], []
    for path in sorted(source.iterdir()):
        name = path.name
        if name in DOCUMENTS | TOKENIZER_FILES | {GENERATION_CONFIG}:
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{path} cannot be read")
            copied.append(path)
        elif not is_weights_file(name) and name not in (CONFIG, CONVERSION, PRIME_MARKER):
            left.append(name)
    return copied, left


def _write_weights(
    files: ModelFiles,
    directory: Path,
    layout: str,
    specs: Mapping[str, Tensor],
    max_shard_size: int,
    num_bytes: int,
    on_progress: OnProgress,
) -> None:
    done = 0
    # the order of the source would spread a layer over shards; embedding first, then the layers in order
    order = sorted(specs, key=lambda key: -1 if (layer := layer_of(key)) is None else layer)
    with TensorWriter(directory, {key: specs[key] for key in order}, max_shard_size) as writer:
        for part in [*files.top_keys, *files.layers]:
            if isinstance(part, str):
                tensors = {part: files.read_top(part)}
            else:
                tensors = files.read_layer(part, layout)
            writer.write(tensors)
            done += sum(specs[key].nbytes for key in tensors)
            on_progress("writing", done, num_bytes)
            # before the next layer is read: one is in memory, not two
            del tensors


def _forget(directory: Path) -> None:
    """Let the system drop what it keeps of the files in memory, so that the check reads the disk."""
    flush(directory)
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _check_back(
    files: ModelFiles, directory: Path, config: AfmoeConfig, num_bytes: int, on_progress: OnProgress
) -> dict[str, str]:
    """Read the copy, bring it back to the source's layout, compare with the source; returns `non_finite`."""
    written = ModelFiles(directory, canonical_specs(config))
    found: dict[str, str] = {}
    done = 0
    for part in [*files.top_keys, *files.layers]:
        if isinstance(part, str):
            copy, original = {part: written.read_top(part)}, {part: files.read_top(part)}
        else:
            copy = written.read_layer(part, files.layout)
            original = files.reader.read(files.keys_of(part))
        wrong = differing_keys(copy, original, files.layout)
        if wrong:
            raise MachineError(
                f"what was read back is not what was written: {', '.join(wrong[:10])}; "
                "nothing was put in place. Check the disk, and the source's"
            )
        found |= non_finite(copy)
        done += sum(tensor.nbytes for tensor in copy.values())
        on_progress("checking", min(done, num_bytes), num_bytes)
        del copy, original
    return found
