"""MLflow."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.extras import needed
from fedflat.tracking.tracker import Tracker, files, identity, inside, title

if TYPE_CHECKING:
    from fedflat.runs.result import Run

STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """A run in MLflow: `mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db`.

    Args:
        uri: URI of the store, such as "http://localhost:5000"; None is an SQLite file in the run folder.
        project: The MLflow experiment of the run.
    """

    def __init__(self, uri: str | None = None, project: str = "fedflat") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before mlflow is imported
        self._mlflow = needed("mlflow", "MLflow", "track")
        if uri is None:
            needed("sqlalchemy", "SQLAlchemy", "track")
            needed("alembic", "Alembic", "track")
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs every table it makes
        self._uri, self._project = uri, project

    def open(self, run: Run) -> None:
        """Find the run in the store, or create it."""
        uri, artifacts = self._uri, None
        if uri is None:
            place = inside(run, "mlflow")
            place.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{place}/mlflow.db", (place / "artifacts").as_uri()
        self._client = self._mlflow.MlflowClient(uri)
        self._run, self._last = self._find(self._find_project(artifacts), identity(run))
        self._client.update_run(self._run, status="RUNNING", name=title(run))
        param, fields = self._mlflow.entities.Param, run.experiment.to_dict()
        self._client.log_batch(self._run, params=[param(name, str(value)) for name, value in fields.items()])

    def _find_project(self, artifacts: str | None) -> Any:
        found = self._client.get_experiment_by_name(self._project)
        return found.experiment_id if found else self._client.create_experiment(self._project, artifacts)

    def _find(self, project: Any, name: str) -> tuple[Any, int]:
        """The run's id in the store and the last round stored."""
        found = self._client.search_runs([project], f"tags.fedflat_run = '{name}'")
        if not found:
            return self._client.create_run(project, tags={"fedflat_run": name}).info.run_id, 0
        history = self._client.get_metric_history(found[0].info.run_id, "clients")  # a metric that every round has
        return found[0].info.run_id, max((metric.step for metric in history), default=0)

    def write(self, round: int, values: Mapping[str, float], spread: Mapping[str, np.ndarray], moment: float) -> None:
        """All metrics of a round in one request; MLflow has no histograms."""
        if round <= self._last:
            return
        metric = self._mlflow.entities.Metric
        stamp = int(1000 * moment)
        self._client.log_batch(self._run, [metric(name, value, stamp, round) for name, value in values.items()])
        self._last = round

    def close(self, run: Run) -> None:
        """Add the files, and set how the run ended."""
        for file in files(run):
            self._client.log_artifact(self._run, str(file))
        if run.status in STATUS:
            self._client.set_terminated(self._run, STATUS[run.status])
