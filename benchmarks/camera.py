"""How much better a steering angle is predicted from camera frames than from previous angles alone, on contiguous
blocks of a driving log.

    python benchmarks/camera.py driving_sim --out runs/camera                      # six splits of the log
    python benchmarks/camera.py driving_sim --out runs/camera --splits 1 2 --seeds 1 2 3

Three drivers without a camera are compared: steering straight ahead, repeating the last angle, and a linear function of
the last four angles for the change of the angle, fitted to the training blocks. Networks are trained on the frames
alone, on the frames and the angles before them, and on grey frames and the angles before them, so that the angles are
the only information. The output is one JSON line for each split, seed and driver.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from PIL import Image

from regard.data.driving.driving_log import DrivingLog, load_driving_log, log_file, split_blocks

ANGLES = 4  # number of previous angles that the linear driver uses
NETWORKS = {"frames": "false", "frames and angles": "true", "grey frames and angles": "true"}


def linear(log: DrivingLog, train: list[int], test: list[int]) -> float:
    """Return the mean squared error of the linear driver: last angle + Σ_k w_k · (angle k frames ago), with w fitted to
    the training frames and their mirror images."""
    steering = np.array([frame.controls[0] for frame in log.frames])
    past = np.zeros((len(steering), ANGLES))
    for place, frame in enumerate(log.frames):
        for back in range(1, ANGLES + 1):
            past[place, back - 1] = steering[place - back] if place - back >= frame.first else 0.0
    change = steering - past[:, 0]
    # There is no constant term: it would be 0, because a mirrored frame has the negative angle. The networks train on
    # mirrored frames too.
    weights = np.linalg.lstsq(past[train], change[train], rcond=None)[0]
    return float(np.square(change[test] - past[test] @ weights).mean())


def grey_copy(folder: Path, out: Path) -> Path:
    """Return the folder of a copy of the log in which every frame is the same grey picture."""
    log = load_driving_log(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "driving_log.csv").write_bytes(log_file(folder).read_bytes())
    grey = out / "grey.png"
    Image.new("RGB", (160, 80), (128, 128, 128)).save(grey)
    (out / "center").mkdir(exist_ok=True)
    for frame in log.frames:
        name = out / "center" / frame.image.name
        if not name.exists():
            os.link(grey, name)
    return out


def trained(folder: Path, out: Path, angles: str, split: int, seed: int, others: list[str]) -> dict[str, Any]:
    """Train a network with the preset `camera`, and return the metrics of its run."""
    settings = [f"model.angles={angles}", f"data.seed={split}", f"train.seed={seed}", *others]
    command = [sys.executable, "-m", "regard", "train", "driving", "--preset", "camera", "--data", str(folder)]
    command += [word for one in settings for word in ("--set", one)]
    path = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--out", str(out)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads((out / "result.json").read_text())["metrics"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], help="values of data.seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="values of train.seed")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--set", action="append", default=[], dest="others", help="a setting of all networks")
    options = parser.parse_args()
    log = load_driving_log(options.log)
    grey = grey_copy(options.log, options.out / "grey")
    for split in options.splits:
        parts = split_blocks(len(log.frames), block=200, gap=20, valid=500, test=500, seed=split)
        fitted = linear(log, list(parts.train), list(parts.test))
        print(
            json.dumps({"split": split, "driver": "linear in the angles", "steering_mse": round(fitted, 5)}), flush=True
        )
        for seed in options.seeds:
            for name in options.networks:
                folder = grey if name.startswith("grey") else options.log
                run = options.out / f"{name.replace(' ', '-')}-{split}-{seed}"
                figures = trained(folder, run, NETWORKS[name], split, seed, options.others)
                print(json.dumps({"split": split, "driver": name, "seed": seed, **figures}), flush=True)


if __name__ == "__main__":
    main()
