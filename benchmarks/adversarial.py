"""Commands of regard on damaged run directories, with hostile settings, and killed while they run. Each must give the
right result, or print one line and exit with status 2.

    python benchmarks/adversarial.py [--damaged 300] [--settings 60] [--kills 40] [--seed 1]

Small runs are trained first: a recurrent model on the built-in sentences, a Transformer on files with sub-words, one
with averaged checkpoints, and one with merge_dropout. Then
  damaged   one file of a copy of a run is truncated, emptied, replaced or removed, or some of its bits are flipped; a
            command on the copy must give the same output as on the undamaged run, or print one line and exit with
            status 2;
  settings  training with a hostile setting (invalid or extreme) must run one step, or print one line and exit with
            status 2;
  kills     a training that gets SIGKILL, SIGTERM or SIGINT at random moments, each time resumed, must end with the
            same model.safetensors, to the byte.
Every failure is listed with the seed that repeats it. The exit status is 1 if there was any failure.
"""

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of tokenizers fail in forked processes
os.environ.setdefault("OMP_NUM_THREADS", "1")

import regard.cli.page_commands
import regard.cli.run_commands
from regard.cli import app

SLOWEST = 600.0  # seconds after which a command counts as hanging
TEXTS = ("the lazy dog 7", "Tom chases Jerry", "wizards in bad weather", "the cat sleeps .")
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "boxed")
STEPS = ("steps=9", "validate_every=4", "checkpoint_every=3", "log_every=2", "warmup=3", "data.valid=6", "data.test=6")
WORLD = (*STEPS, "data.train=60", "longer=2", "lengths=[3, 8]", "model.size=8", "embedding=8")
FILES = (*STEPS, "model=transformer", "model.size=8", "heads=2", "vocabulary=300")
KINDS = {
    "recurrent": (WORLD, False),
    "transformer": (FILES, True),
    "checkpoints": ((*FILES, "average=checkpoints", "average_last=3"), True),
    "merge_dropout": ((*FILES, "shared=false", "merge_dropout=0.3", "cuts=3"), True),
}
HOSTILE = (
    *("data.seed=-5", "data.seed=1e400", "train.seed=-1", "train.seed=99999999999999999999", "train.seed=none"),
    *("train.seed=" + "9" * 5000, "steps=0", "steps=-3", "steps=1e30", "steps=NaN", "epochs=0", "accumulate=0"),
    *("accumulate=-1", "learning_rate=Infinity", "learning_rate=-1", "learning_rate=NaN", "learning_rate=1e300"),
    *("betas=[1, 2]", "betas=[0.9]", "betas=0.9", "epsilon=0", "clip=0", "clip=NaN", "weight_decay=-1", "watch=foo"),
    *("watch=", "watch_for=best", "patience=0", "keep_last=0", "average=median", "ema_decay=0.5", "average_last=3"),
    *("beam=0", "beam=100000", "beam=-1", "length_penalty=1e308", "length_penalty=-1", "precision=float8"),
    *("model.size=0", "model.size=1000000000", "model.size=65536", "model.size=7.5", "layers=0", "layers=100000"),
    *("decoder_layers=0", "embedding=99999999", "dropout=1", "dropout=-0.1", "dropout=NaN", "attention=magic"),
    *("model=transformer", "model=lstm", "heads=3", "order=luong", "cell=rnn", "reach=0", "reach=9999999999"),
    *("data.train=0", "data.train=999999999999", "data.valid=0", "data.valid=99999999999", "data.test=-1"),
    *("lengths=[1, 1]", "lengths=[9, 3]", "lengths=[3, 99999999]", "lengths=3", "lengths=[]", "lengths={}"),
    *("longer=-1", "longer=99999999999", "batch_tokens=0", "batch_tokens=1", "batch_tokens=99999999999999"),
    *("vocabulary=10", "vocabulary=300", "ratio=1", "longest=0", "merge_dropout=0.5", "cuts=1", "tokenize=ja"),
    *("data.files=[]", 'data.files=["/nowhere"]', "data.files=5", 'data.files="x\\u0000y"', "data.first_word=2"),
    *("smoothing=1", "smoothing=-0.5", "preset=huge", "task=cooking", "=", "a=b", "seed=1", "model.=3", "..=1"),
    *("model={}", "model.kind=[]", "data=null", "train.steps={'a': 1}", "warmup=-1", "warmup=1e13", "log_every=0"),
    *("validate_every=0", "checkpoint_every=0", "compile=maybe", "graphs=2", "end_mark=perhaps", "shared=1"),
    *("final_share=2", "schedule=step", "values=none", "keys=3", "input_feeding=true", "inner_dropout=0.1"),
)


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    code: int | None  # None if the command did not end
    out: str
    err: str

    @property
    def refused(self) -> bool:
        """Return whether the command failed as required: with one line and exit status 2."""
        lines = self.err.strip().splitlines()
        return self.code == 2 and "Traceback" not in self.err and any(line.startswith("regard: ") for line in lines)

    def __str__(self) -> str:
        return f"exit {self.code}: {' | '.join(self.err.strip().splitlines()[-3:])[-400:]}"


@dataclass
class Tally:
    """The counts and failures of one kind of trials: damaged files, hostile settings, or killed training runs."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a handled signal to the end of the process

    def add(self, outcome: str, what: str = "") -> None:
        self.counts[outcome] += 1
        if what:
            self.failures.append(f"{self.name}: {what}")

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
        slowest = f"; the slowest end after SIGINT or SIGTERM took {self.slowest:.2f} s" if self.slowest else ""
        return f"{self.name}: {sum(self.counts.values())} trials, {len(self.failures)} failures ({counted}){slowest}"


def begin(arguments: Sequence[str], log: Path) -> int:
    """Run the command in a forked child process, in which all modules are imported already; its output goes to log.out
    and log.err.
    """
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        for stream, suffix in ((1, "out"), (2, "err")):
            descriptor = os.open(f"{log}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, stream)
        sys.argv = ["regard", *arguments]
        app(prog_name="regard")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def end(child: int, log: Path) -> Done:
    """Wait until a command ends, and return its result; after SLOWEST seconds the command is killed."""
    until = time.monotonic() + SLOWEST
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = None
            break
        time.sleep(0.005)
    out, err = (Path(f"{log}.{suffix}").read_text(errors="replace") for suffix in ("out", "err"))
    return Done(code, out, err)


def command(arguments: Sequence[str], log: Path) -> Done:
    return end(begin(arguments, log), log)


@dataclass(frozen=True)
class Place:
    """The folder of the trials, with methods that write files into it and run commands on its training runs."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def training(self, kind: str, out: Path, *more: str) -> list[str]:
        settings, files = KINDS[kind]
        data = [part for name in ("text.en", "text.de") for part in ("--data", str(self.folder / name))]
        chosen = [part for setting in settings for part in ("--set", setting)]
        tiny = ["train", "translation", "--preset", "tiny"]
        return [*tiny, *(data if files else []), *chosen, "--out", str(out), *more]

    def write_files(self) -> None:
        dice = random.Random(5)
        lines = [" ".join(dice.choices(WORDS, k=dice.randint(3, 8))) + f" {number}" for number in range(60)]
        (self.folder / "text.en").write_text("\n".join(lines) + "\n")
        (self.folder / "text.de").write_text("\n".join(line[::-1] for line in lines) + "\n")

    def ask(self, what: str, kind: str, run: Path) -> tuple[Done, str]:
        """Run the command `what` on a run; return its result, and the text to compare: checksums of the model, the
        page, or the standard output."""
        page = self.folder / "page.html"
        page.unlink(missing_ok=True)
        if what == "resume":
            done = command(self.training(kind, run, "--resume"), self.log)
            return done, weights(run)
        arguments = {
            "predict": ["predict", str(run), *TEXTS, "--json"],
            "evaluate": ["evaluate", str(run), "--json"],
            "look": ["look", str(run), "--out", str(page)],
        }[what]
        done = command(arguments, self.log)
        return done, page.read_text() if what == "look" and page.exists() else done.out


def weights(run: Path) -> str:
    """Return the checksums of the files that a run needs for predictions."""
    names = ("model.safetensors", "tokenizer.json", "tokenizer.target.json")
    paths = (run / name for name in names)
    return " ".join(hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "-" for path in paths)


def _flipped(dice: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "truncated": lambda dice, data: data[: dice.randrange(len(data))] if data else data,
    "emptied": lambda dice, data: b"",
    "flipped": _flipped,
    "foreign": lambda dice, data: dice.choice(
        (b'{"model_type": "bert", "size": 768}', b"[]", b"null", b"3", b'{"task": "translation"}', b'{"files": 7}')
    ),
    "random": lambda dice, data: dice.randbytes(dice.randint(1, 300)),
    "doubled": lambda dice, data: data + data,
}


def damage(dice: random.Random, run: Path, others: Sequence[Path]) -> str:
    """Damage one file of a run, and return a description."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    important = [path for path in files if path.parent == run]
    path = dice.choice(important if dice.random() < 0.7 else files)
    name, how = path.relative_to(run), dice.choice([*DAMAGE, "swapped", "removed"])
    if how == "removed":
        path.unlink()
    elif how == "swapped":
        pool = [*files, *(other / name for other in others if (other / name).is_file())]
        chosen = dice.choice(pool)
        path.write_bytes(chosen.read_bytes())
        how = f"swapped with {chosen.name} of {chosen.parent.name}"
    else:
        path.write_bytes(DAMAGE[how](dice, path.read_bytes()))
    return f"{name} {how}"


def damaged(place: Place, count: int, seed: int, runs: dict[str, Path]) -> Tally:
    """Run a random command on each of `count` copies of runs; one file of each copy is damaged."""
    tally = Tally("damaged")
    right: dict[tuple[str, str], str] = {}
    for number in range(count):
        dice = random.Random(f"damaged {seed} {number}")
        kind, what = dice.choice([*runs]), dice.choice(("predict", "evaluate", "look", "resume"))
        if (kind, what) not in right:
            shutil.copytree(runs[kind], place.folder / "copy")  # one path for all copies: pages contain it
            done, right[kind, what] = place.ask(what, kind, place.folder / "copy")
            shutil.rmtree(place.folder / "copy")
            if done.code != 0:
                tally.add("undamaged failed", f"{what} of the undamaged {kind}: {done}")
        run = place.folder / "copy"
        shutil.copytree(runs[kind], run)
        how = damage(dice, run, [other for name, other in runs.items() if name != kind])
        done, answer = place.ask(what, kind, run)
        shutil.rmtree(run)
        trial = f"seed {seed} trial {number}: {what} of {kind}, {how}"
        if done.code == 0 and "Traceback" not in done.err:
            same = answer == right[kind, what]
            tally.add("answered rightly" if same else "another answer", "" if same else f"{trial}: another answer")
        else:
            tally.add("refused" if done.refused else "broken", "" if done.refused else f"{trial}: {done}")
    return tally


def settings(place: Place, count: int, seed: int) -> Tally:
    """Train `count` runs for one step, each with one hostile setting."""
    tally = Tally("settings")
    order = random.Random(f"settings {seed}").sample(HOSTILE, len(HOSTILE))
    for number in range(count):
        setting = order[number % len(order)]
        kind = "recurrent" if number < len(order) else "transformer"
        out = place.folder / "hostile"
        done = command(place.training(kind, out, "--set", "steps=1", "--set", setting), place.log)
        shutil.rmtree(out, ignore_errors=True)
        good = done.code == 0 or done.refused
        what = f"--set {setting[:60]} ({kind}): {done}"
        tally.add("trained" if done.code == 0 else "refused" if good else "broken", "" if good else what)
    return tally


def kills(place: Place, count: int, seed: int, runs: dict[str, Path], seconds: dict[str, float]) -> Tally:
    """Train runs that are killed at random moments and resumed until they finish."""
    tally = Tally("kills")
    for number in range(count):
        dice = random.Random(f"kills {seed} {number}")
        kind, out = [*runs][number % len(runs)], place.folder / "killed"
        shutil.rmtree(out, ignore_errors=True)
        signals = [dice.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)) for _ in range(dice.randint(1, 3))]
        for sent in signals:
            child = begin(place.training(kind, out, *_resumed(out)), place.log)
            time.sleep(dice.uniform(0.0, 1.1 * seconds[kind]))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, sent)
            start = time.monotonic()
            end(child, place.log)
            if sent != signal.SIGKILL:
                tally.slowest = max(tally.slowest, time.monotonic() - start)
        done = command(place.training(kind, out, *_resumed(out)), place.log)
        trial = f"seed {seed} trial {number}: {kind} after {', '.join(sent.name for sent in signals)}"
        if done.code != 0:
            tally.add("broken", f"{trial}: {done}")
        else:
            same = weights(out) == weights(runs[kind])
            tally.add("ended the same" if same else "ended otherwise", "" if same else f"{trial}: other weights")
    return tally


def _resumed(out: Path) -> list[str]:
    return ["--resume"] if (out / "config.json").is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("damaged", 300), ("settings", 60), ("kills", 40), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    chosen = parser.parse_args()
    assert regard.cli.run_commands.TASKS  # these modules are imported before anything is forked
    assert regard.cli.page_commands.look
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        place.write_files()
        runs, seconds = {}, {}
        for kind in KINDS:
            began = time.monotonic()
            done = command(place.training(kind, place.folder / kind), place.log)
            if done.code != 0:
                sys.exit(f"{kind} could not be trained: {done}")
            runs[kind], seconds[kind] = place.folder / kind, time.monotonic() - began
        tallies = []
        for part in (
            lambda: damaged(place, chosen.damaged, chosen.seed, runs),
            lambda: settings(place, chosen.settings, chosen.seed),
            lambda: kills(place, chosen.kills, chosen.seed, runs, seconds),
        ):
            tallies.append(part())
            print(tallies[-1], flush=True)
            for failure in tallies[-1].failures:
                print(f"  {failure}", flush=True)
    sys.exit(1 if any(tally.failures for tally in tallies) else 0)


if __name__ == "__main__":
    main()
