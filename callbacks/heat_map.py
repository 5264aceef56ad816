"""Counts as a picture, without a plotting library."""

from __future__ import annotations

import numpy as np

# a dark-to-bright scale whose lightness grows evenly: nothing, a fair share and twice the share are told
# apart
_SCALE = np.array(
    [[13, 8, 66], [60, 48, 140], [40, 120, 142], [60, 176, 110], [180, 210, 60], [250, 230, 90]], float
)


def heat_map(counts_LE: np.ndarray, cell: int = 12) -> np.ndarray:
    """Load of each expert (columns) in each layer (rows) as an image [rows*cell, columns*cell, 3] uint8.

    Darkest is no token, the middle of the scale a fair share, brightest twice the share or more.
    """
    mean_L1 = counts_LE.mean(axis=1, keepdims=True)
    share_LE = np.divide(counts_LE, mean_L1, out=np.zeros(counts_LE.shape), where=mean_L1 > 0)
    position_LE = np.clip(share_LE / 2.0, 0.0, 1.0) * (len(_SCALE) - 1)
    stops = np.arange(len(_SCALE))
    colours_LE3 = np.stack(
        [np.interp(position_LE, stops, _SCALE[:, channel]) for channel in range(3)], axis=-1
    )
    return colours_LE3.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
