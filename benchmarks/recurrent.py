"""Training a recurrent encoder-decoder with additive attention: regard against the same model as a PyTorch loop.

python benchmarks/recurrent.py                                    # about a minute on two CPU cores
python benchmarks/recurrent.py --device cuda --precision float32 tf32 bf16 --repeats 20 --warm 5
python benchmarks/recurrent.py --batch 32 --length 50 --json      # one record a line

Bidirectional GRU, GRU decoder in Bahdanau's order, every size 512 by default. Both models have the same weights; their
losses are compared first, and the gradients of each with float64. Measurements are interleaved, forward, backward and
update, each with its usual optimizer (torch's default AdamW; regard's, which is fused), and the fastest run counts. The
error of the gradients is printed too.
"""

import argparse
import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models import EncoderDecoder, RecurrentDecoder, RecurrentEncoder
from regard.nn.attention import Attention
from regard.nn.cross_entropy import linear_cross_entropy
from regard.train.optimizer import make_optimizer
from regard.train.train_settings import TrainSettings

_SETTINGS = TrainSettings(learning_rate=1e-5)


class Plain(nn.Module):
    """The model as in tutorials: torch's encoder, a cell in a loop, logits of every step in the loop."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, size), nn.Embedding(vocabulary, size)
        self.encoder = nn.GRU(size, size, batch_first=True, bidirectional=True)
        self.first = nn.Linear(2 * size, size)
        self.query, self.key = nn.Linear(size, size, bias=False), nn.Linear(2 * size, size, bias=False)
        self.score = nn.Linear(size, 1, bias=False)
        self.cell = nn.GRUCell(3 * size, size)
        self.readout = nn.Linear(4 * size, size)
        self.output = nn.Linear(size, vocabulary)

    def forward(self, source: Tensor, prefix: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        keys = self.key(memory)
        state = torch.tanh(self.first(torch.cat((last[0], last[1]), -1)))
        logits = []
        for i in range(prefix.shape[1]):
            embedded = self.target(prefix[:, i])
            scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(-1)
            weights = F.softmax(scores, -1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            state = self.cell(torch.cat((embedded, context), -1), state)
            logits.append(self.output(torch.tanh(self.readout(torch.cat((state, context, embedded), -1)))))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), target.flatten())


class Ours(nn.Module):
    """The same model from parts of regard, with the output layer and the loss as one operation."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        decoder = RecurrentDecoder(
            vocabulary, size, memory_size=2 * size, attention=Attention(size, 2 * size, score="additive")
        )
        self.model = EncoderDecoder(RecurrentEncoder(vocabulary, size), decoder)

    def forward(self, source: Tensor, prefix: Tensor, target: Tensor) -> Tensor:
        states = self.model(source, prefix).states
        loss, count = linear_cross_entropy(states, self.model.output_weight, target, bias=self.model.output_bias)
        return loss / count


def pairs(plain: Plain, ours: Ours) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Return every parameter of the PyTorch model by name, with the corresponding one of regard."""
    encoder, decoder = ours.model.encoder, ours.model.decoder
    attention = decoder.attention
    modules = [
        ("source", encoder.embedding),
        ("target", decoder.embedding),
        ("encoder", encoder.network),
        ("first", decoder.bridge),
        ("query", attention.query),
        ("key", attention.key),
        ("cell", decoder.network),
        ("readout", decoder.readout),
        ("output", decoder.output),
    ]
    found = [
        (f"{name}.{part}", left, right)
        for name, module in modules
        for (part, left), right in zip(plain.get_submodule(name).named_parameters(), module.parameters(), strict=True)
    ]
    return [*found, ("score.weight", plain.score.weight, attention.score.weight)]


@contextlib.contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """A context of the precision: float32, float32 on the tensor cores (tf32), or autocast to bfloat16."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    with torch.autocast(device, torch.bfloat16, enabled=name == "bf16"):
        yield


def words(vocabulary: int, shape: tuple[int, ...], kind: str) -> Tensor:
    """Return random tokens: the r-th with a probability proportional to 1 / r, as in texts (Zipf's law), or uniform."""
    chances = torch.ones(vocabulary) if kind == "uniform" else 1 / torch.arange(1.0, vocabulary + 1)
    return torch.multinomial(chances, torch.Size(shape).numel(), replacement=True).reshape(shape)


def timed(call: Callable[[], None], device: str) -> float:
    """Return seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gradient_errors(plain: Plain, ours: Ours, batch: Tensor) -> dict[str, tuple[str, float]]:
    """Return the worst gradient of each model against float64, |g − exact| / |exact| over a tensor, and its name."""
    exact = copy.deepcopy(plain).double()
    exact.zero_grad(set_to_none=True)
    exact(*batch).backward()
    errors: dict[str, list[tuple[float, str]]] = {"plain": [], "regard": []}
    for name, left, right in pairs(plain, ours):
        truth = exact.get_parameter(name).grad
        assert truth is not None
        for model, found in (("plain", left), ("regard", right)):
            assert found.grad is not None
            error = float((found.grad.double().view_as(truth) - truth).norm() / truth.norm())
            errors[model].append((error, name))
    return {model: (max(found)[1], max(found)[0]) for model, found in errors.items()}


def compare(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Compare losses and gradients, then return the fastest of some training steps of each, in one precision."""
    torch.manual_seed(0)
    device, vocabulary, size = arguments.device, arguments.vocabulary, arguments.size
    plain, ours = Plain(vocabulary, size).to(device), Ours(vocabulary, size).to(device)
    with torch.no_grad():
        for _, left, right in pairs(plain, ours):
            right.copy_(left.reshape(right.shape))
    batch = words(vocabulary, (3, arguments.batch, arguments.length), arguments.tokens).to(device)

    def step(model: nn.Module) -> Tensor:
        model.zero_grad(set_to_none=True)
        with precision(name, device):
            loss = model(*batch)
        loss.backward()
        return loss.detach()

    losses = [float(step(model)) for model in (plain, ours)]
    errors = gradient_errors(plain, ours, batch)
    for _ in range(arguments.warm):
        step(plain)
        step(ours)
    updates = {"plain": torch.optim.AdamW(plain.parameters(), lr=1e-5), "regard": make_optimizer(ours, _SETTINGS)}
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "regard": []}
    for _ in range(arguments.repeats):
        for side, model in (("plain", plain), ("regard", ours)):
            gradients = timed(lambda model=model: step(model), device)
            times[side].append((gradients, timed(updates[side].step, device)))
    tokens = arguments.batch * arguments.length
    fastest = {model: min(map(sum, found)) for model, found in times.items()}
    gradients = {model: min(first for first, _ in found) for model, found in times.items()}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "precision": name,
        "tokens": arguments.tokens,
        "batch": arguments.batch,
        "length": arguments.length,
        "loss_plain": losses[0],
        "loss_regard": losses[1],
        "gradient_errors": errors,
        "plain_ms": 1e3 * fastest["plain"],
        "regard_ms": 1e3 * fastest["regard"],
        "plain_tokens_per_s": tokens / fastest["plain"],
        "regard_tokens_per_s": tokens / fastest["regard"],
        "ratio": fastest["plain"] / fastest["regard"],
        "plain_gradients_ms": 1e3 * gradients["plain"],
        "regard_gradients_ms": 1e3 * gradients["regard"],
        "gradients_ratio": gradients["plain"] / gradients["regard"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], nargs="+", default=["float32"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=30, help="tokens of a source, and of a target")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--tokens", choices=["zipf", "uniform"], default="zipf", help="how often each word comes")
    parser.add_argument("--warm", type=int, default=1, help="steps of each before the timed ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.precision:
        found = compare(arguments, name)
        print(json.dumps(found) if arguments.json else told(found), flush=True)


def told(found: dict[str, Any]) -> str:
    """Return a record as text."""
    lines = [
        f"{found['device']}, {found['precision']}, {found['tokens']} tokens, "
        f"batch {found['batch']} x {found['length']}",
        f"loss: plain {found['loss_plain']:.6f}, regard {found['loss_regard']:.6f}; worst gradients against float64: "
        + ", ".join(f"{model} {error:.1e} ({name})" for model, (name, error) in found["gradient_errors"].items()),
    ]
    for name in ("plain", "regard"):
        speed = found[name + "_tokens_per_s"]
        alone = f"(gradients alone {found[name + '_gradients_ms']:.1f} ms)"
        lines.append(f"{name:7} {found[name + '_ms']:9.1f} ms a step  {speed:12,.0f} tokens/s  {alone}")
    return "\n".join([*lines, f"ratio   {found['ratio']:9.2f}  (gradients alone {found['gradients_ratio']:.2f})\n"])


if __name__ == "__main__":
    main()
