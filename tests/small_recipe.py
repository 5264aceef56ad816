"""The recipe's command line made small; as a program, a `python` that does so."""

from __future__ import annotations

import os
import re
import sys

# 60,000 parameters, a step in about 20 ms
TINY_MODEL = {
    "model.hidden_size": "32",
    "model.intermediate_size": "64",
    "model.moe_intermediate_size": "32",
    "model.num_hidden_layers": "3",
    "model.head_dim": "16",
    "model.num_attention_heads": "2",
    "model.num_key_value_heads": "1",
    "model.num_experts": "4",
    "model.sliding_window": "16",
}
TINY_RUN = {
    "trainer.max_steps": "4",
    "trainer.log_every_n_steps": "1",
    "trainer.enable_progress_bar": "false",
}
TINY_REVERSE_TEXT = {
    "data.sequence_length": "64",
    "data.batch_size": "2",
    "data.num_train_rows": "64",
    "data.num_validation_rows": "8",
}


def small(overrides: list[str]) -> list[str]:
    """The same command for a tiny model: steps divided by 100, what it leaves open filled in."""
    if "--help" in overrides or "dry_run=true" in overrides:
        return overrides
    overrides = [_with_few_steps(override) for override in overrides]
    given = {override.split("=", 1)[0] for override in overrides}
    tiny = TINY_MODEL | TINY_RUN | {"checkpoint.every_n_steps": "1", "samples.max_new_tokens": "4"}
    tiny |= {} if "data=jsonl" in overrides else TINY_REVERSE_TEXT
    return [*overrides, *(f"{key}={value}" for key, value in tiny.items() if key not in given)]


def _with_few_steps(override: str) -> str:
    override = re.sub(
        r"^(trainer\.max_steps=)(\d+)$", lambda found: f"{found[1]}{int(found[2]) // 100}", override
    )
    return re.sub(r"step-(\d{6})", lambda found: f"step-{int(found[1]) // 100:06d}", override)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["recipes/sft.py"]:
        arguments[1:] = small(arguments[1:])
    os.execv(sys.executable, [sys.executable, *arguments])
