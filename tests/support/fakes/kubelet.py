"""Kubelet, as a plugin sees it: it finds sockets, asks who is there, and says what became of it.

After kubernetes/pkg/kubelet/pluginmanager and pkg/volume/csi: names that begin with a dot are
passed over, a socket is asked once for each time that it appears, GetInfo has one second and is
tried again where that was not enough, and a refused plugin is not asked again before its socket
appears anew.
"""

import errno
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from agent.csi.client import Client
from mount import loop
from mount.kernel import Kernel
from proto import csi_pb2 as csi
from proto import pluginregistration_pb2 as wire
from proto import pluginregistration_pb2_grpc


@contextmanager
def asked(socket: Path) -> Iterator[pluginregistration_pb2_grpc.RegistrationStub]:
    """The registration service behind a socket."""
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        yield pluginregistration_pb2_grpc.RegistrationStub(channel)


class FakeKubelet:
    """One run of kubelet. What it has registered is lost with it, as is the real one's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        # The endpoint and the node of each driver; the reason that it refuses all of them for.
        self.drivers: dict[str, tuple[Path, csi.NodeGetInfoResponse]] = {}
        self.refusal = ""
        self.asked: list[Path] = []
        self._seen: dict[Path, tuple[int, int]] = {}
        self._names: dict[Path, str] = {}

    def look(self) -> list[str]:
        """Take up what appeared in the directory and drop what went; the drivers that are left."""
        every = {path: _socket(path) for path in sorted(self.directory.iterdir())}
        there = {path: one for path, one in every.items() if one is not None}
        for path in [path for path, one in self._seen.items() if there.get(path) != one]:
            del self._seen[path]
            self.drivers.pop(self._names.pop(path, ""), None)
        for path, one in there.items():
            if path not in self._seen:
                self._seen[path] = one
                try:
                    self._register(path)
                except grpc.RpcError as error:
                    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                        del self._seen[path]
                    elif _socket(path) == one:
                        raise
        return sorted(self.drivers)

    def _register(self, path: Path) -> None:
        self.asked.append(path)
        with asked(path) as plugin:
            info = plugin.GetInfo(wire.InfoRequest(), timeout=1, wait_for_ready=True)
            problem = self.refusal or self._take(path, info)
            status = wire.RegistrationStatus(plugin_registered=not problem, error=problem)
            plugin.NotifyRegistrationStatus(status, timeout=20)

    def _take(self, path: Path, info: wire.PluginInfo) -> str:
        if info.type != "CSIPlugin":
            return f"no handler for {info.type}"
        if not any(version.split(".")[0] in ("0", "1") for version in info.supported_versions):
            return f"none of the versions {info.supported_versions} is supported"
        endpoint = Path(info.endpoint)
        with Client(endpoint) as client:
            node = client.node.NodeGetInfo(csi.NodeGetInfoRequest(), timeout=120)
        self._names[path] = info.name
        self.drivers[info.name] = (endpoint, node)
        return ""


def hold(kernel: Kernel, device: Path) -> str:
    """The loop device that kubelet keeps over what is published, so that it does not go away.

    As losetup(8) has it for kubelet/pkg/volume/util/volumepathhandler: read-only where the device
    is, and called by its path.
    """
    path, read_only = str(device), kernel.device_is_read_only(str(device))
    while True:
        free = kernel.loop_free()
        try:
            kernel.loop_configure(free, path, read_only=read_only, direct_io=False, name=path)
        except OSError as error:
            if error.errno != errno.EBUSY:  # someone else was given the same number
                raise
        else:
            return free


@dataclass
class Mapped:
    """A raw block volume in a pod: the published node, bound once more, and held there."""

    kernel: Kernel
    published: Path
    own: Path

    def __enter__(self) -> str:
        self.own.touch()
        self.kernel.bind(str(self.published), str(self.own), set())
        self._loop = hold(self.kernel, self.own)
        return self._loop

    def __exit__(self, *_: object) -> None:
        loop.detach(self.kernel, self._loop)
        self.kernel.unmount(str(self.own))
        self.own.unlink()


def _socket(path: Path) -> tuple[int, int] | None:
    """Which socket is there now; None for what is none, or has gone since it was listed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if path.name.startswith(".") or not stat.S_ISSOCK(found.st_mode):
        return None
    # A new socket may have the number of the old one, but not its time.
    return found.st_ino, found.st_ctime_ns
