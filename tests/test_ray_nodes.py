"""A Ray cluster that loses a node, only with `-m ray` (`make test-ray`) and where Ray is installed: two nodes on this machine.

Negative controls are the tests with `control` in their names.
"""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from executing import close, reference, whole
from mortal import build, builder
from test_ray import gone

from diffrl.executors import run
from diffrl.ray_backend import ray_actors

PLACE = {"resources": {"worker": 1}}
MEMORY = 80 * 2**20


@pytest.fixture
def cluster():
    """(cluster, its one node of workers); the head, where the run itself is, takes none."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folders = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": MEMORY})
    node = found.add_node(num_cpus=1, resources={"worker": 8}, object_store_memory=MEMORY)
    ray.init(
        address=found.address,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}},
    )
    yield found, node
    ray.shutdown()
    found.shutdown()


def large():
    return torch.ones(10**6)


def another(cluster):
    return cluster.add_node(num_cpus=1, resources={"worker": 8}, object_store_memory=MEMORY)


@pytest.mark.ray
def test_a_run_goes_on_when_the_node_of_all_its_actors_is_lost(cluster, tmp_path):
    """Between two steps; generator, reward and trainer come back on the node that is left."""
    import ray

    found, node = cluster
    stages, backend = build(tmp_path), ray_actors(build=builder(tmp_path), options=PLACE)
    running = run(whole(5, fragments=3, pack=4), stages, steps=2, backend=backend, timeout=120.0)
    next(running)
    before = set(backend.actors.values())
    another(found)
    found.remove_node(node, allow_graceful=False)
    assert all(gone(ray, actor) for actor in before)  # a process may outlive its node for a moment
    next(running)
    assert not before & set(backend.actors.values())  # each was replaced
    running.close()
    assert close(stages.model.params, reference("art"))


@pytest.mark.ray
def test_a_node_that_is_lost_in_the_middle_of_a_step_costs_nothing(cluster, tmp_path):
    """While a reward is scored for long: what is in flight fails, is done again elsewhere, and counts once."""
    found, node = cluster
    stages, backend = build(tmp_path), ray_actors(build=builder(tmp_path), options=PLACE)
    running = run(whole(5, fragments=3, pack=4), stages, steps=2, backend=backend, timeout=120.0, retries=4)
    next(running)
    another(found)
    (tmp_path / "score").write_text("hang")

    def lose():
        while (tmp_path / "score").exists():
            time.sleep(0.05)
        found.remove_node(node, allow_graceful=False)

    losing = threading.Thread(target=lose)
    losing.start()
    next(running)
    losing.join()
    running.close()
    assert close(stages.model.params, reference("art"))


@pytest.mark.ray
def test_control_what_lay_on_a_lost_node_alone_is_lost(cluster):
    """A result too large to travel with its answer: the node that is removed above takes such things with it."""
    import ray

    found, node = cluster
    made = ray.remote(large).options(num_cpus=0, max_retries=0, **PLACE).remote()
    ray.wait([made], timeout=60, fetch_local=False)
    found.remove_node(node, allow_graceful=False)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(made, timeout=60)
