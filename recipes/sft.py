"""Supervised fine-tuning of an AFMoE model: `python recipes/sft.py model=afmoe_mini moe/compute=fp8`.

`--help` lists every group and field. Options are checked before torch is loaded, so a mistake is answered at
once.
"""

from __future__ import annotations

from afmoe.compose import recipe
from afmoe.config import RunConfig
from afmoe.explain import explained_faults
from afmoe.registry import configure
from afmoe.run import Run, open_run
from afmoe.signals import StopSignals, stop_signals
from afmoe.sweep_job import needs_own_command, run_own_command


@recipe(config_name="sft")
def main(config: RunConfig) -> float | None:
    """One run, from the config to `export/`. Returns the held-out loss, for sweeps."""
    configure("data", config.data).check_files()
    if needs_own_command(config):
        return run_own_command()
    with open_run(config) as run, stop_signals(run.rank) as signals, explained_faults(config, run.directory):
        return None if run.finished else train(config, run, signals)


def train(config: RunConfig, run: Run, signals: StopSignals) -> float | None:
    """Read the data, build the model, train, validate, export."""
    import lightning.pytorch as pl

    from afmoe import assembly, finish, screens
    from afmoe.console import quiet_libraries
    from afmoe.hardware import detect_hardware

    quiet_libraries()
    pl.seed_everything(config.seed, verbose=False)
    hardware = detect_hardware(config.trainer.accelerator)
    assembly.check_choices(config, hardware)
    source = assembly.find_model(config)
    assembly.check_model(config, source, hardware)

    data = assembly.make_data(config, source)
    assembly.check_validation(config, data)
    callbacks = assembly.make_callbacks(config, run, data, signals)
    trainer = assembly.make_trainer(config, run, callbacks, hardware)
    assembly.check_parallelism(config, source, trainer, hardware)
    if config.dry_run:
        screens.show_plan(config, source, data, hardware, trainer)
        return None

    weights_follow = run.resume_from is not None
    model = assembly.make_model(config, source, trainer, hardware, weights_follow=weights_follow)
    module = assembly.make_module(config, model, data)
    finish.record_start(config, run, data)
    screens.show_start(config, run, model, data, hardware, trainer)

    with finish.stopped_early(run, trainer):
        trainer.fit(module, data, ckpt_path=run.resume_from)
        values = finish.finish(config, run, trainer, module, data)
    screens.show_end(run, trainer, values)
    return values.get("val/loss")


if __name__ == "__main__":
    main()
