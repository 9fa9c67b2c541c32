"""Errors that a user can correct are reported as one line on standard error and an exit status, not as a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from regard.data.data_files import DataError
from regard.tasks.task import InputError, SettingError
from regard.train.distributed import WorkerFailed, WorkerLost
from regard.train.interruption import Diverged, Interrupted, Stopped, memory_ran_out
from regard.train.run_directory import RunError


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """In this context, errors that a user can correct are printed as one line and end the command.

    The exit status is 2 for wrong input, an operating system error or too little memory; 1 for a failed worker or a
    training run that stopped; 128 + the signal for an interruption. With several workers, an error that all
    workers have is reported by the first one only, any other error by the worker that has it.
    """
    rank = int(os.environ.get("RANK", "0"))
    name = f"regard: worker {rank}" if rank else "regard"
    try:
        yield
    # the program that reads the output of this command through a pipe has ended: typer exits without a message
    except BrokenPipeError:
        raise
    except WorkerFailed as error:
        raise typer.Exit(1) from error
    except WorkerLost as error:
        if not rank:
            print(f"{name}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except OSError as error:
        print(f"{name}: {error.filename}: {error.strerror}" if error.filename else f"{name}: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except (SettingError, InputError, DataError, RunError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except Stopped as stop:
        if not rank or not isinstance(stop, Interrupted | Diverged):
            print(f"{name}: {stop}", file=sys.stderr)
        raise typer.Exit(stop.code if isinstance(stop, Interrupted) else 1) from stop
    except (RuntimeError, MemoryError) as error:
        if not memory_ran_out(error):
            raise
        first = str(error).partition("\n")[0]
        print(f"{name}: out of memory{f' ({first})' if first else ''}: choose smaller sizes", file=sys.stderr)
        raise typer.Exit(2) from error
