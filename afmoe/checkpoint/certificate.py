"""What was found about a checkpoint, as one record: `scripts/verify_checkpoint.py` prints it.

What it proves and what it cannot is in docs/checkpoints.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from afmoe.checkpoint.compare import differing_keys, exchanged_keys
from afmoe.checkpoint.config_file import check_expressible, read_config
from afmoe.checkpoint.layouts import layer_of, layers_of
from afmoe.checkpoint.marker import read_conversion
from afmoe.checkpoint.memory import check_memory
from afmoe.checkpoint.model_directory import EMBEDDING
from afmoe.checkpoint.model_files import ModelFiles
from afmoe.checkpoint.progress import OnProgress, no_progress
from afmoe.checkpoint.reference import ReferenceLayers
from afmoe.checkpoint.shapes import canonical_specs
from afmoe.checkpoint.verify import TOLERANCE, LayerResult, verify_layers
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError

_READ_BY_TRANSFORMERS = ("hf", "hf_fused")
# settings of generation and training: two directories with the same weights may differ in them
_NO_MATHS = {
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("initializer_range", "output_router_logits", "router_init", "use_cache"),
}
_HASH_PIECE = 1 << 24


@dataclass
class Difference:
    """A tensor that is not, bit for bit, what the other directory holds."""

    key: str
    """In layout `hf`: one an expert."""
    layer: int | None
    found_as: str | None = None
    """The key under which the other directory holds these values."""


@dataclass
class Certificate:
    directory: str
    layout: str
    against: str | None
    """The directory that it was compared with, bit for bit."""
    ours_read: str
    transformers_read: str
    num_tokens: int
    sliding_window: int
    num_layers: int
    """In the whole model."""
    layers: list[LayerResult] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    """Errors of `embedding` and `logits`."""
    differences: list[Difference] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    tolerance: float = TOLERANCE

    @property
    def failures(self) -> list[str]:
        """One sentence for each layer or end that does not pass."""
        found: dict[str, list[str]] = {}
        for result in self.layers:
            if not result.passes:
                text = f"relative error {result.largest_error:.2g}"
                worst = result.errors.get("experts", 0.0)
                if not worst <= self.tolerance:
                    text += f", worst in expert {result.worst_expert}"
                found.setdefault(f"layer {result.layer}", []).append(text)
        for name, error in self.ends.items():
            if not error <= self.tolerance:
                found.setdefault(name, []).append(f"relative error {error:.2g}")
        for difference in self.differences:
            where = difference.key if difference.layer is None else f"layer {difference.layer}"
            held = f" holds {difference.found_as}" if difference.found_as else " differs"
            found.setdefault(where, []).append(difference.key + held)
        return [f"{where}: {_first_few(texts)}" for where, texts in found.items()]

    @property
    def passes(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        for errors in (fields["ends"], *(layer["errors"] for layer in fields["layers"])):
            # JSON knows no NaN
            errors.update({name: str(error) for name, error in errors.items() if not math.isfinite(error)})
        return {"passes": self.passes, "failures": self.failures, **fields}


def certify(
    directory: Path,
    *,
    against: Path | None = None,
    num_layers: int | None = None,
    num_tokens: int = 256,
    on_progress: OnProgress = no_progress,
) -> Certificate:
    """Verify `directory`, in full or its first `num_layers` layers.

    `against`: a directory that should hold the same weights, in any layout. One side of the computation then
    reads it, and every tensor is compared bit for bit. Raises `ConfigError` for directories that are not
    whole, `MachineError` when a layer does not fit in memory.
    """
    config = read_config(directory)
    check_expressible(config, "hf")
    if num_layers is not None and not 1 <= num_layers <= config.num_hidden_layers:
        raise ConfigError(f"--layers must lie in [1, {config.num_hidden_layers}], got {num_layers}")
    if num_tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {num_tokens}")
    num_layers = num_layers or config.num_hidden_layers
    files = ModelFiles(directory, canonical_specs(config))
    other = None
    if against is not None:
        other = ModelFiles(against, canonical_specs(_same_config(config, directory, against)))
    ours, theirs, rounding = _sides(files, other)
    _check_room(config, directory)
    certificate = Certificate(
        directory=str(directory),
        layout=files.layout,
        against=None if against is None else str(against),
        ours_read=f"{ours.directory} ({ours.layout})",
        transformers_read=f"{theirs.directory} ({theirs.layout})" + _rounded(rounding),
        num_tokens=num_tokens,
        sliding_window=config.sliding_window,
        num_layers=config.num_hidden_layers,
    )

    def on_layer(result: LayerResult) -> None:
        certificate.layers.append(result)
        on_progress("layers", len(certificate.layers), num_layers)

    certificate.ends = verify_layers(
        ours,
        config,
        ReferenceLayers(theirs.directory, theirs.layout, rounding),
        num_layers=num_layers,
        num_tokens=num_tokens,
        on_layer=on_layer,
    )
    if other is not None:
        certificate.differences = _differences(files, other, num_layers, on_progress)
    certificate.sha256 = _hashes(directory, on_progress)
    certificate.versions = {
        name: version(name) for name in ("afmoe-recipe", "torch", "transformers", "safetensors")
    }
    certificate.date = datetime.now(UTC).isoformat(timespec="seconds")
    return certificate


def source_of(directory: Path) -> Path | None:
    """What `directory` was converted from, if it says so and that is still there."""
    conversion = read_conversion(directory)
    source = Path(str(conversion["source"])) if conversion and conversion.get("source") else None
    return source if source is not None and source.is_dir() else None


def _sides(files: ModelFiles, other: ModelFiles | None) -> tuple[ModelFiles, ModelFiles, torch.dtype | None]:
    """Who reads what: ours, transformers', and the dtype that the latter rounds to first.

    With two directories each side reads one, transformers if possible the one whose layout is its own.
    """
    if other is None:
        return files, files, None
    stored, original = files.specs[EMBEDDING].dtype, other.specs[EMBEDDING].dtype
    if torch.promote_types(stored, original) != stored:
        return files, other, stored
    if other.layout in _READ_BY_TRANSFORMERS or files.layout not in _READ_BY_TRANSFORMERS:
        return files, other, None
    return other, files, None


def _rounded(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else f", rounded to {str(dtype).removeprefix('torch.')}"


def _same_config(config: AfmoeConfig, directory: Path, against: Path) -> AfmoeConfig:
    other = read_config(against)
    mine, its = dataclasses.asdict(config), dataclasses.asdict(other)
    wrong = [
        f"{name} is {mine[name]!r} and {its[name]!r}"
        for name in mine
        if name not in _NO_MATHS and mine[name] != its[name]
    ]
    if wrong:
        raise ConfigError(f"{directory} and {against} are not the same model: {_first_few(wrong)}")
    return other


def _check_room(config: AfmoeConfig, directory: Path) -> None:
    specs = canonical_specs(config)
    layers = dict.fromkeys(layers_of(specs), 0)
    for key, spec in specs.items():
        if (layer := layer_of(key)) is not None:
            layers[layer] += spec.nbytes
    # beside the layer itself, what it is stacked and cast from
    check_memory(f"verifying one layer of {directory} in float32", 2 * max(layers.values()))


def _differences(
    files: ModelFiles, other: ModelFiles, num_layers: int, on_progress: OnProgress
) -> list[Difference]:
    """Over the layers that are verified, and all that is in no layer."""
    found = []
    for layer in [None, *files.layers[:num_layers]]:
        if layer is None:
            copy = {key: files.read_top(key) for key in files.top_keys}
            original = {key: other.read_top(key) for key in other.top_keys}
        else:
            copy, original = files.read_layer(layer, "hf"), other.read_layer(layer, "hf")
        wrong = differing_keys(copy, original, "hf")
        exchanged = exchanged_keys(wrong, copy, original)
        found += [Difference(key, layer, exchanged.get(key)) for key in wrong]
        on_progress("comparing", 0 if layer is None else layer + 1, num_layers)
    return found


def _hashes(directory: Path, on_progress: OnProgress) -> dict[str, str]:
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    total, done = sum(path.stat().st_size for path in paths), 0
    hashes = {}
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_HASH_PIECE):
                digest.update(piece)
                done += len(piece)
                on_progress("hashing", done, total)
        hashes[path.name] = digest.hexdigest()
    return hashes


def _first_few(texts: list[str]) -> str:
    return "; ".join(texts[:5]) + (f"; ... ({len(texts)} in all)" if len(texts) > 5 else "")
