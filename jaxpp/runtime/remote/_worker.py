"""The worker process: a site that Ray starts. Ray makes an actor of this class."""

from typing import NoReturn

from jaxpp.runtime.remote._start import Setup, start_ranks
from jaxpp.runtime.site import LANES as SITE_LANES
from jaxpp.runtime.site import Hello, Process, lane
from jaxpp.runtime.transport import free_port

#: The threads of each lane, which is a concurrency group of the actor.
LANES = {**SITE_LANES, "life": 1}


class Worker(Process):
    """A worker process: its ranks, whose failure is one."""

    def free_port(self, host: str) -> int:
        """Finds a port that is free here; `host` is this host's own address."""
        return free_port(host)

    def start(self, setup: Setup) -> Hello:
        """Starts JAX and the connections of the ranks; describes the process."""
        import ray

        transport, hello = start_ranks(setup)
        self.have(transport, ray.get)
        return hello

    @lane("life")
    def live(self) -> NoReturn:
        """Raises the failure once the process has failed; Ray ends the call when it has died."""
        self.wait_for_failure()

    @lane("control")
    def pulse(self) -> None:
        """Answers a heartbeat."""
