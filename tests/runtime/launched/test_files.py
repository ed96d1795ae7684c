"""The files of the page on launching: each is parsed, and its command run."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.runtime.launched import jobs

FOLDER = jobs.ROOT / "examples" / "launch"
#: What stands for a launcher that is not installed: it starts the command with its variables.
LAUNCHER = """#!{python}
import json, os, subprocess, sys
sys.path.insert(0, {root!r})
from tests.runtime.launched.jobs import LAUNCHERS
options, command = {{}}, []
for word in sys.argv[1:]:
    if word.startswith("--") and not command:
        name, _, value = word[2:].partition("=")
        options[name] = value
    else:
        command.append(word)
command = command if {name!r} == "srun" else [sys.executable, *command]
count, port = int(options.get("nproc-per-node", {count})), {port}
json.dump(options, open({told!r}, "w"))
runs = [
    subprocess.Popen(
        command,
        env=os.environ | {{k: str(v) for k, v in LAUNCHERS[{launcher!r}](n, count, port).items()}},
    )
    for n in range(count)
]
sys.exit(max(abs(run.wait()) for run in runs))
"""


def put_launcher(folder, name, launcher, count, port):
    path = folder / name
    words = {"told": str(folder / "told"), "root": str(jobs.ROOT), "python": sys.executable}
    words |= {"name": name, "launcher": launcher, "count": count, "port": port}
    path.write_text(LAUNCHER.format(**words))
    path.chmod(0o755)


def run(command, folder, **variables):
    environment = jobs.environment() | variables
    environment["PATH"] = os.pathsep.join(
        (str(folder), os.path.dirname(sys.executable), environment["PATH"])
    )
    done = subprocess.run(
        command, cwd=jobs.ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"^step \d+: loss .*$", done.stdout, re.M)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What the script prints in one process."""
    return run([sys.executable, FOLDER / "train.py", "local"], tmp_path_factory.mktemp("local"))


def test_torchrun(tmp_path, losses):
    put_launcher(tmp_path, "torchrun", "torchrun", 0, jobs.free_port())
    assert run(["sh", FOLDER / "torchrun.sh"], tmp_path) == losses and len(losses) == 2
    told = json.loads((tmp_path / "told").read_text())
    assert told == {
        "nproc-per-node": "2", "master-addr": "127.0.0.1", "master-port": "29500",
    }  # fmt: skip


def test_without_torchrun_its_script_says_what_to_install(tmp_path):
    command = [str(shutil.which("sh")), FOLDER / "torchrun.sh"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 127 and "pip install torch, or take mpirun.sh" in done.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun(tmp_path, losses):
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    assert run(["sh", FOLDER / "mpirun.sh"], tmp_path, **allowed) == losses


@pytest.mark.parametrize(("name", "tasks"), [("hosts", 1), ("gpus", 2)])
def test_slurm(tmp_path, losses, name, tasks):
    path = FOLDER / f"{name}.sbatch"
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", path.read_text(), re.M))
    assert options["nodes"] == "2" and int(options["ntasks-per-node"]) == tasks
    put_launcher(tmp_path, "srun", "slurm", 2 * tasks, os.getpid())
    assert run(["bash", path], tmp_path, SLURM_SUBMIT_DIR=str(tmp_path)) == losses
    saved = sorted(os.listdir(tmp_path / "checkpoints"))
    assert saved == ["step-0010", "step-0020"]
    # A job that is started again goes on behind its last checkpoint.
    shutil.rmtree(tmp_path / "checkpoints" / "step-0020")
    assert run(["bash", path], tmp_path, SLURM_SUBMIT_DIR=str(tmp_path)) == losses[1:]


def test_kubernetes(tmp_path):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((FOLDER / "indexed_job.yaml").read_text())
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {own["name"]: own.get("value") for own in container["env"]}
    assert given["JAX_NUM_PROCESSES"] == "2" and {"JAX_PROCESS_ID", "JAXPP_SECRET"} <= set(given)
    name = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert given["JAX_COORDINATOR_ADDRESS"].startswith(name)
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == "train"
    assert (jobs.ROOT / container["command"][1]).exists()


def test_kuberay():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert job["kind"] == "RayJob" and job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    _, script, kind = shlex.split(job["spec"]["entrypoint"])
    assert (jobs.ROOT / script).exists() and kind == "ray"


def test_the_page_has_each_file():
    page = (jobs.ROOT / "docs" / "launch.md").read_text()
    assert all(f"`{path.name}`" in page for path in FOLDER.iterdir() if path.suffix != ".py")
    command = next(n for n in (FOLDER / "hosts.sbatch").read_text().splitlines() if "srun" in n)
    assert command in page and pathlib.Path(FOLDER / "train.py").name in page
