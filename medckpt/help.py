"""What `--help` says."""

TOP = """\
medckpt trains 3D segmentation networks on CT and MR, from DICOM or NIfTI to Dice and back.

  medckpt train recipe=swin_ct                        train on the built-in phantom CT (no data needed)
  medckpt train recipe=swin_mr data=/data/hippocampus train on your own data
  medckpt check data=/data/hippocampus                look at every case before a training does
  medckpt plan recipe=swin_ct memory=a100_40gb        what a step takes on that card, and what fits; no GPU, no data
  medckpt predict run=RUN input=SCAN output=FOLDER    segment a NIfTI file, a DICOM series or a folder of them
  medckpt evaluate run=RUN data=/data/other           score a trained run
  medckpt recipes                                     list, show and copy the recipes
  medckpt profile                                     measure this machine, for better forecasts

Every setting is a word `key=value`: trainer.max_steps=500 sampler.patch_size=[96,96,96] precision=bf16-mixed.
`medckpt VERB --help` says more about each verb; --version prints the version.
"""

TRAIN = """\
medckpt train recipe=NAME [key=value ...]     train, evaluate, report
medckpt train resume=RUN [key=value ...]      go on with a run that was interrupted

Data      data=PATH         an nnU-Net or MSD folder (dataset.json), PATIENT/ folders with a DICOM series and a
                            NIfTI label, or images/ + labels/; without it the recipe's own (swin_ct: a phantom)
          data.spacing_mm=[1,1,2]   data.validation=0.2 | 5 | [name,name]   data.drop_failed=true (default: refuse)
          data.dicom.tilt=resample  data.dicom.gaps=interpolate  (irregular DICOM series; refused by default)
Memory    budget=8GiB|auto|min      plan the fastest exact step within these bytes (auto: what the device has)
          activation_ckpt=none|block|all   precision=auto|32|bf16-mixed|16-mixed   memory=auto|cpu|NAME|FILE.yaml
Size      sampler.patch_size=[96,96,96]    sampler.patches_per_step=4   trainer.accumulate=2
Length    trainer.max_steps=25000          trainer.max_minutes=10
Network   model=swin_unetr|unetr           model.feature_size=48
Output    output=FOLDER     the run folder is made in it (default: runs)

Hydra's own flags work too: --cfg job prints the whole configuration, -m sweeps (seed=0,1,2), --info.
--json prints metrics.json at the end and nothing else on standard output.
"""

CHECK = """\
medckpt check data=PATH [report=FOLDER] [data.KEY=VALUE ...]               pass, warn or fail for every case
medckpt check data=PATH fix=geometry|labels|orthonormal output=FOLDER      write a corrected copy

Reads every case and says what is wrong and what to do: geometry (image against label, channels, spacing), NaN and
constant images, label values that dataset.json does not list, intensities stored as labels, empty labels, one scan or
patient under two names, organs on the wrong side (a suspicion), disk and memory that preparing takes.

data    a data set as `medckpt train` takes it, or one scan: a file, or a folder of DICOM slices
report  folder for report.html and check.json (default: checks/NAME-DIGEST)
fix     one or more, by commas; what is not certain is refused by name, and the data themselves are never touched
        geometry     a label less than a voxel off its image gets the image's geometry, any other is resampled onto it
        labels       label values by a table: fix=labels remap={4:3}
        orthonormal  NIfTI axes that are slightly sheared become rectangular; voxels stay as they are
output  a new folder for the whole corrected copy
data.dicom.tilt=resample, gaps=interpolate, duplicates=first|last, spacing=resample; data.shear=resample;
data.label_grid=resample: check with what a training would be told to do about such files (docs/dicom.md).
--json prints the facts of the report and nothing else on standard output.
Exit code: 0 no case fails (warnings are allowed), 1 a case fails, 2 for what is wrong with the words or the folder.
"""

PREDICT = """\
medckpt predict run=RUN input=PATH output=PATH [weights=best|last|FILE] [format=nifti|seg|both] [data.KEY=VALUE]

input   a NIfTI, NRRD or MHA file, a DICOM series folder, or a folder of either; several channels of one scan are
        files CASE_0000.nii.gz, CASE_0001.nii.gz in a folder
output  a folder, or for one scan a file name that ends in .nii.gz or .dcm
format  seg writes a DICOM Segmentation on the source series of DICOM scans (seg_type=binary|labelmap); default: what
        the name ends in, NIfTI in a folder
The label maps lie on the scans' own grids: same shape, same affine. --json prints the files written.
A tilted, gappy or uneven DICOM series is refused unless the run, or a word here, says what to do with it:
data.dicom.tilt=resample, gaps=interpolate, duplicates=first|last, spacing=resample; data.shear=resample for sheared
NIfTI files (docs/dicom.md).
"""

EVALUATE = """\
medckpt evaluate run=RUN [data=PATH] [output=FOLDER] [weights=best|last|FILE] [data.KEY=VALUE ...]

Scores the run on its own validation cases, or on every labelled case of another data set. Dice per class, mean and
95 % surface distance in mm, on the scans' own grids. Writes evaluation.json and label maps; --json prints it.
data.dicom.KEY=VALUE, data.shear= and data.label_grid= as in a training: what to do about irregular files.
"""

RECIPES = """\
medckpt recipes                     list the recipes
medckpt recipes show NAME           print one, as the file is
medckpt recipes copy NAME FILE      copy one to change it; then: medckpt train recipe=./FILE
"""

PLAN = """\
medckpt plan recipe=NAME [memory=PROFILE] [key=value ...]

Forecasts one training step without a GPU and without data: how much memory it takes part by part, where the peak is,
and which patch sizes and patches per step fit. Every setting of `medckpt train` counts.

memory    a card (a100_40gb, a100_80gb, h100_80gb, h200_141gb, l40s_48gb, a10_24gb, rtx3090_24gb, rtx4090_24gb,
          v100_16gb, v100_32gb, t4_16gb), cpu, auto (this machine), or the file that `medckpt profile` wrote
data      read for its channels and classes only; without it those of the recipe's own data (swin_ct: the phantom's),
          else channels=1 classes=14, or what you say (channels= and classes= must agree with data=)
budget    8GiB, auto (what the card has), min, or a card's name: instead of the table, the fastest exact plan within it,
          what other budgets would give (frontier.png), and memory_plan.json; offload=true allows host memory too
sides     cubes in the table: sides=[64,96,128,160,192]; sides=[] the recipe's own patch alone
output    folder for the plan's own folder, RECIPE-DEVICE-DIGEST with memory_timeline.png and plan.json (default: plans)
--json prints plan.json and nothing else on standard output.
Exit code: 0 it fits or may fit (see "fits" in the JSON), 3 it does not, 2 for what is wrong with the words or if
standard output takes nothing more. Of a word that is given twice the last counts, which is said.
"""

PROFILE = """\
medckpt profile [output=FILE.yaml]

Measures this machine's GPU, or its CPU where there is none (10 s to 1 min; leave it alone meanwhile): memory bandwidth,
matrix and convolution rates, the link to the host, scratch memory of 3D convolutions, allocator slack. The file goes
into any command as memory=./FILE.yaml. --json prints the figures.
"""

HELP = {
    "train": TRAIN,
    "plan": PLAN,
    "check": CHECK,
    "predict": PREDICT,
    "evaluate": EVALUATE,
    "recipes": RECIPES,
    "profile": PROFILE,
}
