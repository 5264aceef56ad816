"""Is this AFMoE checkpoint exact here? Our layers against transformers', one at a time, on its own weights.

    python scripts/verify_checkpoint.py DIRECTORY [--against SOURCE] [--layers N] [--tokens N] [--json FILE]

Prints a certificate and ends with 0, or with 1 and the layers that do not pass. With `--against` every tensor
is also compared, bit for bit, with another directory that should hold the same weights; for a converted
checkpoint that is its source, as long as it is there. docs/checkpoints.md says what is proved and what not.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.table import Table

from afmoe.errors import ConfigError, ScriptParser, script_errors

if TYPE_CHECKING:
    from afmoe.checkpoint.certificate import Certificate
    from afmoe.checkpoint.verify import LayerResult


def main() -> int:
    options = read_options()
    if not options.directory.is_dir():
        raise ConfigError(f"DIRECTORY {options.directory} is no directory")
    import transformers

    from afmoe.checkpoint.certificate import certify, source_of
    from afmoe.checkpoint.config_file import write_json
    from afmoe.checkpoint.progress import progress_bars

    # it reports every layer's absent embedding
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    against = options.against
    if against is None and not options.alone:
        against = source_of(options.directory)
    with progress_bars(TaskProgressColumn()) as on_progress:
        certificate = certify(
            options.directory,
            against=against,
            num_layers=options.layers,
            num_tokens=options.tokens,
            on_progress=on_progress,
        )
    show(certificate, Console())
    if options.json is not None:
        write_json(options.json, certificate.to_json())
    return 0 if certificate.passes else 1


def read_options() -> argparse.Namespace:
    text = (__doc__ or "").split("\n\n")
    parser = ScriptParser(description=text[0], epilog=text[2])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument(
        "--against", type=Path, metavar="SOURCE", help="should hold the same weights, any layout"
    )
    parser.add_argument(
        "--alone", action="store_true", help="do not look for a converted checkpoint's source"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="length of the sequence")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the certificate there as well")
    options = parser.parse_args()
    if options.against is not None and options.alone:
        parser.error("give --against or --alone, not both")
    return options


def show(certificate: Certificate, console: Console) -> None:
    table = Table(
        title=f"{certificate.directory} against transformers, fp32, relative errors",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    for name in ("layer", "kind", "attn", "mlp", "experts", "output", "reached", "ties", ""):
        table.add_column(name, justify="left" if name in ("kind", "") else "right", no_wrap=True)
    for result in certificate.layers:
        table.add_row(*row(result))
    for name, error in certificate.ends.items():
        passes = verdict(error <= certificate.tolerance)
        table.add_row(name, *[""] * 4, f"{error:.1e}", *[""] * 2, passes)
    console.print(table)
    for line in facts(certificate):
        console.print(line, highlight=False, soft_wrap=True)


def row(result: LayerResult) -> list[str]:
    errors = {name: f"{error:.1e}" for name, error in result.errors.items()}
    return [
        str(result.layer),
        f"{result.attention} {result.feed_forward}",
        errors["attention"],
        errors["feed_forward"],
        errors.get("experts", ""),
        errors["output"],
        str(result.num_experts_reached) if "experts" in errors else "",
        str(result.num_ties) if "experts" in errors else "",
        verdict(result.passes),
    ]


def verdict(passes: bool) -> str:
    return "[green]exact[/green]" if passes else "[red]FAILS[/red]"


def facts(certificate: Certificate) -> list[str]:
    inside = certificate.num_tokens <= certificate.sliding_window
    lines = [
        f"ours read: {certificate.ours_read}",
        f"transformers read: {certificate.transformers_read}",
        f"sequence: {certificate.num_tokens} tokens, window {certificate.sliding_window}"
        + (f" (not reached: --tokens {certificate.sliding_window + 64} would)" if inside else ""),
    ]
    if certificate.against is None:
        lines.append("bit for bit: not compared (--against SOURCE does)")
    else:
        count = len(certificate.differences)
        what = f"{count} tensors differ" if count else "every tensor equal"
        lines.append(f"bit for bit with {certificate.against}: {what}")
    for result in certificate.layers:
        lines += [f"unusual: {key} holds values that are not finite" for key in result.non_finite]
        lines += [
            f"unusual: layer {result.layer}: {name} of experts {first} and {second} is the same tensor"
            for name, first, second in result.same_experts[:5]
        ]
    lines += [f"sha256 {digest}  {name}" for name, digest in certificate.sha256.items()]
    lines.append(", ".join(f"{name} {number}" for name, number in certificate.versions.items()))
    scope = "" if len(certificate.layers) == certificate.num_layers else "PARTIAL "
    extent = f"{len(certificate.layers)} of {certificate.num_layers} layers"
    if certificate.passes:
        lines.append(f"{scope}PASS: {extent} within {certificate.tolerance:g}, {certificate.date}")
    else:
        lines.append(f"FAIL: {extent} looked at, bound {certificate.tolerance:g}, {certificate.date}")
        lines += [f"  {failure}" for failure in certificate.failures]
    return lines


if __name__ == "__main__":
    with script_errors():
        raise SystemExit(main())
