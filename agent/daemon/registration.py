"""Registration with kubelet: the socket that kubelet finds Carver by, and what it answered.

Kubelet is the client. It watches a directory for sockets, also for those that exist when it starts,
calls GetInfo at each, then NodeGetInfo at the endpoint that GetInfo gives, and reports the outcome
with NotifyRegistrationStatus. A socket that is removed is a plugin that is removed
(kubernetes/pkg/kubelet/pluginmanager). So Carver only has to keep the socket there.

Its name has the boot's id. After a power cut kubelet finds the socket of the boot before, which no
process serves, and asks there again ever more rarely, in the end each two minutes; it counts that
by the name (kubernetes/pkg/util/goroutinemap/exponentialbackoff).
"""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import grpc

from agent.core import boot, errors, sockets
from agent.settings.settings import DRIVER_NAME
from agent.work.background import PeriodicTask
from proto import pluginregistration_pb2 as kubelet
from proto import pluginregistration_pb2_grpc

_log = logging.getLogger(__name__)

# Not CSI's version, but that of kubelet's contract with CSI drivers: it knows 1.x and 0.x, and
# refuses a driver that comes back with a lower one. A constant is never lower.
_SUPPORTED_VERSIONS = ("1.0.0",)
# Kubelet waits one second for GetInfo, so these calls do not queue behind those of CSI.
_THREADS = 2
_LONGEST_RETRY_SECONDS = 300.0


class State(StrEnum):
    """How far the registration is."""

    # There is no directory of kubelet's on this node, or registration is left to a sidecar.
    OFF = "off"
    # Another process, such as a node-driver-registrar, serves the socket.
    TAKEN = "taken"
    # The socket is served under its name; kubelet has not answered yet.
    WAITING = "waiting"
    REGISTERED = "registered"
    REFUSED = "refused"


class Registration(pluginregistration_pb2_grpc.RegistrationServicer):
    """Keeps Carver registered from `start` to `stop`, across restarts of kubelet."""

    def __init__(
        self,
        directory: Path,
        endpoint: Path,
        *,
        driver_name: str = DRIVER_NAME,
        interval_seconds: float = 1.0,
        retry_seconds: float = 10.0,
    ) -> None:
        self.state = State.OFF
        self._directory = directory
        self._endpoint = endpoint
        self._name = driver_name
        # No longer than the plain name, since the driver's may leave no more of sockets' 107 bytes.
        self.socket = directory / f"{driver_name}-{boot.identity()[:3]}.sock"
        # The name that other registrars use, and Carver 0.2.
        self._plain = directory / f"{driver_name}-reg.sock"
        self._interval = interval_seconds
        self._first_retry = self._retry = retry_seconds
        self._retry_at: float | None = None
        self._server: grpc.Server | None = None
        self._inode: tuple[int, int] | None = None
        # Kubelet may answer before `_serve` has set the state to WAITING.
        self._answering = threading.Lock()
        self._is_logged = False
        self._task = PeriodicTask(
            "registration",
            self._ensure_served,
            interval_seconds,
            "cannot make the registration socket: %s",
            retry_seconds=retry_seconds,
        )

    def start(self) -> None:
        """Serve the socket where kubelet has its directory, and as soon as it has one."""
        self._task.start()

    def stop(self) -> None:
        """Remove the socket: kubelet sends no more calls."""
        self._task.stop()
        self._task.join()
        self._end()

    def check(self) -> None:
        """Raise NotReady unless kubelet has registered Carver, or another registrar serves it."""
        if self.state not in (State.REGISTERED, State.TAKEN):
            raise errors.NotReady(
                f"kubelet has not registered {self._name} ({self.state.value}, at {self.socket}):"
                " is kubelet's root directory another, or does kubelet not run? See"
                " docs/troubleshooting.md"
            )

    def GetInfo(  # noqa: N802
        self, request: kubelet.InfoRequest, context: grpc.ServicerContext
    ) -> kubelet.PluginInfo:
        """Return the driver's name and its CSI endpoint."""
        return kubelet.PluginInfo(
            type="CSIPlugin",
            name=self._name,
            endpoint=str(self._endpoint),
            supported_versions=_SUPPORTED_VERSIONS,
        )

    def NotifyRegistrationStatus(  # noqa: N802
        self, request: kubelet.RegistrationStatus, context: grpc.ServicerContext
    ) -> kubelet.RegistrationStatusResponse:
        """Take kubelet's answer: registered or refused."""
        with self._answering:
            if request.plugin_registered:
                self._retry_at, self._retry = None, self._first_retry
                self.state = State.REGISTERED
                _log.info("kubelet has registered %s", self._name)
            else:
                self._retry_at = time.monotonic() + self._retry
                self.state = State.REFUSED
                refusal = "kubelet has refused %s: %s; again in %.0f s"
                _log.error(refusal, self._name, request.error, self._retry)
                self._retry = min(self._retry * 2, _LONGEST_RETRY_SECONDS)
        return kubelet.RegistrationStatusResponse()

    def _ensure_served(self) -> None:
        # After a refusal: kubelet asks new sockets only.
        is_due = self._retry_at is not None and time.monotonic() >= self._retry_at
        if self._is_ours() and not is_due:
            return
        self._end()
        if not self._directory.is_dir():
            self.state = State.OFF
        elif taken := next(filter(_is_taken, (self._plain, self.socket)), None):
            # Two registrars would take the socket from each other for ever.
            self.state = State.TAKEN
            # Logged once, however long it lasts.
            if not self._is_logged:
                _log.warning("%s is another process's; registration is left to it", taken)
            self._is_logged = True
        else:
            self._remove_stale()
            self._serve()

    def _remove_stale(self) -> None:
        """Remove the sockets of earlier boots, at which kubelet has registered nothing since.

        One of this boot stays: kubelet would take its removal for Carver's, which has the same
        driver's name.
        """
        since = time.time() - boot.seconds()
        every = self._directory.glob(f"{self._name}-{'[0-9a-f]' * 3}.sock")
        for one in filter(sockets.is_stale, (*every, self._plain)):
            # The plain name says nothing about the boot.
            is_old = one.lstat().st_ctime < since if one == self._plain else one != self.socket
            if is_old:
                one.unlink(missing_ok=True)

    def _serve(self) -> None:
        """Put a listening socket, for root only, in place of a stale one by a rename.

        Kubelet skips names that begin with a dot, and takes a renamed socket as a new one.
        """
        hidden = self.socket.with_name(f".{self.socket.name}")
        workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="registration")
        server = self._server = grpc.server(workers)
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self, server)
        server.add_insecure_port(f"unix://{hidden}")
        # The umask is the whole process's, and other threads make files meanwhile.
        hidden.chmod(0o600)
        server.start()
        self._inode = sockets.inode(hidden)
        self._retry_at = None
        with self._answering:
            hidden.rename(self.socket)
            self.state = State.WAITING
        self._is_logged = False
        _log.info("waiting for kubelet at %s", self.socket)

    def _end(self) -> None:
        if self._server is None:
            return
        if self._is_ours():
            self.socket.unlink(missing_ok=True)
        self._server.stop(self._interval).wait()
        self._server = self._inode = None
        self.state = State.OFF

    def _is_ours(self) -> bool:
        """Whether the socket in the directory is the one that is served here."""
        return self._inode is not None and sockets.inode(self.socket) == self._inode


def _is_taken(path: Path) -> bool:
    """Whether a path is there, and is no socket that a process left."""
    return os.path.lexists(path) and not sockets.is_stale(path)
