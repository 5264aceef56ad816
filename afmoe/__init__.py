"""AFMoE (Arcee Foundational Mixture of Experts) models and their training recipe.

Tensor names end in their shape, one letter an axis, everywhere in this package:

    B batch      S sequence     T tokens (B*S)      D hidden size
    H query heads     G key/value heads     C channels of a head
    E experts    L experts held locally    K experts per token (top-k)
    N routed copies (T*K)    R rows that the local experts receive
    F hidden size of an expert    V vocabulary
    W ranks that share the experts    A tokens that arrive at a rank, once each

Names below are imported when first used, so that `import afmoe` stays light.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    CONF_DIRECTORY: Path
    from afmoe.config import AfmoeConfig
    from afmoe.model import AfmoeForCausalLM, AfmoeModel, iter_moe_blocks
    from afmoe.registry import register

__all__ = ["CONF_DIRECTORY", "AfmoeConfig", "AfmoeForCausalLM", "AfmoeModel", "iter_moe_blocks", "register"]

_MODULES = {
    "AfmoeConfig": "afmoe.config",
    "AfmoeForCausalLM": "afmoe.model",
    "AfmoeModel": "afmoe.model",
    "iter_moe_blocks": "afmoe.model",
    "register": "afmoe.registry",
}


def __getattr__(name: str) -> Any:
    if name == "CONF_DIRECTORY":
        # beside this package, in a checkout and where it is installed; not imported by its name, which a
        # folder `conf/` beside a person's own program has too
        return Path(__file__).resolve().parent.parent / "conf"
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'afmoe' has no attribute {name!r}")
