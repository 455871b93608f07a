"""The compiled part of `replay.trace.tree`."""

import numba


@numba.njit(cache=True)
def fill(run, depth, size, start, parent, base, out):  # type: ignore[no-untyped-def]
    end = depth // size
    while run >= 0 and end > 0:
        first = start[run] // size
        number = base[run] - first
        for index in range(first, end):
            out[index] = number + index
        end = min(end, first)
        run = parent[run]
