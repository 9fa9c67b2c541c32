"""The states of the global random generators of Python, NumPy and torch, saved and restored together."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of the generators of Python, NumPy, torch and one CUDA device."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def take(device: torch.device) -> "RandomState":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        numbers = np.random.get_state(legacy=True)
        return RandomState(random.getstate(), tuple(numbers), torch.get_rng_state(), cuda)

    def put(self, device: torch.device) -> None:
        """Restore the states of all generators; the CUDA generator does not change if its state was not saved."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the states of the random generators as named tensors, which a safetensors file can store."""
        version, numbers, gauss = self.python
        _, keys, place, has_gauss, cached = self.numpy
        named = {
            "python": torch.tensor([version, *numbers]),
            "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
            "numpy": torch.tensor([*keys.tolist(), place, has_gauss]),
            "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
            "cpu": self.cpu,
        }
        return named if self.cuda is None else {**named, "cuda": self.cuda}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> "RandomState":
        """Return the `RandomState` of the named tensors that `tensors()` returned."""
        version, *numbers = tensors["python"].tolist()
        has_python_gauss, gauss = tensors["python_gauss"].tolist()
        *keys, place, has_gauss = tensors["numpy"].tolist()
        legacy = ("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, tensors["numpy_gauss"].item())
        python = (version, tuple(numbers), gauss if has_python_gauss else None)
        return RandomState(python, legacy, tensors["cpu"], tensors.get("cuda"))


def seed_worker(seed: int, rank: int) -> None:
    """Seed all generators with a different seed on each worker; on the first worker it is `seed` itself."""
    seed = (seed + 1_000_003 * rank) % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
