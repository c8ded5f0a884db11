"""`fedunfold data`: make the files that environments read."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.cli.commands import CommandGroup

MODEL = "google/vit-base-patch16-224-in21k"  # the paper's, and extraction's default, which is slow to import

app = CommandGroup("Make data files.")


@app.callback()
def _group() -> None:
    """Make data files."""


@app.example("fedunfold data features Images --out dogs.npz --device cuda")
def features(
    images: Annotated[Path, typer.Argument(metavar="IMAGE_FOLDER")],
    out: Annotated[Path, typer.Option(metavar="FILE")],
    model: str = MODEL,
    dtype: Literal["float16", "float32"] = "float16",
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    again: bool = False,
    output: opt.Format = "text",
    device: opt.Device = "cpu",
) -> None:
    """Run a frozen vision transformer over images once, and store its CLS features.

    Stopped half-way, the same command resumes where it left off; a finished FILE is left as it is. Files that
    cannot be read as images are named on standard error and counted.

    Args:
        images: A folder with one subfolder of images a class.
        out: What to write: .npz or .safetensors.
        model: A vision transformer on the Hugging Face hub, or its local folder.
        dtype: How features are stored; they are computed in float32.
        batch_size: Images computed at once.
        again: Make FILE anew, and discard another run's partial results.
    """
    from fedunfold.core.params import device_of
    from fedunfold.data.vision.extraction import extract

    with console.progress() as bars:
        task = bars.add_task("images", total=None, note="")
        try:
            made = extract(
                images,
                out,
                model=model,
                dtype=dtype,
                batch_size=batch_size,
                device=device_of(device),
                again=again,
                on_progress=lambda done, total: bars.update(task, completed=done, total=total),
            )
        except KeyboardInterrupt:
            so_far = f"{bars.tasks[task].completed} of {bars.tasks[task].total or 0} files"
            raise Stopped(f"stopped after {so_far}; the same command resumes from there.") from None
    skipped, found = made.about.skipped, made.features
    for name, reason in skipped:
        sys.stderr.write(f"skipped {name}: {reason}\n")
    for name in made.empty_classes:
        sys.stderr.write(f"class {name} has no readable image; it keeps its number\n")
    if output == "json":
        console.print_json(
            {
                "file": str(made.file),
                "model": made.about.model,
                "dtype": made.about.dtype,
                "images": len(found.y),
                "features": found.x.shape[1],
                "classes": len(found.classes),
                "empty_classes": made.empty_classes,
                "skipped": [{"name": name, "reason": reason} for name, reason in skipped],
                "resumed": made.resumed,
            }
        )
        return
    console.say(
        f"{made.file}: {len(found.y)} images of {len(found.classes)} classes, "
        f"{found.x.shape[1]} features each, {len(skipped)} skipped"
    )
