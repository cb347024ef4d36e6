"""A Ray cluster of this machine's own, in a folder that goes away with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "60")

HEALTH = {  # a node that is killed is known to be dead within seconds
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}


@contextlib.contextmanager
def running(nodes: int, cpus: int = 1, gpus: int = 0) -> Iterator[Any]:
    """A cluster of so many nodes with so many CPUs each, and as many GPUs as Ray is to believe in."""
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # Ray notes the address of a cluster there
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets need short names
    common = {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=common | {"_system_config": HEALTH})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**common)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
