"""Speed, phases, time left and the progress line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console

from afmoe.device_speed import gpu_peak_flops, measured_flops
from callbacks.progress import Progress, line
from callbacks.step_clock import PHASES, CudaStepClock, StepClock
from callbacks.throughput import Throughput, Totals


def test_the_clock_gives_each_interval_to_its_phase_and_a_pause_to_none(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepClock()
    clock.start()

    def after(seconds: float, phase: str, **options: Any) -> None:
        now[0] += seconds
        clock.mark(phase, **options)

    for _ in range(3):
        after(1.0, "data")
        after(2.0, "forward")
        after(4.0, "backward")
        after(8.0, "optimizer", ends_step=True)
    now[0] += 0.5
    clock.pause()
    after(1000.0, "other")
    after(0.25, "other")
    clock.settle()
    assert clock.seconds == {"data": 3, "forward": 6, "backward": 12, "optimizer": 24, "other": 0.75}
    # the first step pays for what others find ready
    assert list(clock.recent_steps) == [15.0, 15.0]
    assert (clock.usual_step, clock.last_pause) == (15.0, 1000.0)


class Event:
    """A GPU's event as torch offers it: the GPU is `lag` seconds behind the host."""

    now = 0.0
    lag = 5.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.time, self.is_waited_for = Event.now, False

    def query(self) -> bool:
        return self.is_waited_for or Event.now >= self.time + Event.lag

    def synchronize(self) -> None:
        Event.now = max(Event.now, self.time + Event.lag)

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query()
        return (later.time - self.time) * 1e3


def test_the_clock_of_a_gpu_waits_only_when_it_is_settled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = CudaStepClock()
    clock.start()
    for _ in range(100):
        for phase in ("data", "forward", "backward"):
            Event.now += 1.0
            clock.mark(phase)
        Event.now += 3.0
        before = Event.now
        clock.mark("optimizer", ends_step=True)
        assert Event.now == before
    # the last marks are not over yet, older events were read and are used again
    assert not clock.is_settled
    assert Event.made < 20
    clock.pause()
    Event.now += 1000.0
    clock.mark("data")
    clock.settle()
    assert clock.is_settled
    assert clock.seconds == {"data": 100, "forward": 100, "backward": 100, "optimizer": 300, "other": 0}
    assert (clock.usual_step, clock.last_pause) == (6.0, 1000.0)


def test_rates_are_those_of_the_steps_between_two_logs():
    def totals(steps: int, seconds: float) -> Totals:
        phases = dict.fromkeys(PHASES, 0.0) | {"forward": seconds / 4, "backward": 3 * seconds / 4}
        return Totals(
            steps=steps, tokens=100 * steps, flops=10 * steps, possible_flops=50 * seconds, seconds=phases
        )

    figures = totals(30, 8.0).since(totals(10, 4.0)).figures()
    assert figures["train/tokens_per_second"] == 500
    assert figures["train/mfu"] == 1.0
    assert figures["time/step_seconds"] == pytest.approx(0.2)
    assert figures["time/backward_seconds"] == pytest.approx(0.15)
    assert sum(figures[f"time/{phase}_seconds"] for phase in PHASES) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A6000", 154.8),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_of_gpus_are_found_by_their_names(name: str, teraflops: float | None):
    peak = gpu_peak_flops(name, torch.bfloat16)
    assert peak == (None if teraflops is None else teraflops * 1e12)


def test_fp32_on_a_gpu_counts_as_tf32_only_where_torch_may_use_it():
    assert torch.get_float32_matmul_precision() == "highest"
    assert gpu_peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5e12
    torch.set_float32_matmul_precision("high")
    try:
        assert gpu_peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 156e12
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_peak_of_a_cpu_is_measured_once():
    first = measured_flops(torch.float32, 2)
    assert first > 1e9
    start = time.perf_counter()
    assert measured_flops(torch.float32, 2) == first
    assert time.perf_counter() - start < 0.05


def test_the_progress_line_fits_100_columns(capsys: pytest.CaptureFixture):
    figures = {
        "train/tokens_per_second": 123_456.7,
        "train/mfu": 0.413,
        "train/peak_memory_gib": 123.456,
        "time/step_seconds": 2.0,
        "time/data_seconds": 0.04,
        "time/forward_seconds": 0.6,
        "time/backward_seconds": 1.14,
        "time/optimizer_seconds": 0.2,
        "time/left_seconds": 90_000.0,
    }
    text = line({"train/loss": 1.23456}, figures)
    assert text == "loss 1.235  123k tok/s  mfu 41%  123 GiB  fwd 30 bwd 57 opt 10 data 2 %  left 1d 1h"
    progress = Progress(Throughput())
    progress._start(9_999, 1_234)
    assert progress._bar is not None
    progress._bar.update(progress._task, figures=text)
    wide = Console(width=100, record=True, force_terminal=False)
    wide.print(progress._bar.get_renderable())
    progress._stop()
    [shown] = wide.export_text().strip("\n").splitlines()
    assert shown.startswith("1234/9999")
    assert shown.rstrip().endswith(text)
    capsys.readouterr()


def test_on_a_narrow_terminal_the_figures_are_cut_and_the_step_is_not():
    progress = Progress(Throughput())
    progress._start(400, 7)
    assert progress._bar is not None
    progress._bar.update(progress._task, figures="loss 1.235  " * 8)
    narrow = Console(width=50, record=True, force_terminal=False)
    narrow.print(progress._bar.get_renderable())
    progress._stop()
    [shown] = narrow.export_text().strip("\n").splitlines()
    assert shown.startswith("7/400")
    assert "loss 1.235" in shown


class Slept(pl.LightningModule):
    """Every phase sleeps for a time of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def is_step_end(self, batch_idx: int) -> bool:
        return batch_idx % 2 == 1

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        loss = self.layer(torch.ones(1, 1)).sum()
        loss.register_hook(lambda _: time.sleep(0.03))
        return loss

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        time.sleep(0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SleptData(pl.LightningDataModule):
    """Micro-batches of steps with 60 tokens, which take their time to come."""

    before_fetch: Callable[[], None]

    def train_dataloader(self) -> Any:
        return self

    def __iter__(self) -> Any:
        for _ in range(8):
            self.before_fetch()
            time.sleep(0.01)
            yield {"num_real_tokens": 60, "num_flops": 1_000}

    def __len__(self) -> int:
        return 8

    def val_dataloader(self) -> list[dict[str, Any]]:
        return [{"ids": torch.zeros(1)}]


def test_phases_are_told_apart_under_accumulation_and_validation_is_not_counted(tmp_path: Path):
    throughput = Throughput()
    trainer = pl.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=4,
        log_every_n_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        callbacks=[throughput],
    )
    start = time.perf_counter()
    trainer.fit(Slept(), SleptData())
    whole = time.perf_counter() - start
    totals, per_step = throughput.totals, throughput.figures()
    assert (totals.steps, totals.tokens, totals.flops) == (4, 240, 4_000)
    # two micro-batches a step
    for phase, slept in (("data", 0.02), ("forward", 0.04), ("backward", 0.06), ("optimizer", 0.05)):
        assert per_step[f"time/{phase}_seconds"] >= slept, phase
    # two validations slept half a second each
    assert totals.total_seconds <= whole - 1.0
    assert per_step["train/tokens_per_second"] == pytest.approx(240 / totals.total_seconds)
    assert throughput.clock.last_pause >= 0.5
    assert throughput.latest["time/left_seconds"] == 0.0


def test_counts_go_on_where_they_were():
    first = Throughput()
    first._done = Totals(
        steps=7,
        tokens=10**12,
        flops=10**24,
        possible_flops=4e24,
        seconds=dict.fromkeys(PHASES, 2.0),
    )
    again = Throughput()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.totals == first.totals
    assert again.figures()["train/mfu"] == 0.25
    assert again.figures()["train/tokens_per_second"] == 1e11
