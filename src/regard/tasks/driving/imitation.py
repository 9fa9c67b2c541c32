"""The driving network learns to drive in highway-env from a planner, and is compared with random and idle driving.

    python -m regard.tasks.driving.imitation intersection-v0 --out runs/intersection

The planner drives first; in every further round the network drives and the planner labels those scenes with its own
actions (DAgger, Ross et al. 2011). Then all drivers are evaluated on the same held-out episodes. The training data is
stored in `episodes.npz`: `--begin-with` uses such a file instead of the planner's round.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file

from regard.tasks.driving.highway import FAST, PLANS, Episode, decided, drive, driver_of, make, network_of
from regard.tasks.driving.highway_view import watched
from regard.tasks.driving.network import Driver
from regard.train.memory_check import count_parameters

DRIVERS = ("network", "random", "idle", "planner")
_TEST_SEED = 1_000_000  # test episodes have seeds from this number on
_EXPLORE = 0.1
_TEMPERATURE = 0.05  # softmax temperature that converts action values to targets
_MOST_LOST = 5.0  # upper bound of the regret: the value of the best action minus the value of the chosen one
_LOST_WEIGHT = 4.0  # weight of the expected regret in the loss, relative to the cross-entropy


@dataclass(frozen=True)
class Errand:
    """The arguments of one worker process: it runs episodes of one environment, one for each seed."""

    environment: str
    driver: str
    seeds: tuple[int, ...]
    judged: bool = False
    network: dict[str, NDArray[Any]] | None = None
    frequency: int | None = None


def run_errand(errand: Errand) -> list[Episode]:
    """Run the episodes that an `Errand` describes, in a worker process."""
    torch.set_num_threads(1)
    env = make(errand.environment, frequency=errand.frequency)
    network = None
    if errand.network is not None:
        network = network_of(int(env.action_space.n)).eval()
        network.load_state_dict({name: torch.from_numpy(value) for name, value in errand.network.items()})
    driver = driver_of(errand.driver, network)
    explore = _EXPLORE if errand.judged else 0.0
    return [drive(env, driver, seed, judged=errand.judged, explore=explore) for seed in errand.seeds]


def targets(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the softmax of the planner's values (n, actions) as target probabilities of the actions.

    >>> targets(np.array([[1.0, 1.0, -np.inf]])).tolist()
    [[0.5, 0.5, 0.0]]
    """
    shifted = np.exp((values - values.max(1, keepdims=True)) / _TEMPERATURE)
    return (shifted / shifted.sum(1, keepdims=True)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Decisions:
    """Training data: scenes (n, vehicles, features) and the planner's values of their actions (n, actions)."""

    scenes: NDArray[np.float32]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.scenes)

    def __add__(self, other: "Decisions") -> "Decisions":
        return Decisions(np.concatenate([self.scenes, other.scenes]), np.concatenate([self.values, other.values]))

    @classmethod
    def of(cls, episodes: Iterable[Episode]) -> "Decisions":
        """Return the training data of episodes in which the planner computed the values of the actions."""
        episodes = list(episodes)
        return cls(
            np.stack([scene for one in episodes for scene in one.scenes]),
            np.stack([values for one in episodes for values in one.values]),
        )

    def save(self, path: Path) -> None:
        np.savez_compressed(path, scenes=self.scenes, values=self.values)

    @classmethod
    def load(cls, path: Path) -> "Decisions":
        with np.load(path) as arrays:
            return cls(arrays["scenes"], arrays["values"])


def learn(decisions: Decisions, *, steps: int, seed: int, batch: int = 256) -> Driver:
    """Train a network on the planner's values: cross-entropy plus the expected regret of the network's actions."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = decisions.values
    lost = np.minimum(values.max(1, keepdims=True) - values, _MOST_LOST).astype(np.float32)
    scenes, y, regret = (torch.from_numpy(one).to(device) for one in (decisions.scenes, targets(values), lost))
    network = network_of(y.shape[1]).train().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(scenes), (batch,), device=device)
        logits = decided(network, scenes[rows]).logits
        assert logits is not None
        optimizer.zero_grad()
        chosen = (logits.softmax(-1) * regret[rows]).sum(-1).mean()
        (F.cross_entropy(logits, y[rows]) + _LOST_WEIGHT * chosen).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network.cpu().eval()


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the crash rate and the mean total reward with standard errors, and the mean number of decisions.

    >>> summary([Episode(True, 1.0, 3), Episode(False, 3.0, 5)])
    {'crashes': 0.5, 'crashes_error': 0.3536, 'return': 2.0, 'return_error': 0.7071, 'decisions': 4.0, 'episodes': 2}
    """
    count = len(episodes)
    crashed = np.array([one.crashed for one in episodes], float)
    reward = np.array([one.reward for one in episodes])
    rate = crashed.mean()
    figures = {
        "crashes": rate,
        "crashes_error": (rate * (1 - rate) / count) ** 0.5,
        "return": reward.mean(),
        "return_error": reward.std() / count**0.5,
        "decisions": np.mean([one.decisions for one in episodes]),
    }
    return {name: round(float(value), 4) for name, value in figures.items()} | {"episodes": count}


class Fleet:
    """Runs episodes in several processes, with a progress message after each quarter of them."""

    def __init__(self, environment: str, pool: Any) -> None:
        self.environment, self.pool = environment, pool

    def drive(
        self, driver: str, seeds: range, *, judged: bool = False, network: Driver | None = None, **others: Any
    ) -> Iterator[Episode]:
        """Run one episode for each seed, in order; if `judged`, the planner computes the values of all actions."""
        state = None if network is None else {name: value.numpy() for name, value in network.state_dict().items()}
        errands = [Errand(self.environment, driver, (seed,), judged, state, **others) for seed in seeds]
        return self._watched(driver, self.pool.imap(run_errand, errands), len(errands))

    def _watched(self, driver: str, results: Iterable[list[Episode]], count: int) -> Iterator[Episode]:
        began, crashes = time.monotonic(), 0
        for number, [episode] in enumerate(results, 1):
            crashes += episode.crashed
            if number % max(1, count // 4) == 0:
                _say(f"{driver}: {number} of {count} episodes, {crashes} crashes, {time.monotonic() - began:.0f} s")
            yield episode


def imitate(
    fleet: Fleet,
    path: Path,
    known: Decisions | None,
    *,
    rounds: int,
    episodes: int,
    steps: int,
    seed: int,
    frequency: int,
) -> tuple[Driver, Decisions]:
    """Train a network in `rounds` rounds of `episodes` episodes; return it with its training data.

    The planner drives in the first round, unless the training data of that round is given as `known`. The training data
    is written to the file `path` after each round.
    """
    network = None
    for number in range(rounds):
        if number or known is None:
            first = 10_000 * seed + number * episodes
            driver = "planner" if network is None else "network"
            driven = fleet.drive(
                driver, range(first, first + episodes), judged=True, network=network, frequency=frequency
            )
            decisions = Decisions.of(driven)
            known = decisions if known is None else known + decisions
            known.save(path)
        network = learn(known, steps=steps, seed=seed)
        _say(f"round {number}: learned from {len(known):,} decisions")
    assert network is not None
    assert known is not None
    return network, known


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and evaluate a network; write `episodes.npz`, `model.safetensors` and `result.json`, return the result."""
    parser = argparse.ArgumentParser(prog="python -m regard.tasks.driving.imitation", description=__doc__)
    parser.add_argument("environment", choices=list(PLANS))
    parser.add_argument("--out", type=Path, required=True, help="directory of the result")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of episodes to learn from")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of a round")
    parser.add_argument("--steps", type=int, default=2000, help="updates of the network after each round")
    parser.add_argument("--test", type=int, default=100, help="episodes that every driver is judged by")
    parser.add_argument("--drivers", nargs="+", choices=DRIVERS, default=DRIVERS, help="who is judged")
    parser.add_argument("--seed", type=int, default=1, help="of the network and of the episodes to learn from")
    parser.add_argument("--frequency", type=int, default=FAST, help="simulation steps a second while learning")
    parser.add_argument("--begin-with", type=Path, help="episodes.npz in place of the planner's round")
    parser.add_argument("--look", type=Path, metavar="PAGE", help="write a page of the network's first test episode")
    parser.add_argument("--processes", type=int, default=2, help="episodes at once")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    known = None if args.begin_with is None else Decisions.load(args.begin_with)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        fleet = Fleet(args.environment, pool)
        chosen = {name: getattr(args, name) for name in ("rounds", "episodes", "steps", "seed", "frequency")}
        network, decisions = imitate(fleet, args.out / "episodes.npz", known, **chosen)
        save_file(network.state_dict(), args.out / "model.safetensors")
        result: dict[str, Any] = {
            "environment": args.environment,
            "drivers": {},
            "learned_from": chosen | {"decisions": len(decisions), "begin_with": args.begin_with is not None},
            "parameters": count_parameters(network),
        }
        if args.look is not None:
            watched(make(args.environment), network, _TEST_SEED).html(args.look)
        seeds = range(_TEST_SEED, _TEST_SEED + args.test)
        tested = {
            name: fleet.drive(name, seeds, network=network if name == "network" else None) for name in args.drivers
        }
        for name, episodes in tested.items():
            result["drivers"][name] = summary(list(episodes))
            result["seconds"] = round(time.monotonic() - began, 1)
            _say(f"{name}: {result['drivers'][name]}")
            (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
