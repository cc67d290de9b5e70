"""MLflow itself, with a database in a folder: what a run sends, and what a resumed one adds."""

import json
from pathlib import Path

import pytest

from utils.reporting.trackers import MLFLOW

RUN = "--dataset shapes --depth 18 --width 4 --batch_size 100 --log_every 2 --trackers mlflow"


@pytest.mark.slow
def test_a_run_and_its_resumption_are_one_run_there(run_resnet, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    for name, value in MLFLOW.items():  # which the run sets, and which are put back
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert run_resnet(f"{RUN} --epochs 1 --output run") == 0
    assert run_resnet("--resume run --epochs 2") == 0
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("fewhours")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["width"] == "4"
    records = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    logged = {r["step"]: r["loss"] for r in records if r.get("average_over") == "steps"}
    history = client.get_metric_history(run.info.run_id, "loss/train_steps")
    assert {point.step: point.value for point in history} == logged and len(logged) > 4
