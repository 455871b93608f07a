"""The compiled part of `replay.trace.tree`."""

import numba


@numba.njit(cache=True)
def fill(run, depth, size, lead, start, parent, base, out):  # type: ignore[no-untyped-def]
    end = (depth + lead) // size
    while run >= 0 and end > 0:
        first = (start[run] + lead) // size
        number = base[run] - first
        for index in range(first, end):
            out[index] = number + index
        end = min(end, first)
        run = parent[run]
