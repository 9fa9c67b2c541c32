"""Attention over 2 and 4 processes equals that of one process, sends few bytes, and invalid calls raise everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import BATCH, CASES, LENGTH, Case, keys_received, keys_sent, unit

import regard

HERE = Path(__file__).parent
SIZES = (2, 4)
LAYERS = (
    "multihead", "multihead, rotary", "multihead, alibi", "multihead, additive", "multihead, grouped heads",
    "transformer with positions", "unshard", "NaN in padding",
)  # fmt: skip
# The largest allowed difference of results by dtype: absolute in float64, else relative to the largest number.
LARGEST = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 3e-2}

every_size = pytest.mark.parametrize("size", SIZES)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results that each process wrote, by the number of processes and the rank."""
    folder = tmp_path_factory.mktemp("ring")
    source = Path(regard.__file__).parent.parent
    path = os.pathsep.join([str(source), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "ring_processes.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {size: [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)] for size in SIZES}


@pytest.mark.process
@every_size
@every_case
def test_output(found: Found, case: Case, size: int) -> None:
    assert max(rank["cases"][case.name]["output"] for rank in found[size]) <= LARGEST[case.dtype]


@pytest.mark.process
@every_size
@every_case
def test_gradients(found: Found, case: Case, size: int) -> None:
    assert max(rank["cases"][case.name]["gradients"] for rank in found[size]) <= LARGEST[case.dtype]


COUNTED = [case for case in CASES if case.queries == LENGTH and keys_sent(case, 0, 2) is not None]


@pytest.mark.process
@every_size
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_bytes_sent(found: Found, case: Case, size: int) -> None:
    """A process sends the keys and values that others need in the forward pass; in the backward pass it sends them
    again, and the gradients of those it received."""
    for rank in range(size):
        sent, received = keys_sent(case, rank, size), keys_received(case, rank, size)
        counted = found[size][rank]["cases"][case.name]
        assert counted["sent forward"] == sent * unit(case)
        assert counted["sent backward"] == (sent + received) * unit(case)


@pytest.mark.process
@every_size
def test_ids_of_segments_are_sent_once(found: Found, size: int) -> None:
    for rank in found[size]:
        shared = rank["cases"][Case(mask="causal and segments").name]["sent masks"]
        assert shared == (size - 1) * BATCH * LENGTH // size * 8
        assert rank["cases"][Case(mask="window and segments").name]["sent masks"] == 2 * shared
        assert rank["cases"][Case(mask="causal").name]["sent masks"] == 0


@pytest.mark.process
@every_size
def test_all_processes_send_alike_in_zigzag(found: Found, size: int) -> None:
    """Zigzag chunks balance the pairs of a causal mask, so all processes send equally many bytes backward."""
    sent = {rank["cases"][Case(mask="causal").name]["sent backward"] for rank in found[size]}
    assert sent == {3 * (size - 1) * LENGTH // (2 * size) * unit(Case())}


@pytest.mark.process
@every_size
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(found: Found, layer: str, size: int) -> None:
    assert max(rank["layers"][layer]["output"] for rank in found[size]) <= 1e-12
    assert max(rank["layers"][layer]["gradients"] for rank in found[size]) <= 1e-12


@pytest.mark.process
def test_a_group_of_some_processes(found: Found) -> None:
    assert max(max(rank["subgroup"][part] for part in ("output", "gradients")) for rank in found[4]) <= 1e-12


SOFTMAX = "ValueError: attention over a process group needs softmax, got sparsemax"
ERRORS = {
    "length": "ValueError: sequence has length {length}, which does not divide into 2 chunks for each of {size}",
    "odd part": "ValueError: query has 7 positions on this process: a balanced part is two chunks",
    "odd part in order": "no error",
    "other length on rank 0": "ValueError: processes differ in the shape of query: rank 0 has (2, 2, 4, 4), rank 1",
    "other dtype on rank 0": "ValueError: processes differ in dtype: rank 0 has torch.float64, rank 1 has torch",
    "other mask on rank 0": "ValueError: processes differ in mask: rank 0 has band(None, 0), rank 1 has none",
    "other lengths on rank 0": "ValueError: processes differ in mask: rank 0 has padding([3, 4]), rank 1 has",
    "other score on rank 0": "ValueError: processes differ in score: rank 0 has Dot(), rank 1 has ScaledDot(",
    "other layout on rank 0": "ValueError: processes differ in balanced: rank 0 has True, rank 1 has False",
    "gradients on rank 0 alone": "ValueError: processes differ in whether gradients are computed: rank 0 has yes",
    "sparsemax": SOFTMAX,
    "dropout": "ValueError: attention over a process group has no dropout on the weights, got 0.1",
    "all weights": "ValueError: attention over a process group returns no weights but logsumexp(), got Full()",
    "a mask of pairs": "TypeError: a mask over a process group is causal, window, padding or segments, not a tensor",
    "a bias of pairs": "ValueError: a bias over a process group is alibi or relative, not a tensor",
    "a backend": "ValueError: attention over a process group has no backend but auto, got 'reference'",
    "lengths beyond the whole": "ValueError: lengths of padding() must be at most {whole}, the number of keys",
    "whole ids": "ValueError: query_ids of segments() must end in 8 queries, got shape (2, {whole})",
    "a cache": "NotImplementedError: a cache is not computed over a process group",
    "linear attention": "NotImplementedError: this call is not computed over a process group",
    "no group": "TypeError: group must be a torch.distributed process group or None, got str",
}


@pytest.mark.process
@every_size
@pytest.mark.parametrize("name", ERRORS)
def test_bad_calls_end_on_every_process(found: Found, name: str, size: int) -> None:
    wanted = ERRORS[name].format(size=size, length=8 * size + 2, whole=8 * size)
    for rank in found[size]:
        assert rank["errors"][name].startswith(wanted)
        assert "\n" not in rank["errors"][name]


@pytest.mark.process
@every_size
def test_a_call_that_one_process_refuses_ends_on_all(found: Found, size: int) -> None:
    first, *others = [rank["errors"]["sparsemax on rank 0"] for rank in found[size]]
    assert first == SOFTMAX
    for other in others:
        assert other == f"ValueError: rank 0 refused its call of attention: {SOFTMAX.removeprefix('ValueError: ')}"


@pytest.mark.process
@every_size
def test_the_group_serves_after_errors(found: Found, size: int) -> None:
    assert max(max(rank["after errors"][part] for part in ("output", "gradients")) for rank in found[size]) <= 1e-12


def test_without_a_process_group_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        regard.parallel.shard(torch.zeros(2, 8, 3))
