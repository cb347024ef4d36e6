"""What a client may be asked to do; a back end need not know which it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedflat.client import train
from fedflat.contribution import contributed_statistics, contribution
from fedflat.examine import examine
from fedflat.method import Update
from fedflat.statistics import estimate
from fedflat.task import Job, Task


class Duty(NamedTuple):
    """work: what is done where the client's data are. share: what it adds to the round's sums, told by whoever adds."""

    work: Callable[[Task, Job], Update]
    share: Callable[[Task, Update], Update]


DUTIES = {
    "train": Duty(train, contribution),
    "statistics": Duty(estimate, contributed_statistics),
    "examine": Duty(examine, lambda task, update: update),
}


def perform(task: Task, job: Job) -> Update:
    """Do one client's duty."""
    duty = DUTIES[job.duty]
    return duty.share(task, duty.work(task, job))
