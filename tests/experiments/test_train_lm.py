"""A training that was killed goes on from its last checkpoint as if nothing had happened."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from typing import Any

import chex
import equinox as eqx
import jax
import numpy as np
import psutil
import pytest
from absl import flags

import jaxpp
from experiments import train_lm
from experiments.training import checkpoints, compare, data, mesh, models
from experiments.training.config import Config
from experiments.training.flags import define
from tests.runtime.launched import jobs

STEPS = 40
TINY: dict[str, Any] = dict(
    layers=2, width=8, heads=2, sequence_length=8, dropout=0.1, ranks=2, microbatches=2,
    batch_size=4, warmup_steps=2, steps=STEPS, eval_every=20, sample_bytes=0, checkpoint_every=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file to train on: nothing but different bytes."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(bytes(i * i % 251 for i in range(4096)))
    return path


@pytest.fixture(scope="module")
def train(text):
    """Trains in this process; gives the rows of the file of metrics."""

    def train(output, **values):
        config = Config(**(TINY | values), output=str(output), data=str(text))
        train_lm.main(lambda: config, [])
        return rows(output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm, "make_devices", lambda config: None)  # conftest.py makes them
        yield train


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory):
    """The output of a run that nobody has killed."""
    output = tmp_path_factory.mktemp("uninterrupted")
    train(output)
    return output


def rows(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(metrics):
    """All of the rows that is the same in every run."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in metrics]


def start(output, text, variables=None, before=(), **values):
    """Starts to train in a process of its own, with further environment variables.

    `before` are the words of a launcher, in front of the command.
    """
    arguments = TINY | values | dict(output=output, data=text)
    command = [f"--{name}={value}" for name, value in arguments.items()]
    return subprocess.Popen(
        [*before, sys.executable, "-m", "experiments.train_lm", *command],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "RAY_ADDRESS": "local"} | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rows(process, output, count):
    """Waits until the process has written so many rows; it must still be at work then."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (output / "metrics.jsonl").exists() and len(rows_so_far(output)) >= count:
            break
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.002)
    assert count <= len(rows_so_far(output)) < STEPS


def rows_so_far(output):
    return (output / "metrics.jsonl").read_text().splitlines()


def test_a_killed_run_goes_on_bitwise(uninterrupted, train, text, tmp_path):
    process = start(tmp_path, text)
    wait_for_rows(process, tmp_path, 12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows_so_far(tmp_path)
    resumed = train(tmp_path, resume=True)
    assert losses(resumed) == losses(rows(uninterrupted))
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    # Its first checkpoint was whole: what led there was not done again, and has its old times.
    assert [json.dumps(row) for row in resumed[:5]] == before[:5]


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_goes_on_by_itself(uninterrupted, text, tmp_path):
    process = start(tmp_path, text, mesh="ray", restarts=1)
    wait_for_rows(process, tmp_path, 12)
    workers = workers_of(process)
    workers[1].kill()
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert f"process {workers[1].pid}" in shown and "0 more restarts are left" in shown
    assert losses(rows(tmp_path)) == losses(rows(uninterrupted))


@pytest.mark.slow
def test_a_killed_run_on_ray_goes_on_bitwise(uninterrupted, text, tmp_path):
    process = start(tmp_path, text, mesh="ray")
    wait_for_rows(process, tmp_path, 12)
    workers = workers_of(process)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    process = start(tmp_path, text, mesh="ray", resume=True)
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert losses(rows(tmp_path)) == losses(rows(uninterrupted))


def launch(output, text, count=2, **values):
    """Starts to train in several processes, as torchrun does."""
    port, known = jobs.free_port(), jobs.environment()
    return [
        start(
            output,
            text,
            known | {name: str(value) for name, value in jobs.torchrun(n, count, port).items()},
            mesh="launched",
            **values,
        )
        for n in range(count)
    ]


def start_by_mpirun(output, text):
    known = jobs.environment() | {"OMPI_ALLOW_RUN_AS_ROOT": "1"}
    known |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    before = ("mpirun", "-n", "2", "--oversubscribe")
    return [start(output, text, known, before, mesh="launched")]


#: The processes of the same script, unchanged but for its mesh, by how they are started.
STARTED = {
    "torchrun": launch,
    "mpirun": start_by_mpirun,
    "ray": lambda output, text: [start(output, text, mesh="ray")],
}


@pytest.mark.parametrize("how", ["torchrun", *(pytest.param(how, marks=pytest.mark.slow)
                                               for how in ("mpirun", "ray"))])  # fmt: skip
def test_the_script_has_the_losses_and_the_checkpoint_of_one_process(
    uninterrupted, text, tmp_path, how
):
    if how == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    processes = STARTED[how](tmp_path, text)
    shown = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), shown
    assert losses(rows(tmp_path)) == losses(rows(uninterrupted))
    chex.assert_trees_all_equal(saved(tmp_path), saved(uninterrupted), strict=True)
    assert "".join(shown).count("nats a byte") == 1  # the first one prints
    assert {"loss.png", "timeline.png"} <= set(os.listdir(tmp_path))


def saved(output):
    """The arrays of the last checkpoint of a run, in this process."""
    config = Config(**TINY, output=str(output))
    like = eqx.filter_eval_shape(train_lm.initial_state, config)
    with checkpoints.manager(config) as manager:
        assert manager.latest_step() == STEPS
        return eqx.filter(manager.restore(STEPS, args=jaxpp.restore_args(like)), eqx.is_array)


@pytest.mark.slow
def test_a_launched_run_one_process_of_which_was_killed_goes_on_bitwise(
    uninterrupted, text, tmp_path
):
    processes = launch(tmp_path, text)
    wait_for_rows(processes[0], tmp_path, 12)
    processes[1].kill()
    for process in processes:
        process.communicate(timeout=60)  # less than JAX's own 100 s
        assert process.returncode != 0
    assert len(rows_so_far(tmp_path)) < STEPS
    processes = launch(tmp_path, text, resume=True)
    shown = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], shown
    assert losses(rows(tmp_path)) == losses(rows(uninterrupted))


def workers_of(process):
    """The processes of the ranks; they call themselves by the class of their actor."""
    everyone = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in everyone if "ray::jaxpp_rank" in (child.cmdline() or [""])[0]]
    assert len(workers) == TINY["ranks"]
    return workers


def test_a_finished_run_has_nothing_left_to_do(uninterrupted, train):
    first = rows(uninterrupted)
    assert train(uninterrupted, resume=True) == first


def test_without_a_checkpoint_a_run_starts_from_the_beginning(uninterrupted, train, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of a run that was killed early")
    assert losses(train(tmp_path, resume=True)) == losses(rows(uninterrupted))


def test_runs_do_not_mix(uninterrupted, train):
    before = rows(uninterrupted)
    with pytest.raises(SystemExit, match=f"^train_lm: .* of step {STEPS} of another run"):
        train(uninterrupted)
    assert rows(uninterrupted) == before


def test_lost_rows_are_an_error(uninterrupted, train, tmp_path):
    output = shutil.copytree(uninterrupted, tmp_path / "copy")
    (output / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=f"the rows of 0 steps, but {STEPS} are done"):
        train(output, resume=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(mesh="ray", worker_environment=("A",)), "NAME=value, got 'A'"),
        (dict(restarts=1), "restarts is for mesh=ray"),
        (dict(cores=1), "cores is for mesh=ray"),
        (dict(mesh="launched", restarts=1), "restarts is for mesh=ray"),
        (dict(mesh="ray", restarts=1, checkpoint_every=0), "restarts needs checkpoint_every"),
        (dict(mesh="ray", dp=2, processes_per_rank=4), "=4 divides the 2 devices of a rank"),
        (dict(dp=2, processes_per_rank=2), "processes_per_rank is for mesh=ray"),
        (dict(dp=4), "dp=4 replicas of 2 microbatches do not divide batch_size=4;"),
        (dict(mp=4), "mp=4 shares the heads of attention, .* number, 2;"),
        (dict(zero1=True), "zero1 shares optimizer state between the dp devices"),
        (dict(batch_size=3), "batch_size must be a multiple of microbatches, got 3 and 2"),
        (dict(model="llama2"), "dropout is not for model=llama2, which has layers, width"),
        (dict(model="llama2", dropout=None, kv_heads=3), "heads=2 and kv_heads=3"),
        (dict(model="gpt2", sequence_length=2048), "positions for 1024 tokens"),
        (dict(model="gpt2", schedule="seq1f1b"), "is for model=gpt"),
        (dict(schedule="seq1f1b"), "has no dropout; use dropout=0"),
        (dict(schedule="seq1f1b(slices=3)", dropout=0.0), "cuts sequences of 8 bytes in 3"),
        (dict(schedule="forward_only"), "has no backward"),
        (dict(schedule="1f1c"), "1f1c"),
        (dict(ranks=4, cut="path"), "got 4 stages for 2 blocks"),
        (dict(profile=True, steps=5), "profile traces step 6, got 5 steps"),
        (dict(model="bert"), "model is one of gpt, .*, got 'bert'"),
        (dict(steps=0), "steps is at least 1, got 0"),
        (dict(dropout=1.5), "dropout is between 0 and 1, got 1.5"),
        (dict(learning_rate=float("nan")), "learning_rate is at least 0, got nan"),
        (dict(ranks="4"), "ranks takes int, got '4'"),
        (dict(steps=True), "steps takes int, got True"),
        (dict(log="nowhere:log"), "log is package.module:function, .* 'nowhere:log': No module"),
        (dict(log="json:nothing"), "got 'json:nothing': module 'json' has no attribute"),
        (dict(log="json:__name__"), "log=json:__name__ is no function: 'json'"),
        (dict(device="h1000"), "device is one of a100, .*, got 'h1000'"),
    ],
)
def test_a_wrong_configuration_is_an_error_that_names_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        Config(**(TINY | values))


def config_of(*arguments):
    own = flags.FlagValues()
    read = define(own)
    own(["train_lm", *arguments])
    return read()


def test_flags_are_the_fields_of_the_configuration():
    assert config_of() == Config()
    given = config_of("--schedule=zb_h1", "--ranks=2", "--dropout=0.5", "--tied", "--nozero1",
                      "--mesh=ray", "--worker_environment=A=1,B=2")  # fmt: skip
    assert given == Config(schedule="zb_h1", ranks=2, dropout=0.5, tied=True, mesh="ray",
                           worker_environment=("A=1", "B=2"))  # fmt: skip


def test_flags_have_the_names_of_other_systems():
    given = config_of("--pp=2", "--dp=2", "--num_pipeline_microbatches=4",
                      "--batch_size_per_device=2")  # fmt: skip
    assert given == Config(ranks=2, dp=2, microbatches=4, batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks=2", "--pp=4"], "ranks=2 and pp=4 are two values for one thing"),
        (["--microbatches=2", "--num_pipeline_microbatches=4"], "num_pipeline_microbatches=4"),
        (["--batch_size=8", "--batch_size_per_device=2"], "batch_size=8 and batch_size_per_dev"),
    ],
)
def test_two_values_for_one_thing_are_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        config_of(*arguments)


def test_an_error_of_the_flags_is_shown_alone():
    command = [sys.executable, "-m", "experiments.train_lm", "--dp=4", "--batch_size=8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("train_lm: dp=4 replicas of 8 microbatches")
    assert done.stderr.count("\n") == 1


# What each model of the zoo does not share with the byte-level GPT of `TINY`.
MODELS = {
    "gpt2": dict(cut="annotation"),
    "llama2": dict(dropout=None, kv_heads=1, head_width=4, mlp_width=8, cut="path"),
    "mistral": dict(dropout=None, kv_heads=2, head_width=4, mlp_width=8, window=3, cut="auto"),
    "mixtral": dict(dropout=None, kv_heads=1, head_width=4, mlp_width=8, cut="annotation"),
}


@pytest.mark.parametrize("model", ["mixtral"] + [pytest.param(m, marks=pytest.mark.slow)
                                                 for m in [*MODELS][:3]])  # fmt: skip
def test_each_model_trains_as_on_one_device(train, tmp_path, capsys, model):
    run = dict(model=model, vocabulary=256, steps=3, sample_bytes=4, checkpoint_every=0)
    settings = MODELS[model] | run
    assert len(train(tmp_path, **settings, verify=True)) == 3
    assert "verify: parameters: largest difference" in capsys.readouterr().out
    assert len((tmp_path / "sample.txt").read_text()) >= 4


@pytest.mark.parametrize(
    ("model", "inside"),
    [
        ("gpt", dict(dp=2, mp=2, zero1=True)),
        pytest.param("gpt2", dict(dp=2, mp=2), marks=pytest.mark.slow),
        pytest.param("llama2", dict(dp=2, zero1=True), marks=pytest.mark.slow),
        pytest.param("mixtral", dict(mp=2), marks=pytest.mark.slow),
        pytest.param("gpt", dict(mesh="ray", dp=2, mp=2, zero1=True), marks=pytest.mark.slow),
        pytest.param("gpt2", dict(mesh="ray", dp=2, processes_per_rank=2), marks=pytest.mark.slow),
    ],
)
def test_a_training_inside_ranks_is_that_on_one_device(train, tmp_path, capsys, model, inside):
    run = dict(steps=3, sample_bytes=0, checkpoint_every=2, verify=True)
    sizes = {} if model == "gpt" else MODELS[model] | dict(model=model, vocabulary=256)
    train(tmp_path, **run | sizes | inside)
    assert "verify: parameters: largest difference" in capsys.readouterr().out


def test_differences_count_and_roundings_do_not(capsys):
    weight, noise = np.ones(4), np.full(4, 1e-9)
    compare.arrays("parameters", [weight, 3 * noise], [weight, noise], 1e-3)
    assert "within the tolerance" in capsys.readouterr().out
    for wrong in ([weight + 0.01, noise], [weight, noise + 1e-5], [weight * np.nan, noise]):
        with pytest.raises(SystemExit, match="FAILED"):
            compare.arrays("parameters", wrong, [weight, noise], 1e-3)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("llama2", dict(width=1024, heads=8, kv_heads=8, mlp_width=11008, layers=1, head_width=128,
                        vocabulary=32000)),
        ("mixtral", dict(width=1024, heads=2, mlp_width=896, layers=2, head_width=16, experts=8,
                         experts_per_token=2)),
        ("mistral", dict(width=2048, heads=1, mlp_width=896, layers=1, head_width=8)),
    ],
)  # fmt: skip
def test_small_models_have_their_sizes(model, sizes):
    config = models.CONFIGS[model]
    assert {name: getattr(config, name) for name in sizes} == sizes


def test_the_sixth_step_is_traced(train, tmp_path, monkeypatch):
    done = []
    for name in ("start_trace", "stop_trace"):
        original = getattr(jaxpp.MpmdMesh, name)

        def noted(*args, original=original):
            done.append(len(rows_so_far(tmp_path)))
            return original(*args)

        monkeypatch.setattr(jaxpp.MpmdMesh, name, noted)
    train(tmp_path, profile=True, steps=8, checkpoint_every=0)
    assert done == [5, 5]  # its own row is written after it
    assert (tmp_path / "profile" / "timeline.json").exists()


@pytest.fixture
def logged(monkeypatch):
    """What a logger has got, which is named as `my_logger:log`."""
    found = []
    own = types.SimpleNamespace(log=lambda number, values: found.append((number, values)))
    monkeypatch.setitem(sys.modules, "my_logger", own)
    return found


def test_a_logger_gets_the_metrics_of_each_step(train, tmp_path, logged):
    settings = dict(steps=4, eval_every=3, checkpoint_every=2, log="my_logger:log", device="h100")
    written = train(tmp_path, **settings)
    assert [number for number, _ in logged] == [1, 2, 3, 4]
    tokens = TINY["batch_size"] * TINY["sequence_length"]
    width, depth = TINY["width"], TINY["layers"]
    products = 12 * width**2 * depth + width * 256  # the parameters that are factors
    flops = tokens * (6 * products + 12 * depth * width * TINY["sequence_length"])  # as in PaLM's
    for row, (number, values) in zip(written, logged, strict=True):
        seconds = row["seconds"]
        assert values.pop("tokens_per_second") == tokens / seconds
        assert values.pop("mfu") == pytest.approx(flops / (seconds * 2 * 989e12))
        assert values | {"step": number} == row
    assert [n for n, values in logged if "held_out_loss" in values] == [3, 4]


def test_without_a_known_device_there_is_no_mfu_and_a_run_goes_on_logging(train, tmp_path, logged):
    settings = dict(checkpoint_every=2, sample_bytes=0, log="my_logger:log")
    train(tmp_path, steps=2, **settings)
    assert [list(values) for _, values in logged][0] == ["loss", "seconds", "tokens_per_second"]
    train(tmp_path, steps=4, resume=True, **settings)
    assert [number for number, _ in logged] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5", "tpu_v5p"),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_the_devices_of_this_process_are_known_by_their_kind(monkeypatch, kind, name):
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(device_kind=kind)])
    assert mesh.device_name(Config(**TINY)) == name
    assert mesh.device_name(Config(**TINY, device="tpu_v4")) == "tpu_v4"
    assert mesh.device_name(Config(**TINY, mesh="ray")) is None


def test_the_first_seven_steps_are_not_in_the_throughput():
    metrics = [{"seconds": 100.0}] * 7 + [{"seconds": 0.5}] * 2
    assert train_lm.throughput(Config(), metrics) == 32 * 64 / 0.5


def test_the_parts_work_without_flags(text):
    """As in a notebook: a mesh of one's own, and a step at a time."""
    config = dataclasses.replace(Config(**TINY), steps=2, learning_rate=0.1, warmup_steps=0)
    step, evaluate = train_lm.make_pipeline(config, jaxpp.MpmdMesh((2,)))
    model, opt_state = train_lm.initial_state(config)
    (tokens, keys), _ = train_lm.training_batches(config, data.load(text))
    before = float(evaluate(model, tokens))
    model, opt_state, _ = step(model, opt_state, tokens, keys)
    assert float(evaluate(model, tokens)) < before
