"""Ray's own conventions: what `ray.init` says of the workers' environment holds for a mesh."""

import importlib
import logging
import os

import pytest

ray = pytest.importorskip("ray")

import jaxpp  # noqa: E402


def look(process):
    uploaded = importlib.import_module("only_in_the_working_dir")
    names = "OF_THE_SESSION", "OF_BOTH", "OF_THE_MESH"
    return uploaded.VALUE, uploaded.__file__, [os.environ.get(name) for name in names]


@pytest.mark.more
def test_the_runtime_env_of_a_session_holds_for_the_workers(tmp_path):
    (tmp_path / "only_in_the_working_dir.py").write_text("VALUE = 7\n")
    variables = {"OF_THE_SESSION": "1", "OF_BOTH": "1"}
    runtime_env = {"working_dir": str(tmp_path), "env_vars": variables}
    ray.init(address="local", runtime_env=runtime_env, logging_level=logging.WARNING)
    try:
        environment = {"OF_BOTH": "2", "OF_THE_MESH": "2"}
        with jaxpp.RemoteMpmdMesh((1,), environment=environment, start_timeout=300) as mesh:
            value, file, found = mesh.apply(look, {0: ()})[0]
    finally:
        ray.shutdown()
    assert value == 7 and not file.startswith(str(tmp_path)), "Ray has uploaded it"
    assert found == ["1", "2", "2"]
