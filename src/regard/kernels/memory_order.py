"""The order of the axes of a tensor in memory."""


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape whose axes have the same order in memory as those of a tensor
    with the given strides.

    If in the given strides the last axis is not the innermost, or an axis is broadcast, return contiguous strides.
    """
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    long = [axis for axis in order if shape[axis] > 1]  # an axis of size 1 may have any stride
    if any(strides[axis] == 0 for axis in long) or (long and shape[-1] > 1 and long[-1] != len(shape) - 1):
        order = list(range(len(shape)))
    found, step = [1] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return (*found[:-1], 1)
