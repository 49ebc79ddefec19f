"""How a machine of the lab is run: what starts, stops and ends it, by its name."""

from abc import ABC, abstractmethod

from vagrant.lab_host import domain_state, virsh


class GuestError(Exception):
    """The guest did not do what was asked of it."""


class Power(ABC):
    """What runs one machine. Each method raises GuestError where it does not come about."""

    def __init__(self, name: str) -> None:
        """Name the machine."""
        self.name = name

    @abstractmethod
    def address(self) -> str | None:
        """Return the address that the machine has; None where it has none yet."""

    @abstractmethod
    def state(self) -> str:
        """Return `running`, `paused`, `shut off` or another of virsh(1), domstate.

        Empty without a machine of the name.
        """

    @abstractmethod
    def start(self) -> None:
        """Start a machine that is off."""

    @abstractmethod
    def cut(self) -> None:
        """End a machine that runs, which writes nothing out."""

    @abstractmethod
    def start_again(self) -> None:
        """Start a machine anew that hangs."""

    @abstractmethod
    def pause(self) -> None:
        """Stop the machine's processors; its memory stays as it is."""

    @abstractmethod
    def resume(self) -> None:
        """Let the machine's processors go on."""


class ByLibvirt(Power):
    """A machine of libvirt's: by hardware virtualization, or emulated by qemu."""

    def address(self) -> str | None:
        """Ask libvirt which address the guest was given."""
        for line in virsh("domifaddr", self.name).stdout.splitlines():
            fields = line.split()
            if len(fields) == 4 and fields[2] == "ipv4":
                return fields[3].partition("/")[0]
        return None

    def state(self) -> str:
        """What libvirt calls the machine's state."""
        return domain_state(self.name)

    def start(self) -> None:
        """Start a machine that is off."""
        self._do("start")

    def cut(self) -> None:
        """End a machine, gracefully towards qemu only.

        Killed, qemu could lose its own bookkeeping of the disk image.
        """
        self._do("destroy", "--graceful")

    def start_again(self) -> None:
        """Start a machine anew that hangs."""
        virsh("reset", self.name)

    def pause(self) -> None:
        """Stop the machine's processors."""
        self._do("suspend")

    def resume(self) -> None:
        """Let the machine's processors go on."""
        self._do("resume")

    def _do(self, *words: str) -> None:
        done = virsh(*words, self.name)
        if done.returncode != 0:
            raise GuestError(f"virsh {' '.join(words)} {self.name}: {done.stderr.strip()}")
