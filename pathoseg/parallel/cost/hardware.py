"""The description of a device, its node and its network, as a small JSON file holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from uuid import uuid4

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.features import BASIC
from pathoseg.parallel.schedule.costs import Link, Nodes
from pathoseg.platform_support import sync_file

Data = TypeVar("Data")


def read_versioned(
    text: str | bytes, kind: type[Data], what: str, version: int, name: str, hint: str
) -> Data:
    """Read a dataclass from the JSON `{"format": version, **asdict(data)}`.

    Args:
        text: The JSON.
        kind: A dataclass.
        what: Its name for the user.
        version: The format that is read.
        name: Its name in errors.
        hint: The hint of all its errors.

    Raises:
        PathosegError: It is no JSON, of another format, or a value does not fit.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PathosegError(f"{name} is no {what} ({error}).", hint) from error
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != version:
        raise PathosegError(
            f"{name} is a {what} of format {found!r}, this pathoseg reads {version}.", hint
        )
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PathosegError(f"{name}: {where}: {first['msg']}.", hint) from error


# Another number where a file has other keys, or its fit other amounts or features (features.py).
FORMAT = 1

# Of a device that nobody has measured; benchmarks/schedules-measured finds 80 to 130 µs an action.
VISIT = 1e-4

_Positive = Annotated[FiniteFloat, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]
_Numbers = tuple[FiniteFloat, ...]


@dataclass(frozen=True, slots=True)
class Regression:
    """Seconds of a pass: amounts of work at a rate each, times e to a polynomial of features.

    Attributes:
        rates: Seconds for each unit of each amount; none is below 0.
        low: Least value of each feature in what was measured; what is below it counts as it.
        high: Likewise the greatest.
        coefficients: Factors of 1, each feature, and each product of two, the features scaled to
            -1…1.
        least: Least value that the polynomial should have had, below which it does not go.
        most: Likewise the greatest.
    """

    rates: tuple[Annotated[FiniteFloat, Field(ge=0)], ...]
    low: _Numbers
    high: _Numbers
    coefficients: _Numbers
    least: FiniteFloat
    most: FiniteFloat

    def __post_init__(self) -> None:
        size = len(self.low)
        if len(self.high) != size or len(self.coefficients) != (size + 1) * (size + 2) // 2:
            raise ValueError("a regression needs as many coefficients as its features ask for")


@dataclass(frozen=True, slots=True)
class CostFit:
    """The regressions that were fitted to measured layer times.

    Attributes:
        regressions: By family and pass, such as `convolution forward`.
        forward_in_sequence: Time of a forward in a sequence of layers over its time alone.
        backward_in_sequence: Likewise a backward.
    """

    regressions: Mapping[str, Regression]
    forward_in_sequence: _Positive = 1.0
    backward_in_sequence: _Positive = 1.0

    def __post_init__(self) -> None:
        for name in (f"{family} {part}" for family in BASIC for part in ("forward", "backward")):
            if name not in self.regressions:
                raise ValueError(f"there is no regression of {name}")


@dataclass(frozen=True)
class Hardware:
    """A device, and how it is joined to others.

    Attributes:
        name: Its name for the user.
        device: `cpu`, or the type of an accelerator by torch's name, such as `cuda`.
        memory: Bytes that a rank has.
        flops: Peak floating-point operations a second, by torch's name of the dtype: of float32,
            and of others that the device has.
        bandwidth: Peak bytes a second between the device and its memory.
        overhead: Seconds that each pass of a layer costs at least.
        per_node: Devices on a node.
        inside: The link of two devices of one node, in seconds and seconds a byte.
        between: The link of a node to the others, which its devices share.
        host: The link of a device to its host's memory, each way.
        threads: Number of threads with which it was measured; None where that has no meaning.
        measured: Date and device of the measurement; empty where all stems from datasheets.
        fit: The regression of timed layers; None where none were timed.
        visit: Seconds that a rank's program takes for each forward or backward of a stage beside
            its layers, messages included.
    """

    name: str
    device: Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
    memory: _Count
    flops: Mapping[str, _Positive]
    bandwidth: _Positive
    per_node: _Count
    inside: Link
    between: Link
    host: Link
    overhead: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    threads: _Count | None = None
    measured: str = ""
    fit: CostFit | None = field(default=None, repr=False)
    visit: Annotated[FiniteFloat, Field(ge=0)] = 0.0

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError("flops states no rate of float32, by which others are compared")
        for link in (self.inside, self.between, self.host):
            if not (0 <= link.alpha < inf and 0 <= link.beta < inf):
                raise ValueError("a link's figures are finite and not below 0")

    def network(self, ranks: int) -> Nodes:
        """Return the network of so many ranks, one on each device, nodes filled in turn."""
        return Nodes(min(self.per_node, ranks), self.inside, self.between)

    def with_rate(self, dtype: str) -> Hardware:
        """Return it with a rate of this dtype: where it states none, that of float32."""
        return replace(self, flops={dtype: self.flops["float32"], **self.flops})

    def through_hosts(self) -> Hardware:
        """Return it with links on which each message is copied to the host, sent, and copied back.

        On a node hosts send through shared memory, no faster than the package's `cpu` does; between
        nodes they have the network that the devices have.
        """
        shared, copies = load_hardware("cpu").inside, self.host

        def link(alpha: float, beta: float) -> Link:
            return Link(alpha + 2 * copies.alpha, beta + 2 * copies.beta)

        inside = max(self.inside.alpha, shared.alpha), max(self.inside.beta, shared.beta)
        between = link(self.between.alpha, self.between.beta)
        return replace(self, inside=link(*inside), between=between)


def known_hardware() -> list[str]:
    """Return the names of the devices whose figures are part of the package."""
    return sorted(
        Path(file.name).stem for file in _shipped().iterdir() if file.name.endswith(".json")
    )


def load_hardware(name: str) -> Hardware:
    """Load the figures of a device.

    Args:
        name: One of `known_hardware`, or the path of a file that `pathoseg calibrate` wrote.

    Raises:
        PathosegError: There is neither, or the file is broken or of another version.
    """
    known = known_hardware()
    if name in known:
        return _parse((_shipped() / f"{name}.json").read_bytes(), name)
    path = Path(name)
    if not path.is_file():
        raise PathosegError(
            f"There is no hardware {name!r}: neither a device that is known nor a file.",
            f"Name one of {', '.join(known)}, or a file that `pathoseg calibrate` has written.",
        )
    return _parse(path.read_bytes(), name)


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Write a file that `load_hardware` reads; an old one is replaced whole or not at all.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    figures = {"format": FORMAT, **asdict(hardware)}
    # What a user may want to change stands on lines of its own, before the long fit.
    fit = json.dumps(figures.pop("fit"))
    text = json.dumps(figures, indent=1).removesuffix("\n}") + f',\n "fit": {fit}\n}}\n'
    draft = path.with_name(f".{uuid4().hex[:8]}-{path.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        sync_file(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _shipped() -> Any:
    return resources.files(__package__) / "devices"


def _parse(content: bytes, name: str) -> Hardware:
    again = "Write it again with `pathoseg calibrate --out FILE`."
    return read_versioned(content, Hardware, "hardware file", FORMAT, name, again)
