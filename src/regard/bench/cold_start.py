"""`regard bench cold`: the time of the first call of each mechanism in a new process. Two processes are measured: the
first starts with empty compilation caches, the second with the caches that the first has filled.

Each of the two processes runs `python -m regard.bench.cold_start NAME DEVICE`, which prints the seconds of the call
alone, without the import of torch and regard.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

CACHES = ("REGARD_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def cold(device: str | None) -> None:
    """Print the seconds of each mechanism's first call in a new process, with empty and with filled caches."""
    from regard.bench.command_output import chosen_device, header, machine

    device = chosen_device(device)
    print(header({"bench": "cold", "quick": False, **machine(device, ("triton",))}))
    print("\n| mechanism | first process, s | second process, s |\n|---|--:|--:|", flush=True)
    for name in mechanisms(device):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (_seconds(name, device, folder) for _ in range(2))
        print(f"| {name} | {first:.2f} | {second:.2f} |", flush=True)


def _seconds(name: str, device: str, folder: str) -> float:
    """Return the seconds of the first call in a new process that keeps its compilation caches in the given folder."""
    caches = {variable: os.path.join(folder, variable.lower()) for variable in CACHES}
    command = [sys.executable, "-W", "ignore", "-m", "regard.bench.cold_start", name, device]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def mechanisms(device: str) -> dict[str, Callable[[], object]]:
    """Return, by the name of each mechanism such as a mask, a function that makes one call with it. The inputs have 2
    sequences, 8 heads, 512 tokens and size 64."""
    import torch

    import regard

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 8, 512, 64, generator=source).to(device, dtype) for _ in range(3))
    weight, slopes = torch.full((64,), 0.125, device=device, dtype=dtype), torch.full((8,), 0.1, device=device)
    ids, lengths = torch.arange(512, device=device).expand(2, -1) // 100, torch.tensor([512, 300], device=device)

    def attend(**settings: Any) -> Callable[[], object]:
        return lambda: regard.attention(query, key, value, **settings)

    def train(**settings: Any) -> Callable[[], object]:
        for tensor in (query, key, value):
            tensor.requires_grad_()
        return lambda: regard.attention(query, key, value, **settings).output.sum().backward()

    return {
        "plain": attend(),
        "causal": attend(mask=regard.causal()),
        "causal, training": lambda: train(mask=regard.causal())(),
        "padding": attend(mask=regard.padding(lengths)),
        "documents": attend(mask=regard.segments(ids, ids) & regard.causal()),
        "window": attend(mask=regard.window(64, 0)),
        "ALiBi": attend(mask=regard.causal(), bias=regard.alibi(slopes)),
        "softcap": attend(score=regard.ScaledDot(softcap=30.0)),
        "cosine": attend(score=regard.Cosine(scale=10.0)),
        "additive": attend(score=regard.Additive(weight)),
        "additive, training": lambda: train(score=regard.Additive(weight))(),
        "sparsemax": attend(normalize=regard.Sparsemax()),
        "entropy of the weights": attend(weights=regard.entropy()),
        "linear": lambda: regard.linear_attention(query, key, value, features=regard.EluFeatures()),
        "linear, Performer, causal": lambda: regard.linear_attention(query, key, value, causal=True),
    }


def main(name: str, device: str) -> None:
    """Print the seconds from the start of one call until the device has finished it."""
    import torch

    call = mechanisms(device)[name]
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
