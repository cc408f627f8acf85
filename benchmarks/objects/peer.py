"""What scikit-image takes for the same objects, the mask held whole; needs a venv of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from skimage.feature import peak_local_max
from skimage.measure import regionprops_table
from skimage.segmentation import watershed
from synthetic import Texture, bands, draw_cells, layout

# Area, centroid, Crofton's perimeter, solidity, longest and shortest axis, and mean intensities:
# circularity follows from the first and the third.
PROPERTIES = [
    *("label", "area", "centroid", "perimeter_crofton", "solidity", "feret_diameter_max"),
    *("axis_minor_length", "intensity_mean"),
]


def main() -> None:
    """`peer.py COUNT WIDTH`: finds and measures about COUNT objects; prints figures as JSON."""
    rng = np.random.default_rng(0)
    cells, texture = draw_cells(rng), Texture(rng)
    chosen = layout(int(sys.argv[1]), int(sys.argv[2]), cells, rng)
    whole = np.concatenate(list(bands(cells, chosen)), axis=1)
    mask, height = whole[0] > 0, whole[1]
    # Two intensities, as we measure two stains; making them of the pixels is not timed.
    values = texture.read(0, 0, whole.shape[2], whole.shape[1])[..., :2]
    times = [time.process_time()]
    peaks = peak_local_max(height, min_distance=4, threshold_abs=16, exclude_border=False)
    markers = np.zeros(height.shape, np.int32)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    labels = watershed(-height.astype(np.int16), markers, mask=mask)
    times.append(time.process_time())
    table = regionprops_table(labels, values, properties=PROPERTIES)
    times.append(time.process_time())
    find, measure = np.diff(times).tolist()
    status = Path("/proc/self/status").read_text()
    figures = {
        "objects": len(table["label"]),
        "find_s": find,
        "measure_s": measure,
        "peak_mib": int(status.split("VmHWM:")[1].split()[0]) / 2**10,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
