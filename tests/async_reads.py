"""Which matrix products read shared memory that asynchronous copies fill, and whether the fence stands between.

Copies by ``cp.async`` write as threads do, and the matrix unit of Hopper and Blackwell reads as bulk copies do: what the one
wrote the other may see only past ``fence.proxy.async``. Triton 3.6 writes it for stores alone, where upstream mended it in 3.7.
"""

from __future__ import annotations

import re

PRODUCT = re.compile(r"(?:warp_group_dot|tc_gen5_mma) (%[\w-]+), (%[\w-]+)")
VIEW = re.compile(r"(%[\w-]+) = ttg\.memdesc_\w+ (%[\w-]+)")
COPY = re.compile(r"async_copy_global_to_local %[\w-]+, (%[\w-]+)")


def unfenced_reads(ttgir: str) -> list[str]:
    """Return products, as Triton's own representation of a GPU program writes them, that read copies without a fence.

    Lines are taken in their order: a fence counts from the last wait for copies on, whichever branch it stands in.
    """
    lines = ttgir.splitlines()
    viewed = dict(match.groups() for line in lines if (match := VIEW.search(line)))

    def memory(name: str) -> str:
        while name in viewed:
            name = viewed[name]
        return name

    filled = {memory(match[1]) for line in lines if (match := COPY.search(line))}
    found, is_fenced = [], True
    for line in lines:
        if "async_wait" in line:
            is_fenced = False
        elif "fence_async_shared" in line:
            is_fenced = True
        elif (match := PRODUCT.search(line)) and not is_fenced and filled & set(map(memory, match.groups())):
            found.append(match[0])
    return found
