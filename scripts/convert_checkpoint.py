"""Convert an AFMoE checkpoint to another layout and dtype, layer by layer.

    python scripts/convert_checkpoint.py SOURCE DESTINATION --layout hf_fused --dtype bfloat16 --check

SOURCE is a directory with `config.json` and safetensors in any known layout, which is detected. DESTINATION
is written whole or not at all, with the tokenizer and the configs; `conversion.json`, written last, says
what it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import DownloadColumn

from afmoe.errors import ScriptParser, script_errors

if TYPE_CHECKING:
    from afmoe.checkpoint.convert import Conversion

# spelt out: `--help` loads no torch
LAYOUTS = ("hf", "hf_fused", "prime", "canonical")
DTYPES = ("keep", "float32", "bfloat16", "float16")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main() -> None:
    options = read_options()
    import torch

    from afmoe.checkpoint.convert import convert_checkpoint
    from afmoe.checkpoint.progress import progress_bars

    with progress_bars(DownloadColumn()) as on_progress:
        conversion = convert_checkpoint(
            options.source,
            options.destination,
            options.layout,
            None if options.dtype == "keep" else getattr(torch, options.dtype),
            check=options.check,
            force=options.force,
            max_shard_size=options.max_shard_size,
            on_progress=on_progress,
        )
    for line in summary(conversion, options.destination):
        print(line)


def read_options() -> argparse.Namespace:
    parser = ScriptParser(
        description=(__doc__ or "").split("\n\n", 1)[0], epilog=(__doc__ or "").rpartition("\n\n")[2]
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("destination", type=Path, metavar="DESTINATION")
    parser.add_argument("--layout", choices=LAYOUTS, required=True, help="names and shapes to write")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="keep", help="of all weights but the selection bias (fp32)"
    )
    parser.add_argument("--check", action="store_true", help="read back, undo, compare bitwise, look for NaN")
    parser.add_argument("--force", action="store_true", help="replace an older model at DESTINATION")
    parser.add_argument(
        "--max-shard-size", type=size, default="5GB", help="bytes, or a number with KB, MB or GB"
    )
    return parser.parse_args()


def size(text: str) -> int:
    number, unit = text.upper(), 1
    for name, factor in UNITS.items():
        if number.endswith(name):
            number, unit = number.removesuffix(name), factor
    if not number.strip().replace(".", "", 1).isdigit() or float(number) * unit < 1:
        raise argparse.ArgumentTypeError(f"must be a size like 500MB or 5GB, got {text}")
    return int(float(number) * unit)


def summary(conversion: Conversion, destination: Path) -> list[str]:
    lines = [
        f"{conversion.source_layout} -> {conversion.layout} ({conversion.dtype}): "
        f"{conversion.num_tensors} tensors, {conversion.num_bytes / 1e9:.3f} GB in {destination}"
    ]
    if conversion.dropped:
        lines.append(f"left out, a trainer's state: {first_ten(conversion.dropped)}")
    if conversion.zero_biases:
        lines.append(f"the source has no selection bias: {conversion.zero_biases} were written as zero")
    if conversion.not_copied:
        lines.append(f"not copied: {first_ten(conversion.not_copied)}")
    if conversion.non_finite is not None:
        rounded = "" if conversion.is_lossless else f", rounded to {conversion.dtype}"
        lines.append(f"read back and undone: bitwise equal to the source{rounded}")
        found = [f"{key} ({what})" for key, what in conversion.non_finite.items()]
        lines.append(f"not finite: {first_ten(found) if found else 'nothing, no NaN'}")
    return lines


def first_ten(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f", ... ({len(names)} in all)" if len(names) > 10 else "")


if __name__ == "__main__":
    with script_errors():
        main()
