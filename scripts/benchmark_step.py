"""Time our training step beside a bare torch loop: the same model, batches and optimizer, in one process.

    python scripts/benchmark_step.py --steps 60
    python scripts/benchmark_step.py --steps 60 model.num_hidden_layers=8 model.num_experts=32

After each step of the recipe's trainer, with its default callbacks and logger, a loop of ten lines makes one
step on a copy of the model, so that whatever else the machine does falls on both. A step is all from batch to
batch: fetching it, logging, records. Ratios are of blocks as long as the logging interval, so that each holds
one log. Further arguments are the recipe's own; the default is the small model with hidden size 256.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import time
from typing import Any

from afmoe.compose import recipe
from afmoe.config import RunConfig
from afmoe.errors import ConfigError, ScriptParser, script_errors
from afmoe.run import open_run
from afmoe.signals import stop_signals

WARM_UP_BLOCKS = 1
DEFAULTS = (
    "model.hidden_size=256",
    "model.intermediate_size=768",
    "model.moe_intermediate_size=256",
    "model.head_dim=64",
    "trainer.val_check_interval=1000000",
    "checkpoint.every_n_steps=1000000",
    "data.num_validation_rows=8",
)


def main() -> None:
    options, overrides = read_options()
    with tempfile.TemporaryDirectory() as folder:
        own = (f"trainer.max_steps={options.steps + 1}", f"hydra.run.dir={folder}")
        sys.argv[1:] = [*DEFAULTS, *overrides, *own]
        times: dict[str, list[float]] = {}

        @recipe(config_name="sft")
        def program(config: RunConfig) -> None:
            interval = config.trainer.log_every_n_steps
            if options.steps < (WARM_UP_BLOCKS + 2) * interval:
                raise ConfigError(f"--steps must be at least {(WARM_UP_BLOCKS + 2) * interval}")
            clock = time.process_time if options.cpu_time else time.perf_counter
            times.update(measure(config, clock), interval=[interval])

        program()
    figures = ratios(times, int(times.pop("interval")[0]))
    print(json.dumps(figures) if options.json else "\n".join(table(figures, options.cpu_time)))


def read_options() -> tuple[argparse.Namespace, list[str]]:
    parser = ScriptParser(
        description=(__doc__ or "").split("\n\n", 1)[0], epilog=(__doc__ or "").rpartition("\n\n")[2]
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of each, a block of warm-up included")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for a machine that is busy")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options, overrides = parser.parse_known_args()
    if wrong := [text for text in overrides if text.startswith("-") or "=" not in text]:
        raise ConfigError(f"unknown option {wrong[0]}; see --help")
    return options, overrides


def measure(config: RunConfig, clock: Any) -> dict[str, list[float]]:
    """Seconds of each step of the trainer and of the bare loop."""
    import lightning.pytorch as pl

    from afmoe import assembly
    from afmoe.console import quiet_libraries
    from afmoe.hardware import detect_hardware

    quiet_libraries()
    pl.seed_everything(config.seed, verbose=False)
    hardware = detect_hardware(config.trainer.accelerator)
    source = assembly.find_model(config)
    data = assembly.make_data(config, source)
    with open_run(config) as run, stop_signals(run.rank) as signals:
        callbacks = assembly.make_callbacks(config, run, data, signals)
        trainer = assembly.make_trainer(config, run, callbacks, hardware)
        model = assembly.make_model(config, source, trainer, hardware)
        module = assembly.make_module(config, model, data)
        loop = BareLoop(copy.deepcopy(module.model), module.optim, data)
        beside = make_callback(loop, clock)
        trainer.callbacks.append(beside)  # pyright: ignore[reportAttributeAccessIssue]
        trainer.fit(module, data)
    return {"trainer": beside.trainer_seconds, "bare loop": beside.bare_seconds}


class BareLoop:
    """What a person writes without a framework."""

    def __init__(self, model: Any, optim: Any, data: Any) -> None:
        self.model, self.data = model, data
        self.optimizer = optim.optimizer(model)
        self.clip = math.inf if optim.config.gradient_clip is None else optim.config.gradient_clip
        self.batches: Any = iter(())

    def step(self) -> None:
        import torch

        batch = next(self.batches, None)
        if batch is None:
            # the data module has its trainer by now, so it is the epoch that the trainer is in
            self.batches = iter(self.data.train_dataloader())
            batch = next(self.batches)
        output = self.model(
            batch["input_ids"],
            batch["position_ids"],
            batch["labels"],
            attention_mask=batch["attention_mask"],
            max_labels=batch["num_own_label_tokens"],
        )
        self.optimizer.zero_grad()
        (output.loss_sum / batch["num_label_tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def make_callback(loop: BareLoop, clock: Any) -> Any:
    """The callback that makes a bare step after each of the trainer's, and times both."""
    from lightning.pytorch.callbacks import Callback

    class Beside(Callback):
        def __init__(self) -> None:
            self.trainer_seconds: list[float] = []
            self.bare_seconds: list[float] = []
            self.start = math.nan

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            end = clock()
            loop.step()
            now = clock()
            # the first has no beginning
            if self.start == self.start:
                self.trainer_seconds.append(end - self.start)
                self.bare_seconds.append(now - end)
            self.start = now

    return Beside()


def ratios(times: dict[str, list[float]], interval: int) -> dict[str, Any]:
    """Medians, and ratios of blocks of `interval` steps."""
    blocks = {
        name: [
            sum(seconds[start : start + interval])
            for start in range(WARM_UP_BLOCKS * interval, len(seconds) - interval + 1, interval)
        ]
        for name, seconds in times.items()
        if name != "interval"
    }
    found = [ours / bare for ours, bare in zip(blocks["trainer"], blocks["bare loop"], strict=True)]
    first, median, third = statistics.quantiles(found, n=4)
    return {
        "ratio": median,
        "ratio_quartiles": [first, third],
        "blocks": len(found),
        "milliseconds": {
            name: statistics.median(seconds[WARM_UP_BLOCKS * interval :]) * 1e3
            for name, seconds in times.items()
            if name != "interval"
        },
    }


def table(figures: dict[str, Any], is_cpu_time: bool) -> list[str]:
    kind = "processor time" if is_cpu_time else "wall time"
    lines = [
        f"{name:<10} {value:8.1f} ms a step (median, {kind})"
        for name, value in figures["milliseconds"].items()
    ]
    low, high = figures["ratio_quartiles"]
    return [
        *lines,
        f"trainer / bare loop: {figures['ratio']:.3f} (quartiles {low:.3f} to {high:.3f} of "
        f"{figures['blocks']} blocks)",
    ]


if __name__ == "__main__":
    with script_errors():
        main()
