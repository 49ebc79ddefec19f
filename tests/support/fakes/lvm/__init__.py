"""A stateful lvm2: groups, volumes, tags and devices in memory, spoken to in lvm2's own words.

What is not understood is an AssertionError: a command that the fake does not know must not pass.
tests/contract holds it to what the real one does.
"""

from fakes.lvm.program import FakeLvm
from fakes.lvm.records import Failure, FakeDisk, FakeGroup, FakePool, FakeVolume

__all__ = ["Failure", "FakeDisk", "FakeGroup", "FakeLvm", "FakePool", "FakeVolume"]
