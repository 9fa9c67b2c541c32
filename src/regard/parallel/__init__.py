"""Long sequences over devices: attention whose queries and keys are sharded over a process group. Imports core alone.

- `sequences`: which positions a process holds; `shard`, `unshard`, `positions`;
- `block_masks`: masks of whole sequences, restricted to one block;
- `schedule`: which keys each process needs from the others;
- `agreement`: all processes make the same call, or all raise;
- `exchange`: keys, values and gradients sent between processes, and bytes counted;
- `ring`: the attention itself, forward and backward;
- `calls`: `attention` and `context`, the public functions. The names below are imported at first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

# Every public name and its module.
_HOME = {
    "attention": "regard.parallel.calls",
    "context": "regard.parallel.calls",
    "shard": "regard.parallel.sequences",
    "unshard": "regard.parallel.sequences",
    "positions": "regard.parallel.sequences",
    "reduce_gradients": "regard.parallel.sequences",
    "traffic": "regard.parallel.exchange",
    "Traffic": "regard.parallel.exchange",
}

__all__ = [*_HOME]

if TYPE_CHECKING:  # the public names are listed again for type checkers and editors
    from regard.parallel.calls import attention as attention
    from regard.parallel.calls import context as context
    from regard.parallel.exchange import Traffic as Traffic
    from regard.parallel.exchange import traffic as traffic
    from regard.parallel.sequences import positions as positions
    from regard.parallel.sequences import reduce_gradients as reduce_gradients
    from regard.parallel.sequences import shard as shard
    from regard.parallel.sequences import unshard as unshard
else:  # not defined for type checkers, which would accept every name because of __getattr__

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            message = f"module 'regard.parallel' has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
