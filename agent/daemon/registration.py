"""Registration of Carver with kubelet, by a socket in kubelet's directory for plugins.

Kubelet is the client of that socket (kubernetes/pkg/kubelet/pluginmanager):

1. Kubelet watches the directory for sockets, and also finds sockets that exist when it starts.
2. Kubelet calls GetInfo at each socket, then NodeGetInfo at the endpoint that GetInfo returned.
3. Kubelet reports the outcome by NotifyRegistrationStatus: registered or refused.
4. When the socket is removed, kubelet unregisters the plugin.

So Carver only has to keep its socket in the directory.

The name of the socket contains part of the boot's id. After a power cut kubelet finds the socket of
the previous boot, which no process serves, and retries that socket with an exponential backoff of
up to two minutes. Kubelet counts the backoff by the socket's name
(kubernetes/pkg/util/goroutinemap/exponentialbackoff), so a socket with a new name is tried at once.
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
from agent.daemon.grpc_servers import stop_server
from agent.settings.settings import DRIVER_NAME
from agent.work.background import PeriodicTask
from proto import pluginregistration_pb2 as kubelet
from proto import pluginregistration_pb2_grpc

_log = logging.getLogger(__name__)

# Versions of kubelet's plugin interface that Carver supports; these are not versions of CSI.
# Kubelet accepts 1.x and 0.x, and refuses a driver that registers again with a lower version than
# before. So the version never changes.
_SUPPORTED_VERSIONS = ("1.0.0",)
# Number of threads that serve the registration socket. Kubelet waits only one second for GetInfo,
# so the RPCs of registration do not queue behind those of CSI.
_THREADS = 2
# Longest time, in seconds, before registration is retried after kubelet refused the driver.
_LONGEST_RETRY_SECONDS = 300.0


class State(StrEnum):
    """State of the registration with kubelet."""

    # Kubelet's directory for plugins does not exist, or a sidecar is to register Carver.
    OFF = "off"
    # Another process, such as a node-driver-registrar, serves a registration socket for Carver.
    FOREIGN = "taken"
    # Carver serves the registration socket; kubelet has not yet reported an outcome.
    WAITING = "waiting"
    REGISTERED = "registered"
    REFUSED = "refused"


class Registration(pluginregistration_pb2_grpc.RegistrationServicer):
    """Keeps Carver registered with kubelet from `start` to `stop`, across kubelet's restarts."""

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
        # Path of the registration socket. Only three digits of the boot's id are in the name, so
        # the path is no longer than the path with `-reg`: a path with a long driver name may
        # already have 107 bytes, the maximum for a socket.
        self.socket = directory / f"{driver_name}-{boot.boot_id()[:3]}.sock"
        # Path of the registration socket that node-driver-registrar and Carver 0.2 use.
        self._plain = directory / f"{driver_name}-reg.sock"
        self._interval = interval_seconds
        self._first_retry = self._retry = retry_seconds
        self._retry_at: float | None = None
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor
        self._inode: tuple[int, int] | None = None
        # Lock for `state`: kubelet may report an outcome before `_serve` has set the state WAITING.
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
        """Start to serve the registration socket as soon as kubelet's directory exists."""
        self._task.start()

    def stop(self) -> None:
        """Remove the registration socket: kubelet unregisters Carver, and sends no more calls."""
        self._task.stop()
        self._task.join()
        self._end()

    def check(self) -> None:
        """Raise NotReady unless Carver is registered, or another process is to register Carver."""
        if self.state not in (State.REGISTERED, State.FOREIGN):
            raise errors.NotReady(
                f"kubelet has not registered {self._name} ({self.state.value}, at {self.socket}):"
                " is kubelet's root directory another, or does kubelet not run? See"
                " docs/troubleshooting.md"
            )

    def GetInfo(  # noqa: N802
        self, request: kubelet.InfoRequest, context: grpc.ServicerContext
    ) -> kubelet.PluginInfo:
        """Return the driver's name and CSI endpoint to kubelet."""
        return kubelet.PluginInfo(
            type="CSIPlugin",
            name=self._name,
            endpoint=str(self._endpoint),
            supported_versions=_SUPPORTED_VERSIONS,
        )

    def NotifyRegistrationStatus(  # noqa: N802
        self, request: kubelet.RegistrationStatus, context: grpc.ServicerContext
    ) -> kubelet.RegistrationStatusResponse:
        """Record whether kubelet registered or refused Carver; after a refusal plan a retry."""
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
        # After a refusal make the socket anew, because kubelet registers new sockets only.
        is_due = self._retry_at is not None and time.monotonic() >= self._retry_at
        if self._is_own_socket() and not is_due:
            return
        self._end()
        if not self._directory.is_dir():
            self.state = State.OFF
        elif foreign_socket := next(filter(_is_taken, (self._plain, self.socket)), None):
            # Leave registration to the other process: two processes would replace each other's
            # socket for ever.
            self.state = State.FOREIGN
            # Log the other process once, however long it serves the socket.
            if not self._is_logged:
                _log.warning("%s is another process's; registration is left to it", foreign_socket)
            self._is_logged = True
        else:
            self._remove_stale()
            self._serve()

    def _remove_stale(self) -> None:
        """Remove registration sockets that processes of earlier boots left.

        Kubelet has registered nothing at such a socket since this boot began. A stale socket of
        this boot stays: kubelet would take the removal of that socket for the removal of the
        driver, and so unregister the driver that the new socket has registered.
        """
        boot_time_seconds = time.time() - boot.uptime_seconds()
        paths = self._directory.glob(f"{self._name}-{'[0-9a-f]' * 3}.sock")
        for path in filter(sockets.is_stale, (*paths, self._plain)):
            # A socket with `-reg` in its name has no id of a boot: go by the time of its creation.
            is_old = (
                path.lstat().st_ctime < boot_time_seconds
                if path == self._plain
                else path != self.socket
            )
            if is_old:
                path.unlink(missing_ok=True)

    def _serve(self) -> None:
        """Serve registration on a new socket, which only root can open.

        1. Create the socket under a hidden name, and listen. Kubelet skips names that begin with a
           dot.
        2. Rename the socket to its final name, in place of a stale socket. To kubelet a renamed
           socket is a new one.
        """
        hidden = self.socket.with_name(f".{self.socket.name}")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="registration")
        server = self._server = grpc.server(self._threads)
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self, server)
        server.add_insecure_port(f"unix://{hidden}")
        # Restrict the mode by chmod(2): a umask would also apply to files that other threads
        # create.
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
        if self._is_own_socket():
            self.socket.unlink(missing_ok=True)
        stop_server(self._server, self._threads, self._interval)
        self._server = self._inode = None
        self.state = State.OFF

    def _is_own_socket(self) -> bool:
        """Whether the socket in kubelet's directory is the socket that this object serves."""
        return self._inode is not None and sockets.inode(self.socket) == self._inode


def _is_taken(path: Path) -> bool:
    """Whether a path exists and is not a stale socket, which no process serves."""
    return os.path.lexists(path) and not sockets.is_stale(path)
