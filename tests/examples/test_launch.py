"""The launch scripts, run with stand-ins for `python`, `ray` and SLURM that note their arguments.

So the shell does all its expansions, and what would be started is what our own loader checks. All
launchers start the same script; its keys are checked once.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.config.composing import from_command_line
from verl.config.validate import validate

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = [
    *sorted(path for path in LAUNCH.rglob("*") if path.suffix in (".sh", ".sbatch")),
]
PYTHON = f"""#!/bin/bash
if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi
if [ -n "${{UNTIL_TERM:-}}" ]; then trap 'echo saved >"$NOTES/term"; exit 0' TERM; fi
printf '%s\\0' "$@" >"$NOTES/python"
if [ -n "${{UNTIL_TERM:-}}" ]; then
    for _ in $(seq 600); do sleep 0.05; done
    exit 1
fi
"""
RAY = """#!/bin/bash
printf '%s\\0' "$@" >>"$NOTES/ray"
if [ "${!#}" = --block ]; then exec sleep 20; fi
if [ "$1" = symmetric-run ] || [ "$1 $2" = "job submit" ]; then
    while [ "$1" != -- ]; do shift; done
    shift
    exec "$@"
fi
"""
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo node-a
echo node-b
"""
TIMEOUT = """#!/bin/bash
printf '%s\\0' "$@" >>"$NOTES/timeout"
if [ "${SKYPILOT_NODE_RANK:-}" = 0 ]; then  # it waits for the head beside it
    until [ -s "$NOTES/ray" ]; do sleep 0.01; done
fi
"""
STAND_INS = {
    "python": PYTHON,
    "ray": RAY,
    "srun": SRUN,
    "scontrol": SCONTROL,
    "timeout": TIMEOUT,
}


class Stage:
    """A folder with the stand-ins and with what they noted."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder
        commands = folder / "bin"
        commands.mkdir()
        for name, text in STAND_INS.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.variables = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "NOTES": str(folder),
            "HOME": str(folder),
            "DATA": "/data",
            "CHECKPOINTS": "/checkpoints",
        }

    def start(self, command: list[str], **variables: str) -> subprocess.Popen:
        env = {**self.variables, **variables}
        return subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def run(self, command: list[str], **variables: str) -> None:
        process = self.start(command, **variables)
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 0, complaint

    def noted(self, name: str) -> list[str]:
        note, until = self.notes / name, time.monotonic() + 60
        while not (note.exists() and note.read_text().endswith("\0")):  # by a script beside it
            assert time.monotonic() < until, f"{name} was not called"
            time.sleep(0.01)
        return note.read_text().split("\0")[:-1]

    def overrides(self) -> dict[str, str]:
        """The options of the training that would have started."""
        module, *overrides = self.noted("python")[1:]
        assert module == "verl.trainer.main_ppo"
        return dict(override.split("=", 1) for override in overrides)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash_that_stops_at_the_first_error(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in text
    assert "0.0.0.0" not in text


def test_the_training_command_is_one_that_our_loader_accepts(stage):
    stage.run(["bash", "examples/launch/train.sh", "trainer.test_freq=5"], NNODES="4")
    overrides = [f"{key}={value}" for key, value in stage.overrides().items()]
    composed = from_command_line(*overrides, "trainer.dry_run=True")
    faults = validate(composed.config, composed.loaded.user_set)
    assert not composed.notices
    assert not [fault for fault in faults if not fault.is_about_machine]
    config = composed.config
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (4, 8)
    assert config.trainer.controller == "ray"
    assert config.ray_kwargs.ray_init["address"] == "auto"
    assert config.trainer.test_freq == 5  # arguments win
    assert config.trainer.default_local_dir == "/checkpoints"


def test_the_training_command_names_what_is_missing(stage):
    process = stage.start(["bash", "examples/launch/train.sh"])
    _, complaint = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "NNODES: is not set" in complaint


def test_by_hand_all_machines_use_the_token_and_only_the_head_has_a_dashboard(stage):
    stage.run(["bash", "examples/launch/ray/head.sh"])
    head = stage.noted("ray")
    assert head[:2] == ["get-auth-token", "--generate"]
    assert head[2:] == [
        "start",
        "--head",
        "--port=6379",
        "--dashboard-host=127.0.0.1",
        "--num-gpus=8",
    ]
    (stage.notes / "ray").unlink()
    stage.run(["bash", "examples/launch/ray/worker.sh"], HEAD="10.0.0.1", RAY_AUTH_TOKEN="t")
    assert stage.noted("ray") == ["start", "--address=10.0.0.1:6379", "--num-gpus=8"]
    process = stage.start(["bash", "examples/launch/ray/worker.sh"], HEAD="10.0.0.1")
    assert "RAY_AUTH_TOKEN: is not set; head.sh prints it" in process.communicate(timeout=60)[1]


def test_a_submitted_job_ships_this_repository_and_trains(stage):
    stage.run(["bash", "examples/launch/ray/submit.sh", "trainer.total_epochs=3"], NNODES="2")
    submitted = stage.noted("ray")
    assert "--runtime-env=verl/trainer/runtime_env.yaml" in submitted
    assert (ROOT / "verl/trainer/runtime_env.yaml").is_file()
    assert stage.overrides()["trainer.nnodes"] == "2"
    assert stage.overrides()["trainer.total_epochs"] == "3"


SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node-[a-b]"}


def sbatch_options(script: Path) -> dict[str, str]:
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH --")]
    pairs = (line.removeprefix("#SBATCH --").partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def test_slurm_starts_one_ray_node_per_machine_with_a_token_of_its_own(stage):
    script = LAUNCH / "slurm" / "train.sbatch"
    options = sbatch_options(script)
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:USR1@300"
    stage.run(["bash", str(script), "trainer.save_freq=1"], **SLURM, SLURM_GPUS_ON_NODE="8")
    assert stage.noted("ray")[:5] == [
        "symmetric-run",
        "--address=node-a:6379",
        "--min-nodes=2",
        "--num-gpus=8",
        "--num-cpus=64",
    ]
    overrides = stage.overrides()
    assert overrides["trainer.nnodes"] == options["nodes"]
    assert overrides["trainer.n_gpus_per_node"] == options["gpus-per-node"]
    assert overrides["trainer.save_freq"] == "1"
    assert not list(stage.notes.glob(".verl-*"))  # neither token nor number is left behind


def test_before_the_time_limit_slurm_lets_the_training_save(stage):
    job = stage.start(["bash", str(LAUNCH / "slurm" / "train.sbatch")], **SLURM, UNTIL_TERM="1")
    give_up = time.monotonic() + 60
    while not (stage.notes / "python").exists():
        assert time.monotonic() < give_up, "the training has not begun"
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    _, complaint = job.communicate(timeout=60)
    assert job.returncode == 0, complaint
    assert (stage.notes / "term").read_text() == "saved\n"


def test_slurm_reports_how_the_training_ended(stage):
    (stage.notes / "bin" / "python").write_text(PYTHON + "exit 70\n")
    job = stage.start(["bash", str(LAUNCH / "slurm" / "train.sbatch")], **SLURM)
    job.communicate(timeout=60)
    assert job.returncode == 70


SKYPILOT_KEYS = {
    "name",
    "workdir",
    "num_nodes",
    "resources",
    "envs",
    "secrets",
    "file_mounts",
    "setup",
    "run",
}


@pytest.fixture
def task():
    return yaml.safe_load((LAUNCH / "skypilot" / "train.yaml").read_text())


def variables_of(task: dict, rank: int) -> dict[str, str]:
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        **task["envs"],
    }


def test_skypilot_trains_on_the_nodes_it_asks_for(stage, task):
    assert task.keys() <= SKYPILOT_KEYS
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}  # must be given, is in no file
    stage.run(["bash", "-c", task["run"]], **variables_of(task, rank=0))
    assert stage.noted("ray")[:3] == ["start", "--head", "--port=6479"]
    overrides = stage.overrides()
    assert overrides["trainer.nnodes"] == str(task["num_nodes"]) == "2"
    assert overrides["trainer.n_gpus_per_node"] == "8"
    mounts = tuple(task["file_mounts"])
    assert overrides["trainer.default_local_dir"].startswith(mounts)  # or a preemption loses them
    assert "ray stop" not in task["run"]  # it would end SkyPilot's own


def test_skypilot_reports_how_the_training_ended(stage, task):
    (stage.notes / "bin" / "python").write_text(PYTHON + "exit 70\n")
    job = stage.start(["bash", "-c", task["run"]], **variables_of(task, rank=0))
    job.communicate(timeout=60)
    assert job.returncode == 70


def test_other_nodes_of_skypilot_join_the_first(stage, task):
    (stage.notes / "bin" / "ray").write_text(RAY.replace("exec sleep 20", "exit 1"))
    stage.run(["bash", "-c", task["run"]], **variables_of(task, rank=1))
    assert "10.0.0.1/6479" in stage.noted("timeout")[3]
    assert stage.noted("ray") == ["start", "--address=10.0.0.1:6479", "--num-gpus=8", "--block"]
    assert not (stage.notes / "python").exists()


def test_the_data_that_skypilot_prepares_are_the_data_it_trains_on(task):
    (script,) = [line for line in task["setup"].splitlines() if "data_preprocess" in line]
    assert (ROOT / shlex.split(script)[1]).is_file()
    assert '--local_save_dir "$DATA"' in script


def containers(group: dict) -> list[dict]:
    return group["template"]["spec"]["containers"]


def test_the_kubernetes_manifest_is_a_ray_job_with_all_that_kuberay_asks_for():
    job = yaml.safe_load((LAUNCH / "kuberay" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert {group["groupName"] for group in workers} == {"gpu"}
    for group in (head, *workers):
        assert isinstance(group["rayStartParams"], dict)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        mounted = {mount["name"] for part in containers(group) for mount in part["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        for part in containers(group):
            assert part["resources"]["requests"] == part["resources"]["limits"]
    for group in workers:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        paths = [mount["mountPath"] for part in containers(group) for mount in part["volumeMounts"]]
        assert "/dev/shm" in paths


def test_kubernetes_trains_on_the_gpus_of_its_workers(stage):
    job = yaml.safe_load((LAUNCH / "kuberay" / "rayjob.yaml").read_text())
    entrypoint = job["spec"]["entrypoint"].replace("/verl/", f"{ROOT}/")
    stage.run(shlex.split(entrypoint))
    overrides = stage.overrides()
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert overrides["trainer.nnodes"] == str(group["replicas"])
    gpus = containers(group)[0]["resources"]["limits"]["nvidia.com/gpu"]
    assert overrides["trainer.n_gpus_per_node"] == str(gpus)
    (shared,) = [m for m in containers(group)[0]["volumeMounts"] if m["name"] == "shared"]
    assert overrides["trainer.default_local_dir"].startswith(shared["mountPath"])
