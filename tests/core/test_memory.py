"""Peak memory of calls, above the memory before the call; each call is measured in a process of its own."""

import sys
import textwrap

import pytest

import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

MEASURE = """
import torch, regard

def memory(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) / 1024

def extra(call):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what is resident
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before
"""


def extra_peak(body: str) -> float:
    """Run code that defines a function `call`, and return the peak memory of `call()` above that before it, in MiB."""
    script = MEASURE + textwrap.dedent(body) + "\nprint(extra(call))"
    done = forked.run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.mark.process
def test_the_measure_sees_memory() -> None:
    """`extra_peak` measures an allocation of 256 MiB: if it always returned 0, every other test would pass."""
    assert extra_peak("def call(): torch.ones(64 * 2**20)") > 250


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("request_name", ["top(8)", "received()", "entropy()"])
def test_weights_of_8192_tokens_take_under_200_mib(request_name: str) -> None:
    """A matrix of all weights would take 512 MiB."""
    peak = extra_peak(f"""
        def inputs(length):
            return [torch.randn(1, 2, length, 64) for _ in range(3)]

        def attend(tensors):
            return regard.attention(*tensors, weights=regard.{request_name})

        attend(inputs(16))  # libraries load on first use
        large = inputs(8192)
        def call(): attend(large)
    """)
    assert peak < 200


@pytest.mark.process
@pytest.mark.slow
def test_training_step_with_an_mlp_score_over_4096_tokens_takes_under_1_gib() -> None:
    """The hidden layer of all pairs would be 1 GiB before its tanh and 1 GiB after, stored for the backward pass."""
    peak = extra_peak("""
        from torch import nn

        class Judge(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right, self.readout = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 1)

            def forward(self, query, key):
                hidden = self.left(query).unsqueeze(-2) + self.right(key).unsqueeze(-3)
                return self.readout(hidden.tanh()).squeeze(-1)

        judge = Judge()
        optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)

        def step(length):
            query, key, value = (torch.randn(1, 1, length, 32, requires_grad=True) for _ in range(3))
            output = regard.attention(query, key, value, score=judge, backend="blocked").output
            output.square().mean().backward()
            optimizer.step()

        step(16)
        def call():
            step(4096)
            assert judge.left.weight.grad.abs().sum() > 0
    """)
    assert peak < 1024
