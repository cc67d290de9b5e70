"""docs/kubernetes.yaml: its parts fit together, and the launcher understands what it sets."""

from pathlib import Path

import yaml

import resnet50_test
from utils.launch.plan import read_plan
from utils.settings.config import parse

ROOT = Path(__file__).resolve().parents[2]


def test_the_manifest_starts_a_node_in_each_pod():
    text = (ROOT / "docs" / "kubernetes.yaml").read_text(encoding="utf-8")
    service, job = yaml.safe_load_all(text)
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"  # the word: a headless service
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] in ("OnFailure", "Never")
    mounted = {volume["name"] for volume in pod["volumes"]}
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == mounted

    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert all(isinstance(value, str) for value in env.values() if value is not None)
    (rank,) = [entry["valueFrom"] for entry in container["env"] if "valueFrom" in entry]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank == {"fieldRef": {"fieldPath": index}}
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    for node in range(spec["completions"]):
        plan = read_plan(env | {"NODE_RANK": str(node)}, lambda: gpus, cores=8)
        assert plan.min_nodes == plan.max_nodes == spec["completions"]
        assert (plan.processes, plan.is_host) == (gpus, node == 0)
        # The first pod's host name and the service's.
        assert plan.host == f"{name}-0.{service['metadata']['name']}"

    (script,), (entry, *flags) = container["command"], container["args"]
    assert (ROOT / script).is_file() and (ROOT / entry).is_file()
    settings, _ = parse(resnet50_test.Settings, [*flags, "--distributed"], "")
    shared = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    assert settings.output.startswith(f"{shared}/")
