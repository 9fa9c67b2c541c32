"""The order of the axes of a tensor in memory."""


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new tensor without gaps whose axes have the memory order of a tensor with the given
    strides, which saves the next layer a copy.

    The tensor is contiguous if the last axis would not be the innermost, or if the given tensor is broadcast.
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
