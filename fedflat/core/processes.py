"""Set up processes that compute with one thread."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator

import torch


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Compute with one thread inside the block: the rounding of large sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def keep_pages() -> None:
    """Make glibc keep freed memory: returning large temporaries in every step costs 10–20 % in page faults."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, (1 << 31) - 1)


def become_worker() -> None:
    """Make this forked process a worker: one thread, Ctrl-C ignored, killed when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_pages()
    if sys.platform == "linux":  # an orphan would keep cores and the run folder's lock
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    gc.freeze()  # scanning inherited objects for garbage would copy their memory pages
