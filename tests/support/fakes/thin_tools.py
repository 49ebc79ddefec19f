"""thin_dump and thin_delta of thin-provisioning-tools 0.9, on the pools in memory.

They see what a pool's metadata snapshot has, and nothing that came after it.
"""

from collections.abc import Iterator, Mapping, Sequence

from fakes.devices import BLOCK_BYTES
from fakes.lvm import FakeLvm, FakePool

from mount.command import Result

_Blocks = Mapping[int, bytes]


def run(words: Sequence[str], fake: FakeLvm) -> Result:
    """What a program that is given a pool's metadata prints."""
    program, reserved, *options, separator, path = words
    assert (reserved, separator) == ("--metadata-snap", "--"), words
    [pool] = [
        one
        for group in fake.groups.values()
        for one in group.volumes.values()
        if isinstance(one, FakePool) and path == f"/dev/mapper/{group.name}-{one.name}_tmeta"
    ]
    if pool.held is None:
        return Result(1, "", "no current metadata snap")
    sectors = pool.chunk_size_bytes // 512
    print_one = {"thin_dump": _dump, "thin_delta": _delta}[program]
    try:
        lines = "\n".join(print_one(options, pool.held, pool.chunk_size_bytes // BLOCK_BYTES))
    except KeyError as error:
        return Result(1, "", f"Unable to find mapping tree for snap1 ({error})")
    head = f'<superblock uuid="" time="0" transaction="1" data_block_size="{sectors}">'
    return Result(0, f"{head}\n{lines}\n</superblock>\n", "")


def _dump(options: Sequence[str], held: Mapping[int, _Blocks], blocks: int) -> Iterator[str]:
    flag, number = options
    assert flag == "--dev-id", options
    if int(number) not in held:
        return
    yield f'<device dev_id="{number}">'
    for chunk in sorted(_chunks(held[int(number)], blocks)):
        yield f'<single_mapping origin_block="{chunk}" data_block="{chunk}" time="0"/>'
    yield "</device>"


def _delta(options: Sequence[str], held: Mapping[int, _Blocks], blocks: int) -> Iterator[str]:
    first, left, second, right = options
    assert (first, second) == ("--snap1", "--snap2"), options
    one, other = _chunks(held[int(left)], blocks), _chunks(held[int(right)], blocks)
    yield f'<diff left="{left}" right="{right}">'
    for chunk in sorted(one.keys() | other.keys()):
        # The same block of the pool for as long as nobody wrote there.
        kind = "same" if one.get(chunk) == other.get(chunk) else "different"
        kind = "right_only" if chunk not in one else "left_only" if chunk not in other else kind
        yield f'<{kind} begin="{chunk}" length="1"/>'
    yield "</diff>"


def _chunks(written: _Blocks, blocks: int) -> dict[int, set[tuple[int, int]]]:
    """The chunks of a volume that something was ever written to, and what tells them apart."""
    found: dict[int, set[tuple[int, int]]] = {}
    for number, data in written.items():
        found.setdefault(number // blocks, set()).add((number, id(data)))
    return found
