"""Feature maps of a frozen network, computed once for many images and stored on disk."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.data.vision.image_store import ImageStore

Maps = NDArray[np.float16]
_BATCH = 64
_REPORT_EVERY = 1024  # number of images between two progress messages


def cached_maps(
    store: ImageStore,
    function: Callable[[Tensor], Tensor],
    cache: Path,
    *,
    name: str,
    device: torch.device,
    flip: bool = False,
    say: Callable[[str], Any] = print,
) -> Maps:
    """Return the feature maps of all images of a store, a memory-mapped float16 array (n, channels, rows, columns).

    `function` computes the maps of uint8 images (b, 3, height, width); `name` identifies it in the name of the file in
    the folder `cache`. With `flip`, the feature maps of the mirrored images follow those of the images. If the file for
    these images and this `name` exists, nothing is computed.
    """
    known = hashlib.blake2b(f"{name} {flip} {store.size}".encode() + store.checks.tobytes(), digest_size=8).hexdigest()
    path = Path(cache) / f"maps-{known}.npy"
    if not path.is_file():
        part = path.with_suffix(".part")
        _write(part, store, function, device, flip, say)
        os.replace(part, path)  # the file gets its final name only when it is complete
    return np.load(path, mmap_mode="r")


@torch.no_grad()
def _write(
    path: Path,
    store: ImageStore,
    function: Callable[[Tensor], Tensor],
    device: torch.device,
    flip: bool,
    say: Callable[[str], Any],
) -> None:
    count = len(store)
    whole: Any = None
    for first in range(0, count, _BATCH):
        places = range(first, min(first + _BATCH, count))
        pixels = torch.from_numpy(store.take(places)).to(device)
        sides = [pixels, pixels.flip(-1)] if flip else [pixels]
        for side, images in enumerate(sides):
            maps = function(images).half().cpu().numpy()
            if whole is None:
                shape = (len(sides) * count, *maps.shape[1:])
                whole = np.lib.format.open_memmap(path, "w+", np.float16, shape)
            whole[side * count + first : side * count + first + len(maps)] = maps
        if first % _REPORT_EVERY == 0:
            say(f"maps of pictures: {places.stop:,} of {count:,}")
    whole.flush()
