"""Job files among the configs: their commands exist, and their settings are parsed."""

import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxdist.command_line.arguments import Arguments, parse
from jaxdist.runtime.launcher import VARIABLES, Launch, launched

CONFIGS = Path(__file__).parents[1] / "configs"
SLURM, KUBERNETES = CONFIGS / "slurm.sh", CONFIGS / "kubernetes.yaml"


def arguments(command: list[str]) -> Arguments:
    """Arguments of `... python -m jaxdist.train ARGUMENTS`; an unknown one is a ConfigError."""
    assert command[:3] == ["python", "-m", "jaxdist.train"]
    return parse(command[3:], "jaxdist.train", "")


def devices(parsed: Arguments) -> int:
    return math.prod(parsed.experiment.parallel.axes(None).values())


@pytest.mark.parametrize("file", [SLURM, KUBERNETES], ids=lambda file: file.name)
def test_a_job_file_begins_as_configs_do(file: Path) -> None:
    head = file.read_text(encoding="utf-8").split("\n\n")[0]
    assert [word for word in ("Command", "Hardware", "Time", "Expect") if not re.search(rf"(?m)^# {word}:", head)] == []


@pytest.mark.long
@pytest.mark.parametrize(("code", "queued"), [(0, ""), (1, ""), (75, "requeue 4097\n")])
def test_slurm_queues_a_job_again_that_was_stopped_early(code: int, queued: str, tmp_path: Path) -> None:
    """The script itself, with a fake srun and scontrol that record their arguments."""
    for name, ends in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/{name}.asked"\nexit {ends}\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4097"}
    assert subprocess.run(["bash", "-n", str(SLURM)]).returncode == 0
    done = subprocess.run(["bash", str(SLURM), "--steps", "7"], env=environment, cwd=tmp_path)
    assert done.returncode == code
    asked = tmp_path / "scontrol.asked"
    assert (asked.read_text() if asked.exists() else "") == queued

    flag, *command = shlex.split((tmp_path / "srun.asked").read_text())
    parsed = arguments(command)
    assert flag == "--kill-on-bad-exit=1" and parsed.resume and parsed.experiment.train.steps == 7
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S+)", SLURM.read_text()))
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == devices(parsed)
    assert options["ntasks-per-node"] == "1" and options["signal"].startswith("TERM@")


def test_pods_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    pod = job["spec"]["template"]
    container = pod["spec"]["containers"][0]
    parsed = arguments([*container["command"], *container["args"]])
    processes = job["spec"]["parallelism"]
    assert parsed.resume and processes * container["resources"]["limits"]["nvidia.com/gpu"] == devices(parsed)
    assert job["spec"]["completions"] == processes and job["spec"]["completionMode"] == "Indexed"

    for name in {n for names in VARIABLES.values() for n in names} & os.environ.keys():
        monkeypatch.delenv(name)
    for variable in container["env"]:
        index = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        assert "value" in variable or index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        monkeypatch.setenv(variable["name"], variable.get("value", "1"))
    # An Indexed Job names a pod by the job and its index, below its subdomain: the headless service.
    first = f"{job['metadata']['name']}-0.{pod['spec']['subdomain']}"
    assert launched() == Launch("the environment", processes, 1, 0, (first, 29500))
    assert service["metadata"]["name"] == pod["spec"]["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
