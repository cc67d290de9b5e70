"""MLflow, by a stand-in for its client, as the package takes seconds to import: what is sent, and
under which ID. test_real_mlflow.py has the package itself."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from trackers_records import window

from utils.errors import UserError
from utils.reporting.trackers import Mlflow


class Client:
    """Of MlflowClient what is used here; `calls` has what all have been asked."""

    calls: list = []  # noqa: RUF012

    def __getattr__(self, name: str):
        def call(*arguments, **named):
            self.calls.append((name, *arguments, *named.values()))
            answers = {
                "create_experiment": "7",
                "create_run": SimpleNamespace(info=SimpleNamespace(run_id="r1")),
            }
            return answers.get(name)

        return call


@pytest.fixture(autouse=True)
def package(monkeypatch):
    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient, entities.Metric, entities.Param = Client, lambda *m: m, lambda *p: p
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for name in ("DISABLE_TELEMETRY", "HTTP_REQUEST_TIMEOUT", "HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(f"MLFLOW_{name}", "1")  # are put back
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    Client.calls.clear()


def test_figures_and_settings_go_to_one_run(tmp_path):
    tracker = Mlflow(tmp_path, {"lr": 0.1, "data_dir": "/home/secret/pictures"})
    tracker.log(window(3, loss=1.0, lr=0.1))
    tracker.close()
    again = Mlflow(tmp_path, {"lr": 0.1})
    again.close()
    assert [name for name, *_ in Client.calls] == [
        "get_experiment_by_name", "create_experiment", "create_run", "log_batch", "log_batch",
        "set_terminated", "update_run", "set_terminated",
    ]  # fmt: skip
    calls = [rest for _, *rest in Client.calls]
    assert calls[2] == ["7", tmp_path.name]
    assert calls[3] == ["r1", [("lr", "0.1"), ("data_dir", "pictures")]]
    assert [(key, value, step) for key, value, _, step in calls[4][1]] == [
        ("loss/train_steps", 1.0, 3),
        ("lr", 0.1, 3),
    ]
    assert calls[6] == ["r1", "RUNNING"] and calls[7] == ["r1"]


def test_a_server_that_fails_refuses_the_start_but_not_the_rest(tmp_path, monkeypatch):
    said: list = []
    tracker = Mlflow(tmp_path, {}, said.append)
    monkeypatch.setattr(Client, "__getattr__", lambda self, name: 1 / 0)
    for step in (1, 2):
        tracker.log(window(step, loss=1.0))
    assert said == ["mlflow: division by zero; training continues without it"]
    with pytest.raises(UserError, match="--trackers mlflow: division by zero"):
        Mlflow(tmp_path, {})
