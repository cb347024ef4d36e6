"""What a client may be asked to do; a back end need not know which it is."""

from __future__ import annotations

from collections.abc import Callable

from fedflat.client import Job, Task, train
from fedflat.examine import examine
from fedflat.method import Update
from fedflat.statistics import estimate

DUTIES: dict[str, Callable[[Task, Job], Update]] = {"train": train, "statistics": estimate, "examine": examine}


def perform(task: Task, job: Job) -> Update:
    """Do one client's duty."""
    return DUTIES[job.duty](task, job)
