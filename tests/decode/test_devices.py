"""CUDA graphs are captured on the device of their tensors, even if another device is the current one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from regard.decode.beam import beam
from regard.decode.graph_search import Captures
from regard.kernels import cuda_graphs
from regard.models.frame import EncoderDecoder
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Cuda:
    """Two fake CUDA devices, which record the current device, and which stream waits for which."""

    def __init__(self) -> None:
        self.current = 0
        self.waits: list[tuple[str, str]] = []
        self.recorded: list[int] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def stream_of(self, name: str) -> "Stream":
        return Stream(self, f"{name} {self.current}")


class Graph:
    """A fake CUDA graph, which records the device on which its capture begins."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, **_) -> None:
        self.cuda.recorded.append(self.cuda.current)

    def capture_end(self) -> None:
        pass


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.waits.append((self.name, other.name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.stream_of("usual"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made.stream_of("side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: made.device(torch.device("cuda", int(stream.name[-1]))))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(made))
    return made


def test_a_search_is_recorded_on_its_own_device(cuda):
    with cuda_graphs.aside(torch.device("cuda", 1)):
        assert cuda.current == 1
    assert cuda.current == 0
    assert cuda.waits == [("side 1", "usual 1"), ("usual 1", "side 1")]
    with cuda_graphs.aside(torch.device("cpu")):
        assert cuda.current == 0
    assert len(cuda.waits) == 2


def test_a_loop_is_recorded_on_its_own_device(cuda, as_installed):
    cuda_graphs._Graph(lambda x: (x + 1,), [torch.ones(3)], torch.device("cuda", 1))
    assert cuda.recorded == [1]
    assert cuda.current == 0


@pytest.mark.cuda
@TWO
def test_a_model_on_the_second_device():
    torch.manual_seed(5)
    options = {"heads": 2, "layers": 2}
    model = EncoderDecoder(TransformerEncoder(13, 8, **options), TransformerDecoder(11, 8, **options)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    source, found = torch.randint(3, 13, (5, 7)), []
    for device in ("cpu", "cuda:1"):
        with torch.no_grad():
            state = model.to(device).start(source.to(device), limit=14)
            captures, start = Captures(), torch.ones(5, dtype=torch.long, device=device)
            rows = beam(model.step, state, start=start, stop=2, limit=13, width=3, captures=captures)
        found.append([[one.tokens for one in row] for row in rows])
    assert torch.cuda.current_device() == 0
    assert captures.held[0].graph is not None
    assert found[0] == found[1]


@pytest.mark.cuda
@TWO
def test_loops_on_both_devices():
    def loop(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2 + 1,)

    try:
        for device in ("cuda:0", "cuda:1"):
            for number in range(4):
                [found] = cuda_graphs.run(loop, [torch.full((3,), float(number), device=device)])
                assert found.tolist() == [2.0 * number + 1] * 3
        assert len(cuda_graphs._graphs) == 2
    finally:
        cuda_graphs.clear()
