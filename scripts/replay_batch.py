"""Runs the optimizer step that stopped a run again: `python scripts/replay_batch.py RUN/faults/step-000123`.

A run stops after `faults.max_skipped_steps` steps in a row with a NaN or an infinity, and keeps the last one:
the batches of every rank, the weights, the settings. This runs forward and backward on one device and names
the weight, module or gradient where the first such value appears. Ends with code 0 when loss and gradient
norm are the recorded ones, else 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from afmoe.errors import ScriptParser, script_errors


def parse() -> argparse.Namespace:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a directory step-NNNNNN in faults/ of a run folder")
    parser.add_argument("--accelerator", default="auto", choices=["auto", "cpu", "gpu"])
    return parser.parse_args()


def main() -> int:
    """Replay and report; returns the exit code."""
    with script_errors():
        options = parse()

        from afmoe.console import quiet_libraries
        from afmoe.fault_record import read_fault
        from afmoe.replay import is_reproduced, replay

        quiet_libraries()
        fault = read_fault(options.directory)
        result = replay(fault, options.accelerator)
        num_ranks, num_batches = len(fault.micro_batches), len(fault.micro_batches[0])
        print(f"step {fault.step}, {num_ranks} ranks x {num_batches} micro-batches")
        print(f"first value that is no finite number: {result.first or 'none, all are finite'}")
        all_same = True
        for name, recorded, replayed in (
            ("loss", fault.loss, result.loss),
            ("gradient norm", fault.gradient_norm, result.gradient_norm),
        ):
            same = is_reproduced(recorded, replayed)
            all_same = all_same and same
            verdict = "reproduced" if same else "NOT reproduced"
            print(f"{name}: {recorded:.6g} in the run, {replayed:.6g} now: {verdict}")
        return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
