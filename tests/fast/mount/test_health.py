"""Whether a problem of a file system is over once it is mounted anew: each kind says so itself."""

from collections.abc import Iterator

import pytest

from mount import filesystem_health
from mount.filesystem_health import Kind, Problem


@pytest.mark.parametrize("kinds", [(), *((one,) for one in Kind), tuple(Kind)], ids=str)
def test_a_file_system_is_mounted_anew_for_what_that_mends_and_for_nothing_else(
    kinds: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(*_where: object) -> Iterator[Problem]:
        return (Problem(one, "it is not well") for one in kinds)

    monkeypatch.setattr(filesystem_health, "problems", problems)
    is_over = filesystem_health.is_over_when_mounted_anew(None, None, None)  # type: ignore[arg-type]
    assert is_over == any(one.is_mended_by_mount for one in kinds)


def test_a_new_mount_does_not_mend_a_medium() -> None:
    assert [one for one in Kind if not one.is_mended_by_mount] == [Kind.MEDIUM_ERRORS]
