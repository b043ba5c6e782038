"""The typed blocks a run configuration is made of: one frozen dataclass per Hydra group, with units and rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from medckpt.errors import ConfigError

Triple = tuple[int, int, int]
TripleMm = tuple[float, float, float]


def _rules(*broken: str | None) -> None:
    problems = [problem for problem in broken if problem]
    if problems:
        raise ConfigError("\n".join(problems))


def _share(block: object, name: str) -> str | None:
    return _unless(0 <= getattr(block, name) <= 1, f"{name}: must lie in 0..1.")


def _unless(condition: bool, problem: str) -> str | None:
    return None if condition else problem


@dataclass(frozen=True, slots=True, kw_only=True)
class DicomConfig:
    """What to do with a DICOM series that is no even, rectangular stack; what was done is recorded per case."""

    tilt: Literal["refuse", "resample"] = "refuse"
    """Slices shifted in their plane (gantry tilt): `resample` them linearly to an orthogonal grid."""
    gaps: Literal["refuse", "interpolate"] = "refuse"
    """Missing slices: `interpolate` them linearly between their neighbours."""
    duplicates: Literal["refuse", "first", "last"] = "refuse"
    """Several images at one position: the one acquired `first` or `last`. Equal copies are dropped in any case."""
    spacing: Literal["refuse", "resample"] = "refuse"
    """Uneven distances between slices: `resample` linearly to even ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which cases, and how their voxels become the network's numbers."""

    path: str = "phantom"
    """A data set folder, or `phantom` for the built-in one."""
    spacing_mm: TripleMm | None = None
    """Voxel size to train at, in mm along (x, y, z) of RAS; null takes the median of the training cases."""
    intensity: Literal["window", "zscore"] = "zscore"
    """`window` maps `window_hu` to -1..1 (CT); `zscore` gives each case mean 0 and deviation 1 (MR)."""
    window_hu: tuple[float, float] = (-175.0, 250.0)
    """Lower and upper end of the CT window, in HU."""
    clip_percentiles: tuple[float, float] = (0.5, 99.5)
    """Where `zscore` cuts outliers off before it measures, in percent of a case's voxels."""
    shear: Literal["refuse", "resample"] = "refuse"
    """Files whose axes are not at right angles: refused, or resampled to an orthogonal grid (and named)."""
    label_grid: Literal["refuse", "resample"] = "refuse"
    """Labels on another grid than their image: refused, or resampled onto the image's grid (and named)."""
    validation: int | float | tuple[str, ...] = 0.2
    """Patients kept for validation: a share, a number, or their names."""
    drop_failed: bool = False
    """Whether a training leaves out the cases that cannot be used (named, and kept in split.json), or refuses."""
    dicom: DicomConfig = field(default_factory=DicomConfig)
    """How irregular DICOM series are read."""

    def __post_init__(self) -> None:
        _rules(
            _unless(self.spacing_mm is None or min(self.spacing_mm) > 0, "spacing_mm: every spacing must be above 0."),
            _unless(self.window_hu[0] < self.window_hu[1], "window_hu: the lower end must be below the upper end."),
            _unless(
                0 <= self.clip_percentiles[0] < self.clip_percentiles[1] <= 100,
                "clip_percentiles: must rise and lie in 0..100.",
            ),
        )


def _divisible(patch_size: Triple, divisor: int, network: str) -> list[str]:
    wrong = [side for side in patch_size if side < divisor or side % divisor]
    if not wrong:
        return []
    legal = [max(divisor, round(side / divisor) * divisor) for side in patch_size]
    rule = f"{network} needs every side to be a multiple of {divisor}"
    return [f"sampler.patch_size: {rule}; {list(patch_size)} is not. The nearest legal patch is {legal}."]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwinUnetrConfig:
    """Swin-UNETR, Hatamizadeh et al. 2022 (arXiv:2201.01266), as MONAI builds it."""

    name: Literal["swin_unetr"] = "swin_unetr"
    feature_size: int = 48
    """Channels after the patch embedding; a multiple of 12."""
    depths: tuple[int, int, int, int] = (2, 2, 2, 2)
    """Swin blocks per stage."""
    num_heads: tuple[int, int, int, int] = (3, 6, 12, 24)
    """Attention heads per stage."""
    window_size: int = 7
    """Side of an attention window, in tokens of 2 x 2 x 2 voxels (first stage)."""
    drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    dropout_path_rate: float = 0.0
    use_v2: bool = False
    """One residual convolution block in front of each stage."""

    DIVISOR: ClassVar[int] = 32  # patch embedding 2, then four halvings
    ANY_SIZE: ClassVar[bool] = True
    """Whether one network takes patches of any legal size."""

    def __post_init__(self) -> None:
        _rules(
            _unless(
                self.feature_size > 0 and self.feature_size % 12 == 0,
                f"feature_size: {self.feature_size} is not a multiple of 12 (its heads share the channels).",
            ),
            _unless(self.window_size >= 2, "window_size: must be at least 2."),
            _unless(min(self.depths) >= 1, "depths: every stage needs a block."),
            _unless(
                all(h > 0 and self.feature_size * 2**i % h == 0 for i, h in enumerate(self.num_heads)),
                f"num_heads: {list(self.num_heads)} do not divide the channels {self.feature_size} x 1, 2, 4, 8.",
            ),
            *[_share(self, name) for name in ("drop_rate", "attn_drop_rate", "dropout_path_rate")],
        )

    def patch_problems(self, patch_size: Triple) -> list[str]:
        """Returns what is wrong with a patch of (x, y, z) voxels for this network; empty when it is legal."""
        problems = _divisible(patch_size, self.DIVISOR, "swin_unetr")
        if not problems and max(patch_size) < 2 * self.DIVISOR:
            # InstanceNorm at the bottleneck cannot normalise a single voxel.
            legal = [64, *patch_size[1:]]
            problems.append(
                f"sampler.patch_size: swin_unetr needs at least one side of 64 or more; {list(patch_size)} leaves "
                f"one voxel at the bottleneck. The nearest legal patch is {legal}."
            )
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetrConfig:
    """UNETR, Hatamizadeh et al. 2022 (arXiv:2103.10504), as MONAI builds it: 12 layers on tokens of 16^3 voxels."""

    name: Literal["unetr"] = "unetr"
    feature_size: int = 16
    hidden_size: int = 768
    """Channels of a token; a multiple of `num_heads`."""
    mlp_dim: int = 3072
    num_heads: int = 12
    dropout_rate: float = 0.0

    DIVISOR: ClassVar[int] = 16  # the side of a token
    ANY_SIZE: ClassVar[bool] = False  # a position per token

    def __post_init__(self) -> None:
        _rules(
            _unless(self.feature_size > 0, "feature_size: must be above 0."),
            _unless(self.mlp_dim > 0, "mlp_dim: must be above 0."),
            _share(self, "dropout_rate"),
            _unless(
                self.hidden_size > 0 and self.num_heads > 0 and self.hidden_size % self.num_heads == 0,
                f"hidden_size: {self.hidden_size} does not divide by num_heads={self.num_heads}.",
            ),
        )

    def patch_problems(self, patch_size: Triple) -> list[str]:
        """Returns what is wrong with a patch of (x, y, z) voxels for this network; empty when it is legal."""
        problems = _divisible(patch_size, self.DIVISOR, "unetr")
        if not problems and max(patch_size) < 2 * self.DIVISOR:
            problems.append(
                f"sampler.patch_size: unetr needs at least one side of 32 or more; {list(patch_size)} is one token."
            )
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """How patches are cut and varied. Every random number follows from the seed and the patch's index."""

    patch_size: Triple = (96, 96, 96)
    """Sides of a patch in voxels along (x, y, z) of RAS, at the training spacing."""
    patches_per_step: int = 4
    """Patches that one forward pass sees, each from a case of its own."""
    foreground_share: float = 0.67
    """Share of patches that are placed on a voxel of a labelled class (each class equally often)."""
    mirror_axes: tuple[Literal[0, 1, 2], ...] = ()
    """Axes that may be mirrored: 0 = left-right, 1 = front-back, 2 = head-feet. Left and right are different
    organs in most data sets, so nothing is mirrored unless asked for."""
    affine_probability: float = 0.3
    rotation_degrees: float = 15.0
    """Largest rotation about each axis."""
    scale: float = 0.15
    """Largest relative change of size."""
    noise_probability: float = 0.15
    noise_std: float = 0.1
    """Largest standard deviation of Gaussian noise, in units of the normalised image."""
    intensity_probability: float = 0.3
    """Chance of each of: brightness shift, contrast, gamma."""
    intensity_range: float = 0.15
    """Largest relative change of contrast and gamma, and largest brightness shift."""
    workers: int | None = None
    """Processes that load patches; null: none on a CPU, up to 8 beside a GPU."""

    def __post_init__(self) -> None:
        shares = ("foreground_share", "affine_probability", "noise_probability", "intensity_probability")
        _rules(
            _unless(min(self.patch_size) > 0, "patch_size: every side must be above 0."),
            _unless(self.patches_per_step > 0, "patches_per_step: must be at least 1."),
            _unless(self.workers is None or self.workers >= 0, "workers: must be 0 or more."),
            *[_share(self, name) for name in shares],
            _unless(len(set(self.mirror_axes)) == len(self.mirror_axes), "mirror_axes: names an axis twice."),
            _unless(self.rotation_degrees >= 0, "rotation_degrees: must be 0 or more."),
            _unless(self.noise_std >= 0, "noise_std: must be 0 or more."),
            _unless(0 <= self.intensity_range < 1, "intensity_range: must lie in 0..1."),
            _unless(0 <= self.scale < 1, "scale: must lie in 0..1."),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Dice (Milletari et al. 2016) plus cross-entropy, each a mean over samples."""

    dice_weight: float = 1.0
    ce_weight: float = 1.0
    include_background: bool = False
    """Whether the background has a Dice term of its own; cross-entropy always covers it."""
    batch_dice: bool = False
    """Whether Dice is taken over all patches of a step at once instead of over each and averaged."""

    def __post_init__(self) -> None:
        _rules(
            _unless(min(self.dice_weight, self.ce_weight) >= 0, "dice_weight and ce_weight: must be 0 or more."),
            _unless(self.dice_weight + self.ce_weight > 0, "dice_weight and ce_weight: one must be above 0."),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine down to `final_lr_share` of the peak."""

    lr: float = 4e-4
    weight_decay: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_share: float = 0.03
    """Share of the run during which the learning rate rises."""
    final_lr_share: float = 0.0
    clip_norm: float | None = 12.0
    """Largest norm of all gradients together; null leaves them alone."""

    def __post_init__(self) -> None:
        _rules(
            _unless(self.lr > 0, "lr: must be above 0."),
            _unless(self.weight_decay >= 0, "weight_decay: must be 0 or more."),
            _unless(all(0 <= beta < 1 for beta in self.betas), "betas: both must lie in 0..1, below 1."),
            _share(self, "final_lr_share"),
            _unless(0 <= self.warmup_share < 1, "warmup_share: must lie in 0..1."),
            _unless(self.clip_norm is None or self.clip_norm > 0, "clip_norm: must be above 0, or null."),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How long, and how often to look."""

    max_steps: int = 25_000
    """Optimizer steps of the whole run."""
    max_minutes: float | None = None
    """Minutes of training (validation not counted) after which the run ends; the learning rate follows
    whichever of `max_steps` and `max_minutes` is nearer to its end. null: steps alone."""
    accumulate: int = 1
    """Forward passes whose gradients are summed into one optimizer step."""
    validate_every: int | None = 1_000
    """Optimizer steps between validations; null validates at the end only."""
    validate_cases: int | None = None
    """Cases looked at during training (the final evaluation always takes all); null: all."""
    save_every: int = 250
    """Optimizer steps between saves of weights/last.ckpt."""
    log_every: int = 10
    ema_decay: float | None = None
    """Decay per step of the averaged weights that are validated and kept; null: the weights themselves."""
    overlap: float = 0.5
    """Overlap of neighbouring windows at validation and prediction, 0..1."""
    mirror_predictions: bool = True
    """Whether validation and prediction average over mirror images along `sampler.mirror_axes`, if there are any."""
    devices: int = 1
    """GPUs (or CPU processes) that train side by side; each sees `patches_per_step`."""
    tensorboard: bool = True
    save_predictions: bool = True
    """Whether the final evaluation leaves its label maps in predictions/."""

    def __post_init__(self) -> None:
        counts = ("max_steps", "accumulate", "save_every", "log_every", "devices")
        _rules(
            *[_unless(getattr(self, name) >= 1, f"{name}: must be at least 1.") for name in counts],
            _unless(self.max_minutes is None or self.max_minutes > 0, "max_minutes: must be above 0, or null."),
            _unless(
                self.validate_every is None or self.validate_every > 0, "validate_every: must be above 0, or null."
            ),
            _unless(
                self.validate_cases is None or self.validate_cases > 0, "validate_cases: must be above 0, or null."
            ),
            _unless(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay: must lie in 0..1, or be null."),
            _unless(0 <= self.overlap < 1, "overlap: must lie in 0..1."),
        )
