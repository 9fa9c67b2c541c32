"""The objects network learns to drive in highway-env from a planner, and is judged beside random and idle driving.

    python -m regard.tasks.driving.imitation intersection-v0 --out runs/intersection

The planner drives first; in every further round the network drives and the planner says what it would have done in
those scenes (DAgger, Ross et al. 2011). Then each driver has the same episodes, which nobody has learned from.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file

from regard.tasks.driving.highway import HORIZONS, Episode, Scene, drive, driver_of, make, network_of
from regard.tasks.driving.network import Driver

DRIVERS = ("random", "idle", "network", "planner")
_TEST_SEED = 1_000_000  # episodes from here on are for the test
_EXPLORE = 0.1
_TEMPERATURE = 0.05  # of the values of actions as a target


@dataclass(frozen=True)
class Errand:
    """Episodes of one environment for a process of its own: one for each seed."""

    environment: str
    driver: str
    seeds: tuple[int, ...]
    judged: bool = False
    network: dict[str, NDArray[Any]] | None = None


def run_errand(errand: Errand) -> list[Episode]:
    """The episodes of an errand."""
    torch.set_num_threads(1)
    env = make(errand.environment)
    network = None
    if errand.network is not None:
        network = network_of(int(env.action_space.n)).eval()
        network.load_state_dict({name: torch.from_numpy(value) for name, value in errand.network.items()})
    driver = driver_of(errand.driver, network)
    explore = _EXPLORE if errand.judged else 0.0
    return [drive(env, driver, seed, judged=errand.judged, explore=explore) for seed in errand.seeds]


def targets(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The planner's values (n, actions) as probabilities: actions that are equally good are equally right.

    >>> targets(np.array([[1.0, 1.0, -np.inf]])).tolist()
    [[0.5, 0.5, 0.0]]
    """
    shifted = np.exp((values - values.max(1, keepdims=True)) / _TEMPERATURE)
    return (shifted / shifted.sum(1, keepdims=True)).astype(np.float32)


def learn(
    scenes: NDArray[np.float32], values: NDArray[np.float64], *, steps: int, seed: int, batch: int = 256
) -> Driver:
    """A network that learned the planner's values by cross-entropy."""
    torch.manual_seed(seed)
    x, y = torch.from_numpy(scenes), torch.from_numpy(targets(values))
    network = network_of(y.shape[1]).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (batch,))
        logits = network(x[rows], x[rows][..., 0] > 0.5).logits
        assert logits is not None
        optimizer.zero_grad()
        F.cross_entropy(logits, y[rows]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network.eval()


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Crash rate and mean return, with the standard error of each.

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
    """Episodes over several processes, with a line of progress for each part of them."""

    def __init__(self, environment: str, pool: Any) -> None:
        self.environment, self.pool = environment, pool

    def drive(
        self, driver: str, seeds: Iterable[int], *, judged: bool = False, network: Driver | None = None
    ) -> list[Episode]:
        """One episode for each seed; `judged` by the planner."""
        given = list(seeds)
        state = None if network is None else {name: value.numpy() for name, value in network.state_dict().items()}
        errands = [Errand(self.environment, driver, (seed,), judged, state) for seed in given]
        began = time.monotonic()
        episodes: list[Episode] = []
        for found in self.pool.imap(run_errand, errands):
            episodes += found
            if len(episodes) % max(1, len(given) // 4) == 0:
                seconds = time.monotonic() - began
                crashes = sum(one.crashed for one in episodes)
                _say(f"{driver}: {len(episodes)} of {len(given)} episodes, {crashes} crashes, {seconds:.0f} s")
        return episodes


def imitate(fleet: Fleet, *, rounds: int, episodes: int, steps: int, seed: int) -> tuple[Driver, int]:
    """A network that learned in so many rounds of so many episodes, and the number of decisions it learned from."""
    scenes: list[Scene] = []
    values: list[NDArray[np.float64]] = []
    network = None
    for number in range(rounds):
        first = 10_000 * seed + number * episodes
        driver = "planner" if network is None else "network"
        for one in fleet.drive(driver, range(first, first + episodes), judged=True, network=network):
            scenes += one.scenes
            values += one.values
        network = learn(np.stack(scenes), np.stack(values), steps=steps, seed=seed)
        _say(f"round {number}: learned from {len(scenes):,} decisions")
    assert network is not None
    return network, len(scenes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Learns, drives, and writes `result.json` and `model.safetensors`."""
    parser = argparse.ArgumentParser(prog="python -m regard.tasks.driving.imitation", description=__doc__)
    parser.add_argument("environment", choices=list(HORIZONS))
    parser.add_argument("--out", type=Path, required=True, help="directory of the result")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of episodes to learn from")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of a round")
    parser.add_argument("--steps", type=int, default=2000, help="updates of the network after each round")
    parser.add_argument("--test", type=int, default=100, help="episodes that every driver is judged by")
    parser.add_argument("--drivers", nargs="+", choices=DRIVERS, default=DRIVERS, help="who is judged")
    parser.add_argument("--seed", type=int, default=1, help="of the network and of the episodes to learn from")
    parser.add_argument("--processes", type=int, default=2, help="episodes at once")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        fleet = Fleet(asked.environment, pool)
        network, decisions = imitate(
            fleet, rounds=asked.rounds, episodes=asked.episodes, steps=asked.steps, seed=asked.seed
        )
        seeds = range(_TEST_SEED, _TEST_SEED + asked.test)
        drivers: dict[str, dict[str, float]] = {}
        for name in asked.drivers:
            drivers[name] = summary(fleet.drive(name, seeds, network=network if name == "network" else None))
            _say(f"{name}: {drivers[name]}")
    result = {
        "environment": asked.environment,
        "drivers": drivers,
        "learned_from": {"episodes": asked.rounds * asked.episodes, "decisions": decisions},
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "seed": asked.seed,
        "seconds": round(time.monotonic() - began, 1),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), asked.out / "model.safetensors")
    (asked.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
