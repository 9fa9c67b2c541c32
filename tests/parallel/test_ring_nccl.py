"""Attention over an NCCL group of one process, on a GPU: output and gradients are those of plain torch operations."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ring_cases import CASES, Case
from ring_processes import run_case

import regard

# The largest allowed difference of results by dtype: absolute in float64, else relative to the largest number.
LARGEST = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    where = f"file://{tmp_path_factory.mktemp('nccl')}/meeting"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_process_by_nccl(case: Case) -> None:
    found = run_case(case, 0, 1, device="cuda")
    assert max(found["output"], found["gradients"]) <= LARGEST[case.dtype]
    assert found["sent forward"] == found["sent backward"] == 0


def test_parts_of_one_process_are_whole_and_gradients_are_summed() -> None:
    whole = torch.randn(2, 8, 3, device="cuda", requires_grad=True)
    again = regard.parallel.unshard(regard.parallel.shard(whole))
    again.square().sum().backward()
    torch.testing.assert_close(again, whole)
    before = whole.grad.clone()
    regard.parallel.reduce_gradients([whole])
    torch.testing.assert_close(whole.grad, before)
