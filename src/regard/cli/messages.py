"""What a user can put right is one line on standard error and an exit status, never a traceback."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from regard.data.parallel import DataError
from regard.tasks.task import InputError, SettingError
from regard.train.run import RunError
from regard.train.stops import Interrupted, Stopped, memory_ran_out


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors of the user's input are reported in one line; an interruption has its own exit status."""
    try:
        yield
    except BrokenPipeError:  # whoever read has gone: typer ends it quietly
        raise
    except OSError as error:
        print(f"regard: {error.filename}: {error.strerror}" if error.filename else f"regard: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except (SettingError, InputError, DataError, RunError) as error:
        print(f"regard: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except Interrupted as stop:
        print(f"regard: {stop}", file=sys.stderr)
        raise typer.Exit(stop.code) from stop
    except Stopped as stop:
        print(f"regard: {stop}", file=sys.stderr)
        raise typer.Exit(1) from stop
    except (RuntimeError, MemoryError) as error:
        if not memory_ran_out(error):
            raise
        first = str(error).partition("\n")[0]
        print(f"regard: out of memory{f' ({first})' if first else ''}: choose smaller sizes", file=sys.stderr)
        raise typer.Exit(2) from error
