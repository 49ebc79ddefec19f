"""Real callers' calls, made again in their order, with the work that kubelet does around them.

A call that was recorded as having met another on its volume is made beside that one again: it is
started, and while it is at work the other one is made.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from callers.directories import Directories
from callers.plugin import METHODS, Answer, Plugin
from callers.recording import Recorded, Translation
from callers.rules import Reaction
from real.any import AnyHost

from agent.csi.client import block
from mount.command import Result
from proto import csi_pb2 as csi

# How long to wait for a call to be at work before the one is made that it shall meet. What comes of
# the two does not depend on it.
_BEGUN_SECONDS = 0.3
_REPEATS = 100


class Replay:
    """Calls on one node; `met` are the answers to those that met another."""

    def __init__(
        self,
        plugin: Plugin,
        host: AnyHost,
        directories: Directories,
        recorded_node: str,
        node: str,
    ) -> None:
        self._plugin = plugin
        self._host = host
        self._directories = directories
        self._to = Translation(recorded_node, node, directories.kubelet, {})
        self._waiting: defaultdict[str, list[Recorded]] = defaultdict(list)
        self._beside: defaultdict[str, list[Future[Answer]]] = defaultdict(list)
        self.met: list[Answer] = []

    def run(self, calls: Sequence[Recorded]) -> list[tuple[Recorded, Answer]]:
        """Make them all, and take away what is left in the end.

        Each call that met no other, and the last answer to it.
        """
        made = []
        with ThreadPoolExecutor(8) as beside:
            for one in calls:
                self._ensure_made(one)
                if one.overlapped:
                    self._waiting[one.volume].append(one)
                    continue
                self._join(one.volume)
                self._start(one, beside)
                made.append((one, self._make(one)))
            for volume in list(self._beside):
                self._join(volume)
        assert not any(self._waiting.values()), "a call met another that was not recorded"
        self._clean_up()
        return made

    def _ensure_made(self, call: Recorded) -> None:
        """What was made before the recording began."""
        if not call.volume or call.method == "CreateVolume" or call.volume in self._to.ids:
            return
        request = csi.CreateVolumeRequest(
            name=call.volume.removeprefix("vol-"),
            capacity_range=csi.CapacityRange(required_bytes=self._to.size_bytes(0)),
            volume_capabilities=[block(csi.VolumeCapability.AccessMode.SINGLE_NODE_MULTI_WRITER)],
        )
        answer = self._plugin.ask("CreateVolume", request)
        self._to.ids[call.volume] = answer.response.volume.volume_id

    def _start(self, call: Recorded, beside: ThreadPoolExecutor) -> None:
        """Start what is to meet this call, and have it at work before the call is made."""
        waiting = self._waiting.pop(call.volume, [])
        for one in waiting:
            if one.method == call.method:
                continue  # it was made until it met nothing: this is that time
            if one.method == "DeleteVolume" and call.method != "NodeUnstageVolume":
                # It was made again and again until the last mount was gone.
                self._waiting[call.volume].append(one)
                continue
            begun = Event()
            self._host.intercept = _telling(begun)
            made = beside.submit(self._ask, one)
            made.add_done_callback(_setting(begun))
            begun.wait(_BEGUN_SECONDS)
            self._beside[call.volume].append(made)

    def _make(self, call: Recorded) -> Answer:
        answer = self._ask(call)
        for _ in range(_REPEATS):
            if call.code != "OK" or answer.reaction is not Reaction.REPEATS:
                break
            self._join(call.volume)
            answer = self._ask(call)
        if answer.code == "OK" and call.method == "CreateVolume":
            self._to.ids[call.makes] = answer.response.volume.volume_id
        elif answer.code == "OK" and call.method == "CreateSnapshot":
            self._to.ids[call.makes] = answer.response.snapshot.snapshot_id
        return answer

    def _join(self, volume: str) -> None:
        self.met += [one.result() for one in self._beside.pop(volume, [])]

    def _ask(self, call: Recorded) -> Answer:
        request = self._to.request(call, METHODS[call.method][1])
        if call.method == "NodeStageVolume":
            self._directories.prepare(request.staging_target_path)
        elif call.method == "NodePublishVolume":
            self._directories.prepare(request.target_path.rpartition("/")[0])
        elif call.method == "NodeUnpublishVolume" and call.is_of_block:
            assert self._directories.release(request.target_path)
        answer = self._plugin.ask(call.method, request)
        if answer.code == "OK" and call.method == "NodePublishVolume" and call.is_of_block:
            self._directories.take(request.target_path)
        elif answer.code == "OK" and call.method == "NodeUnstageVolume":
            self._directories.remove(request.staging_target_path)
        return answer

    def _clean_up(self) -> None:
        self._host.intercept = lambda _words: None
        ids = self._to.ids.items()
        for snapshot in [one for name, one in ids if name.startswith("snap-")]:
            self._plugin.ask("DeleteSnapshot", csi.DeleteSnapshotRequest(snapshot_id=snapshot))
        for volume in [one for name, one in ids if name.startswith("vol-")]:
            self._plugin.ask("DeleteVolume", csi.DeleteVolumeRequest(volume_id=volume))


def _telling(begun: Event) -> Callable[[Sequence[str]], Result | None]:
    def intercept(_words: Sequence[str]) -> Result | None:
        begun.set()
        return None

    return intercept


def _setting(event: Event) -> Callable[[object], None]:
    return lambda _ended: event.set()
