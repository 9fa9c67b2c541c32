"""A model's weights in a safetensors file, without pickle; a shared tensor is stored once, and shared when loaded."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.train.atomic_files import as_os_error, force
from regard.train.sharded_tensors import part_of


def shared_names(model: nn.Module) -> dict[str, str]:
    """Return for each further name of a shared tensor (tied weights) the first name, under which it is saved.

    >>> model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    >>> model[1].weight = model[0].weight
    >>> shared_names(model)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict, with each shared tensor under its first name only."""
    aliases = shared_names(model)
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"the model's state has {name!r}, a {type(value).__name__}: only tensors can be saved")
    return {name: value.detach() for name, value in state.items() if name not in aliases}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, aliases: Mapping[str, str] | None = None) -> None:
    """Write tensors to a new file and sync it to the disk."""
    metadata = {"format": "pt", "shared": json.dumps(dict(aliases or {}))}
    try:
        save_file({name: _alone(tensor) for name, tensor in tensors.items()}, path, metadata=metadata)
    except SafetensorError as error:
        raise as_os_error(error, path) from error
    _in_order(path)
    force(path)


def _in_order(path: Path) -> None:
    """Sort the metadata in the header of a safetensors file, so that equal weights give equal files.

    The safetensors library writes the metadata in random order.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(ordered) <= size:
            file.seek(8)
            file.write(ordered.ljust(size))


def _alone(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU that fills its whole storage, because safetensors cannot save views."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, on the CPU, and for each further name of a shared tensor its first name."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shared = json.loads(metadata.get("shared", "{}"))
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(shared, dict):
        raise ValueError(f"{path} cannot be read: its shared weights are not a table of names")
    return tensors, shared


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's weights to a file atomically."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write_tensors(aside, model_tensors(model), aliases=shared_names(model))
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    force(target.parent)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load the weights of a file into a model of the same architecture, with the same shared tensors."""
    tensors, aliases = read_tensors(Path(path))
    put_weights(model, tensors, aliases)


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Copy tensors into a model; if names or shapes do not fit, raise an error and leave the model unchanged."""
    shared = shared_names(model)
    if shared != dict(aliases):
        raise ValueError(
            f"the file shares weights {dict(aliases)}, the model shares {shared}: build the model as it was"
        )
    state = model.state_dict()
    wanted = {name: value for name, value in state.items() if name not in shared}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(f"the file does not fit the model: it lacks {missing[:5]} and has {extra[:5]} besides")
    parts: dict[str, Tensor] = {}
    for name, value in wanted.items():
        stored = tensors[name]  # indexing `tensors` loads the tensor if `tensors` reads its files lazily
        if stored.shape != value.shape:
            expected, came = tuple(value.shape), tuple(stored.shape)
            raise ValueError(f"the file does not fit the model: {name} must have shape {expected}; got {came}")
        parts[name] = part_of(stored, value)
    model.load_state_dict({**parts, **{alias: parts[name] for alias, name in aliases.items()}})
