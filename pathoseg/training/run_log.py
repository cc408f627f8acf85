"""The log of a run while it trains: metrics.csv, TensorBoard events, pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from pathoseg.annotations.annotation import ClassTable
from pathoseg.outputs.atomic import naming, replaced, write_rows, write_text
from pathoseg.platform_support import composed
from pathoseg.training.run_folder import METRICS, VALIDATION

COLUMNS = (
    "epoch",
    "step",
    "train_loss",
    "val_loss",
    "val_dice_mean",
    "val_iou_mean",
    "tiles_per_s",
)


class RunLog:
    """Writer of one run's figures; a resumed run overwrites what it computes again.

    Args:
        run: The run's folder.
        columns: Names of the figures of an epoch beyond `COLUMNS`.
        step: The steps done so far; events of later ones are purged.
    """

    def __init__(self, run: Path, columns: Sequence[str], step: int) -> None:
        self._csv = run / METRICS
        self._pictures = run / "predictions"
        self._columns = (*COLUMNS, *columns)
        self._folder = run / "tensorboard"
        with naming(self._folder):
            self._events = SummaryWriter(str(self._folder), purge_step=step + 1)

    def step(self, step: int, loss: float, rate: float) -> None:
        with naming(self._folder):
            self._events.add_scalar("train/step_loss", loss, step)
            self._events.add_scalar("train/learning_rate", rate, step)

    def epoch(self, rows: Sequence[dict[str, float]]) -> None:
        """Rewrite metrics.csv, and log the last epoch to TensorBoard.

        Args:
            rows: The figures of all epochs so far, by column.
        """
        empty = dict.fromkeys(self._columns, "")
        # Rows of earlier versions may have classes whose letters are decomposed.
        written = ({composed(key): _number(each) for key, each in row.items()} for row in rows)
        write_rows(self._csv, ({**empty, **row} for row in written), self._columns)
        last = rows[-1]
        with naming(self._folder):
            for name, value in last.items():
                if name not in ("epoch", "step") and value == value:
                    self._events.add_scalar(f"epoch/{name}", value, int(last["step"]))
            self._events.flush()

    def picture(self, image: NDArray[np.uint8], epoch: int, step: int) -> None:
        """Write an epoch's picture as `predictions/epoch-0001.png` and as a TensorBoard event.

        Args:
            image: RGB, shape (height, width, 3).
            epoch: From 1.
            step: The step so far, for TensorBoard's axis.
        """
        self._pictures.mkdir(exist_ok=True)
        with replaced(self._pictures / f"epoch-{epoch:04d}.png") as partial:
            Image.fromarray(image).save(partial)
        with naming(self._folder):
            self._events.add_image("image_truth_prediction", image, step, dataformats="HWC")

    def validation(
        self,
        epoch: int,
        confusion: NDArray[np.int64],
        shown: Mapping[str, tuple[str, float, NDArray[np.uint8]]],
    ) -> None:
        """Write what is known of the best epoch: validation.json, and pictures of two tiles.

        Args:
            epoch: From 1.
            confusion: By truth and prediction, in the order of the model's classes.
            shown: "best" and "worst" → slide, loss and picture of a tile, which is written as
                `predictions/best-tile.png` and so on.
        """
        self._pictures.mkdir(exist_ok=True)
        for name, (_, _, image) in shown.items():
            with replaced(self._pictures / f"{name}-tile.png") as partial:
                Image.fromarray(image).save(partial)
        tiles = {name: {"slide": slide, "loss": loss} for name, (slide, loss, _) in shown.items()}
        known = {"epoch": epoch, "confusion": confusion.tolist(), "tiles": tiles}
        write_text(self._csv.with_name(VALIDATION), json.dumps(known, indent=2) + "\n")

    def flush(self) -> None:
        with naming(self._folder):
            self._events.flush()

    def close(self) -> None:
        with naming(self._folder):
            self._events.close()


def comparison(
    image: NDArray[np.uint8],
    truth: NDArray[np.uint8],
    prediction: NDArray[np.uint8],
    classes: ClassTable,
) -> NDArray[np.uint8]:
    """Image, truth and prediction side by side, classes in their colours.

    Args:
        image: (h, w, 3).
        truth: (h, w) class indices; 255 is drawn grey.
        prediction: (h, w) class indices.
        classes: Their colours.

    Returns:
        (h, 3 w, 3).
    """
    palette = classes.palette()
    return np.concatenate([image, palette[truth], palette[prediction]], axis=1)


def to_text(image: NDArray[np.uint8]) -> str:
    """Encode an image (height, width, 3) as text, to be sent between ranks."""
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def from_text(text: str) -> NDArray[np.uint8]:
    """Decode the image that `to_text` encoded."""
    with Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"]) as image:
        return np.asarray(image)


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() else f"{value:.9g}"
