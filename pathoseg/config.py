"""The options of a run: frozen, read from TOML and flags, written back as the run's record."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.duration import seconds
from pathoseg.errors import PathosegError
from pathoseg.memory_size import parse_memory
from pathoseg.models.model_options import LossConfig, ModelConfig
from pathoseg.progress import say
from pathoseg.tiles.tile_options import AugmentOptions, TissueOptions

Duration = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(seconds)]
Count = Annotated[int, Field(ge=1)]
NaturalNumber = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[float, Field(ge=1)]

LARGEST_TILE = 1024  # side in pixels that is chosen where none is given


def _memory_size(given: object) -> object:
    parse_memory(given)
    return given


MemorySize = Annotated[str, BeforeValidator(_memory_size)]


def _one_alone(given: object) -> object:
    """The only one of a list without it, so that both ways of writing it are the same option."""
    return given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given


def _device_name(given: object) -> object:
    if not isinstance(given, str) or not re.fullmatch(r"[a-z][a-z0-9_]*(:[0-9]+)?", given):
        raise ValueError("must be a name such as cpu, cuda or cuda:1")
    return given


DeviceName = Annotated[str, BeforeValidator(_device_name)]
Names = Annotated[str | tuple[str, ...], BeforeValidator(_one_alone)]


@dataclass(frozen=True)
class DataConfig:
    """The slides and annotations of a run.

    Attributes:
        slides: Folder of slides, or several; folders inside are searched too.
        annotations: Folder of annotations, for slides in folders inside with the same folders
            inside or none; None means beside the slides.
        table: CSV with the columns slide, patient, split; None means `slides.csv` in either folder.
            A slide is named there by its path in the folder of slides.
        classes: Names of the classes in order; None means all that the annotations name, sorted.
        assume_mpp: Microns per pixel of slides that state none.
        val_share: Share of patients held out for validation where no table splits them.
        skip_bad_slides: Leave out slides that cannot be read instead of refusing to start.
    """

    slides: Names | None = None
    annotations: str | None = None
    table: str | None = None
    classes: tuple[str, ...] | None = None
    assume_mpp: Positive | None = None
    val_share: Share = 0.2
    skip_bad_slides: bool = False

    @property
    def slide_folders(self) -> tuple[Path, ...]:
        names = (self.slides,) if isinstance(self.slides, str) else self.slides or ()
        return tuple(Path(name) for name in names)

    @property
    def told_folders(self) -> str:
        """The folders of slides, as they are told."""
        return ", ".join(map(str, self.slide_folders))


@dataclass(frozen=True)
class TileConfig:
    """The tiles that slides are cut into for training.

    Attributes:
        mpp: Microns per pixel the model sees.
        tile: Side of a tile in pixels; None takes the largest that the model divides and most
            images hold, up to 5 % of padding, at most 1,024.
        overlap: Pixels that neighbouring training tiles share.
        offsets: "random" training tiles lie anywhere within half a stride of the grid's, drawn by
            seed, epoch and sample; "grid" tiles are the same in every epoch.
        balance: "class" draws tiles so that every class is seen equally often, "none" takes all.
        balance_limit: By "class", how many times as often as by "none" a tile may be drawn; `inf`
            sets no limit.
        min_tissue: Least share of tissue in a tile without annotation.
        cache: Folder of the tile cache; None reads slides directly.
        codec: How cached tiles are compressed.
        stain: Stain normalisation, fitted once per slide.
        min_cover: (classify) least share of a tile's annotated pixels that its class must cover.
    """

    mpp: Positive = 0.5
    tile: Count | None = None
    overlap: NaturalNumber = 0
    offsets: Literal["random", "grid"] = "random"
    balance: Literal["none", "class"] = "class"
    balance_limit: Limit = 4.0
    min_tissue: Share = 0.1
    cache: str | None = None
    codec: Literal["lossless", "lossy"] = "lossless"
    stain: Literal["none", "macenko", "reinhard"] = "none"
    min_cover: Share = 0.5

    def __post_init__(self) -> None:
        if self.overlap >= self.side:
            raise PathosegError(
                f"[tiles] overlap = {self.overlap} leaves nothing new to tiles of {self.side} px.",
                "Choose an overlap below the tile's side.",
            )

    @property
    def side(self) -> int:
        """`tile`, or the largest that may be chosen."""
        return self.tile or LARGEST_TILE


@dataclass(frozen=True)
class NetConfig:
    """The network; sizes left out take the values its name implies.

    Attributes:
        name: `unet`, `unet64`, `hooknet`, `unet_resnet18` (34, 50), `vit_seg`, `resnet110_v2`,
            `resnet1001_v2` or `module:factory`.
        task: "segment" labels pixels, "classify" labels tiles, "objects" labels pixels and
            separates objects that touch.
        width: Channels of the first block.
        depth: (U-Net) number of poolings.
        norm: Normalisation layer; of networks with an encoder, that of the decoder.
        options: Keyword arguments of a `module:factory`. Of `vit_seg`: `size` ("S", "B", "L", "H",
            "H2", "g"), `patch`, `registers`, `mlp`, `layer_scale`, `positions` (docs/encoders.md).
        encoder_weights: File, run or bundle to take the encoder from; options left out follow.
        licence: Of `encoder_weights`; None takes that in timm's `config.json` or in the bundle.
        mean: Of each channel of pixels in 0…1; None takes the config's, else ImageNet's.
        std: Standard deviation of each channel, likewise.
    """

    name: str = "unet"
    task: Literal["segment", "classify", "objects"] = "segment"
    width: int | None = None
    depth: int | None = None
    norm: Literal["batch", "group", "instance"] = "batch"
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    encoder_weights: str | None = None
    licence: str | None = None
    mean: tuple[Finite, Finite, Finite] | None = None
    std: tuple[Positive, Positive, Positive] | None = None

    def __post_init__(self) -> None:
        network = self.with_classes(2)  # refuses what no network can be
        if self.encoder_weights is not None and not network.has_encoder:
            raise PathosegError(
                f"[model] encoder_weights is given, and the model {self.name} has no encoder.",
                "Choose unet_resnet50 or vit_seg (docs/encoders.md), or leave it out.",
            )

    def with_classes(self, classes: int) -> ModelConfig:
        """The network for `classes` classes, background included."""
        own = {f.name: getattr(self, f.name) for f in fields(ModelConfig) if f.name != "classes"}
        return ModelConfig(classes=classes, **own)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Attributes:
        start_from: Run, bundle or .safetensors file whose weights training starts from (`--from`);
            left out, they are random.
        epochs: Passes over the samples; None means 50, or as many as the time limit holds.
        time_limit: Time for the whole run, resumed parts counted together: "1h30m", "90s", or a
            number of seconds. In text, as on the command line, a bare number is minutes.
        samples_per_epoch: Tiles drawn an epoch; None means as many as there are.
        batch: Tiles a step.
        microbatch: Tiles a forward pass; gradients accumulate over a step. None means the whole
            batch in one process; by a plan (`parallel.ranks`, `parallel.memory`) one tile where the
            model has batch norm, whose statistics are those of a microbatch, else what is fastest.
        optimizer: AdamW, or SGD with Nesterov momentum 0.9.
        lr: Highest learning rate.
        encoder: (`unet_resnet…`, `vit_seg`) it is "tuned" with the rest, or "frozen", its norms
            included; "lora" (`vit_seg`) trains low-rank additions to its attention alone.
        encoder_lr: Learning rate of the encoder over that of the decoder.
        layer_decay: That of each block of the encoder over that of the block above.
        weight_decay: Decoupled (adamw) or L2 (sgd); never on norms and biases.
        schedule: Shape of the learning rate after the warm-up, over all steps; a run that is given
            other limits goes on as one that had them from its start.
        warmup: Share of all steps over which the learning rate rises.
        clip: Largest global gradient norm; 0 leaves gradients alone.
        amp: Arithmetic on an accelerator; "auto" means bf16 where the device computes in it, else
            fp16, and float32 on MPS. CPUs use float32.
        patience: Epochs without a better validation Dice before stopping; 0 never stops.
        validate_every: Epochs between validations.
        checkpoint_minutes: Minutes between checkpoints within an epoch.
        readers: Threads that read and augment tiles; None means the cores that this process may
            use (docs/performance.md), shared among the ranks of a machine.
    """

    start_from: str | None = None
    epochs: Count | None = None
    time_limit: Duration | None = None
    samples_per_epoch: Count | None = None
    batch: Count = 4
    microbatch: Count | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3
    encoder: Literal["tuned", "frozen", "lora"] = "tuned"
    encoder_lr: Positive = 1.0
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    weight_decay: NotNegative = 1e-2
    schedule: Literal["cosine", "poly", "constant"] = "cosine"
    warmup: Share = 0.05
    clip: NotNegative = 1.0
    amp: Literal["auto", "none", "bf16", "fp16"] = "auto"
    patience: NaturalNumber = 0
    validate_every: Count = 1
    checkpoint_minutes: NotNegative = 10.0
    readers: Count | None = None


@dataclass(frozen=True)
class InferConfig:
    """Segmenting slides; docs/inference.md says how tiles are chosen.

    Attributes:
        tile: Side of a tile in pixels; None lets `infer` choose. Of a network whose answers depend
            on a known distance (batch norm), a square of this side bounds the area of a window.
        memory: What a forward pass may take, such as "4GiB", where `infer` chooses; about, and
            counted in float32. Windows of a network of known reach are no larger.
        overlap: Pixels that neighbouring tiles share; None lets `infer` choose. Where it or
            `margin` is given, tiles are blended whatever the network.
        margin: Outer pixels of a tile whose predictions get no weight; None lets `infer` choose.
        batch: Tiles a forward pass.
        readers: Threads that read tiles ahead; None means as for [train].
        simplify: Tolerance of the outlines in pixels of the mask; 0 keeps pixel edges. Neighbours
            keep their shared edge, so beyond 1.4 pixels nothing more is left out.
        min_region_um2: Smaller regions and objects are left out (the mask keeps them).
        object_um: Microns across the largest object that is certain to be found whole, where the
            model separates objects. A larger value takes more time and memory.
        compress_regions: Write `regions.geojson.gz`, and `objects.geojson.gz`.
        region_type: How QuPath shows regions; `detection` draws faster when there are many.
    """

    tile: Count | None = None
    memory: MemorySize = "4GiB"
    overlap: NaturalNumber | None = None
    margin: NaturalNumber | None = None
    batch: Count = 1
    readers: Count | None = None
    simplify: NotNegative = 0.5
    min_region_um2: NotNegative = 10.0
    object_um: Positive = 40.0
    compress_regions: bool = False
    region_type: Literal["annotation", "detection"] = "annotation"


@dataclass(frozen=True)
class OutputsConfig:
    """Files of a result beside the usual ones.

    Attributes:
        probability: Write `probability.ome.tiff` and `uncertainty.ome.tiff`, and name the least
            certain fields of each slide in its `summary.json` (docs/inference.md).
        ngff: Write `mask.ome.zarr`, the mask as OME-NGFF 0.5 labels (docs/formats.md).
        dicom_seg: Write `mask.dcm`, the mask as DICOM SEG, of slides that are DICOM
            (docs/formats.md).
    """

    probability: bool = False
    ngff: bool = False
    dicom_seg: bool = False


@dataclass(frozen=True)
class EvaluateConfig:
    """Comparing a model with annotations; docs/evaluation.md says what is measured.

    Attributes:
        boundary_um: Microns by which a predicted boundary may miss the annotated one and still
            count as found; None means 2, or two pixels of the model where that is more.
        centroid_um: Microns between the centroids of a predicted and an annotated object up to
            which the one finds the other.
    """

    boundary_um: Positive | None = None
    centroid_um: Positive = 3.0


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of a run and their shares of a step; docs/planning.md says how a plan is found.

    Attributes:
        device: What computes: `cpu`, `cuda`, `cuda:1`, `xpu`, `mps`…; None means the accelerator
            where there is one, else the CPU. Without a number ranks take the devices of their host
            in turn.
        ranks: How many ranks there are; a launcher such as mpirun overrules it.
        shards: How many of them share each tile, a strip of rows each (docs/shards.md); None lets
            the planner choose.
        order: How microbatches go through stages: a name of docs/planning.md, or "auto".
        stages: Into how many stages the model is cut; None lets the planner choose.
        cut: Layers or modules before which the model is cut, instead of the planner's cuts.
        branches: Run branches of the model on several ranks at once: "auto", "only" or "none".
        memory: What a rank has, such as "16GiB"; None means what the hardware has.
        hardware: `v100`, `a100`, `h100`, `h200`, `b200`, `l40s`, `a40`, `a10`, `t4`, `rtx-4090`,
            `rtx-6000-ada`, `cpu` or a file of `pathoseg calibrate`; None: this machine's device.
        profile: Times each distinct layer of the model on this machine, instead of pricing it by
            the hardware; memory and links stay the hardware's.
        offload: How tensors are copied to host memory where a plan says so, in one of the forms of
            the offload study (docs/memory.md) or "overlapped" with computation; "none" offloads
            nothing. Plans are made for "overlapped".
        recompute: Whether layers may run again in the backward where memory asks for it.
        parked: What waits in host memory while its stage is not at work, copied in the form of
            `offload`: "parameters", "gradients", "optimizer" (its state). The first two pay only
            where a rank has several stages. Plans count neither what it saves nor its copies.
        transport: What joins the ranks of a run; "auto" is MPI where there is one, else gloo, and
            NCCL on top where each rank has a GPU of its own (no GPU has run it yet).
    """

    device: DeviceName | None = None
    ranks: Count = 1
    shards: Count | None = None
    order: str = "auto"
    stages: Count | None = None
    cut: tuple[str, ...] = ()
    branches: Literal["auto", "only", "none"] = "auto"
    memory: MemorySize | None = None
    hardware: str | None = None
    profile: bool = False
    offload: Literal[
        "none", "naive", "pinned", "non-blocking", "pinned-non-blocking", "overlapped"
    ] = "overlapped"
    recompute: bool = True
    parked: tuple[Literal["parameters", "gradients", "optimizer"], ...] = ()
    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"


# Number of today's defaults. Raise it once a version with the current number has been released.
FORMAT = 2
UNNUMBERED = 1  # format of the config.toml of a run that states none

# Format → the defaults that changed after it, as they were: table ("" is the top level) → key →
# value as in TOML. A default that changes, or a new key that changes what a run does, adds a row
# to the newest format that ran without it.
_FORMER_DEFAULTS: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    1: {
        "annotations": {"roi": [], "unclassified": "skip", "labels": "centre"},
        "tiles": {"tile": 1024, "offsets": "grid", "balance_limit": math.inf},
        "loss": {"context": 0.0},
        "parallel": {"shards": 1},
    }
}

# Keys that are gone: "table.key" → what became of it, a clause. Files that have them are accepted.
_RETIRED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Config:
    """Everything a run is told, one table of the TOML file each.

    Attributes:
        format: Number of the defaults that hold for keys left out.
        seed: Seed of all randomness.
    """

    format: Annotated[int, Field(ge=1, strict=True)] = FORMAT
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    annotations: AnnotationOptions = field(default_factory=AnnotationOptions)
    tiles: TileConfig = field(default_factory=TileConfig)
    tissue: TissueOptions = field(default_factory=TissueOptions)
    model: NetConfig = field(default_factory=NetConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    augment: AugmentOptions = field(default_factory=AugmentOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    infer: InferConfig = field(default_factory=InferConfig)
    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def load_config(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    unnumbered: int = FORMAT,
) -> Config:
    """Read the configuration of `path` (TOML), overruled by `flags`.

    A key that is left out has the default of the file's format; a retired one is said and dropped.

    Args:
        path: TOML file, or None for the defaults.
        flags: Section → key → value; None values are flags not given. Top-level keys stand
            under the section "".
        unnumbered: Format of a file that states none: today's for what a user writes, `UNNUMBERED`
            for the record of a run.

    Raises:
        PathosegError: The file cannot be read, is of a newer format, a key is unknown, or a value
            does not fit.
    """
    table = _merged(path, flags, unnumbered)
    where = str(path) if path else "The options"
    adapter = TypeAdapter(Config)
    try:
        return adapter.validate_python(table)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        *within, key = (str(part) for part in first["loc"])
        why = _asked(first, within, key)
        if (flags or {}).get(".".join(within), {}).get(key) is not None:
            raise PathosegError(
                f"--{key.replace('_', '-')} {first['input']} does not fit ({why}).",
                "Add --help to the command for the values it takes.",
            ) from None
        raise PathosegError(
            f"{where}: {'.'.join((*within, key))} = {first['input']!r} does not fit ({why}).",
            "See docs/configuration.md for the values it takes.",
        ) from None


def _asked(wrong: Mapping[str, Any], within: Sequence[str], key: str) -> str:
    """Return what a key takes, of an error of pydantic, and its default."""
    bounds = wrong.get("ctx", {})
    said = {
        "greater_than_equal": "must be {ge} or more",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be {le} or less",
        "less_than": "must be less than {lt}",
        "literal_error": "must be {expected}",
        **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
        **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
        "finite_number": "must be a finite number",
        **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    }.get(wrong["type"])
    why = said.format(**bounds) if said else str(wrong["msg"]).removeprefix("Value error, ")
    table: Any = Config()
    for name in within:
        table = getattr(table, name, None)
    default = getattr(table, key, None)
    return f"{why}; the default is {default}" if default is not None else why


def given_options(
    path: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what the file and the flags state, without defaults, in the form of `flags`.

    Args:
        path: As for `load_config`.
        flags: As for `load_config`.

    Raises:
        PathosegError: The file cannot be read, or a key is unknown.
    """
    table = _merged(path, flags, unnumbered=None)
    table.pop("format", None)  # says what the keys left out are, not what is asked for
    sections = {key: value for key, value in table.items() if isinstance(value, dict)}
    return {"": {key: table[key] for key in table.keys() - sections.keys()}, **sections}


def write_config(config: Config, path: Path) -> None:
    """Writes `config` as TOML that `load_config` reads back equal; what is None is left out."""
    path.write_text(tomli_w.dumps(_without_none(asdict(config))), encoding="utf-8")


def changed_options(config: Config) -> list[tuple[str, Any, Any]]:
    """Return the options that are not at their defaults: name as `table.key`, value, default."""
    return list(_changes(asdict(config), asdict(Config()), ""))


def _changes(
    values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            yield from _changes(value, default, f"{prefix}{key}.")
        elif value != default:
            yield f"{prefix}{key}", value, default


def _merged(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None,
    unnumbered: int | None,
) -> dict[str, Any]:
    """Return the table of the file, with the flags that are given written over it.

    Args:
        path: As for `load_config`.
        flags: As for `load_config`.
        unnumbered: As for `load_config`; None adds no default of an earlier format.
    """
    table = _read(path) if path else {}
    where = str(path) if path else "The options"
    _drop_retired(table, where)
    if unnumbered is not None:
        _fill_former_defaults(table, where, unnumbered)
    _refuse_unknown(Config, table, where, "")
    for section, values in (flags or {}).items():
        target = table.setdefault(section, {}) if section else table
        target.update({key: value for key, value in values.items() if value is not None})
    return table


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise PathosegError(
            f"{path} cannot be read ({error.strerror}).", "Check the path given to --config."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PathosegError(f"{path} is not valid TOML: {error}.", "Mend that line.") from None


def _drop_retired(table: dict[str, Any], where: str) -> None:
    for name, fate in _RETIRED.items():
        section, _, key = name.rpartition(".")
        values = table.get(section) if section else table
        if isinstance(values, dict) and key in values:
            del values[key]
            _say_once(f"{where}: `{name}` is ignored: {fate}.")


@cache
def _say_once(text: str) -> None:
    say(text)


def _fill_former_defaults(table: dict[str, Any], where: str, unnumbered: int) -> None:
    """Give keys left out the defaults of the table's format, where today's are others."""
    number = table.setdefault("format", unnumbered)
    if type(number) is not int:
        return  # refused with the other values that do not fit
    if number > FORMAT:
        raise PathosegError(
            f"{where} is of format {number}, and this pathoseg knows formats up to {FORMAT}.",
            "Use the version of pathoseg that wrote it, or a newer one.",
        )
    for former in sorted(_FORMER_DEFAULTS):  # of several former defaults the oldest one holds
        if former < number:
            continue
        for section, values in _FORMER_DEFAULTS[former].items():
            target = table.setdefault(section, {}) if section else table
            if isinstance(target, dict):
                for key, value in values.items():
                    target.setdefault(key, value)


def _refuse_unknown(cls: type, table: Mapping[str, Any], where: str, prefix: str) -> None:
    known = get_type_hints(cls)
    names = [entry.name for entry in fields(cls)]
    for key, value in table.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"Did you mean `{near[0]}`?" if near else f"Known here: {', '.join(names)}."
            raise PathosegError(f"{where}: unknown key `{prefix}{key}`.", hint)
        if is_dataclass(known[key]) and isinstance(known[key], type):
            if not isinstance(value, dict):
                raise PathosegError(
                    f"{where}: `{prefix}{key}` is a table, not a value.",
                    f"Write it as [{prefix}{key}] with keys below.",
                )
            _refuse_unknown(known[key], value, where, f"{prefix}{key}.")


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
