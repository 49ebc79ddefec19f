"""Mount options: those that users may give, and where in the kernel each one belongs.

An option is an attribute of a mount (noexec), a flag of the superblock (lazytime), an option of the
file system's own (discard, commit=30), or the SELinux context of the whole file system (context=).
Only listed options are allowed. Left out on purpose are options that name a device or file, that
stop the node (errors=panic), or that make another kind of mount (bind, remount, propagation).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mount import mount_errors
from mount.filesystem import FILE_SYSTEMS, supported
from mount.kernel import ATIME, ATTRIBUTES

# Mount options that are flags of the superblock.
SUPERBLOCK = ("sync", "dirsync", "lazytime", "mand")

# Options for the kernel's defaults, each with its opposite. Such an option changes nothing, but
# contradicts its opposite.
_DEFAULTS = {
    "defaults": "",
    "rw": "ro",
    "suid": "nosuid",
    "dev": "nodev",
    "exec": "noexec",
    "diratime": "nodiratime",
    "symfollow": "nosymfollow",
    "async": "sync",
    "nolazytime": "lazytime",
}

# Pattern of any mount option but the SELinux context.
_WORD = re.compile(r"[a-z][a-z0-9_-]*(=[A-Za-z0-9_.:+-]+)?")

# Beginning of the option for the SELinux context.
CONTEXT = "context="
# SELinux context: user:role:type and, if the policy has levels, a range of levels, such as s0:c1,c2
# or s0-s0:c0.c1023.
_CATEGORIES = r"(?::c\d{1,4}(?:[.,]c\d{1,4})*)?"
_LEVEL = rf"s\d{{1,4}}{_CATEGORIES}"
_CONTEXT = re.compile(rf"([\w.-]+:[\w.-]+:[\w.-]+)(?::({_LEVEL})(?:-({_LEVEL}))?)?", re.ASCII)


@dataclass(frozen=True)
class Options:
    """Mount options, by the part of the kernel to which each option belongs.

    `data`, the file system's own options, keep the user's order; `context` is unquoted.
    """

    attributes: frozenset[str] = frozenset()
    superblock: frozenset[str] = frozenset()
    data: tuple[str, ...] = ()
    context: str = ""


def parse(flags: Sequence[str], fs_type: str | None = None) -> Options:
    """Parse CSI's mount_flags, each of which may have several options with commas between.

    A comma within double quotes does not separate options: kubelet quotes the context, as mount(8)
    requires, and its level may have commas (AddSELinuxMountOption in
    pkg/volume/util/selinux.go).

    `fs_type` is the file system whose own options are allowed; None allows those of every supported
    file system. Raises BadOption for unknown, contradictory or malformed options, and
    UnsupportedFileSystem.
    """
    words = tuple(dict.fromkeys(_checked(word) for flag in flags for word in _split(flag)))
    _refuse_contradictions(words)
    kinds = FILE_SYSTEMS.values() if fs_type is None else [supported(fs_type)]
    # Without options, return only after `supported` has refused an unsupported file system.
    if not words:
        return Options()
    allowed = {word for file_system in kinds for word in file_system.mount_options.split()}
    attributes, superblock, data, context = set(), set(), [], ""
    for word in words:
        if word.startswith(CONTEXT):
            context = word.removeprefix(CONTEXT)
        elif word in ATTRIBUTES:
            attributes.add(word)
        elif word in SUPERBLOCK:
            superblock.add(word)
        elif word in allowed or (word.partition("=")[0] + "=" in allowed and "=" in word):
            data.append(word)
        elif word not in _DEFAULTS:
            allowed_words = ", ".join((*ATTRIBUTES, *SUPERBLOCK, CONTEXT, *sorted(allowed)))
            reason = f"is not known or not allowed; allowed are {allowed_words}"
            raise mount_errors.BadOption(word, reason)
    return Options(frozenset(attributes), frozenset(superblock), tuple(data), context)


def is_same_context(context: str, other_context: str) -> bool:
    """Whether two SELinux contexts are equal, regardless of how their categories are written.

    The kernel prints c3,c1,c2 as c1.c3 (mls_sid_to_context in security/selinux/ss/mls.c). An alias
    of a type is not recognized, as only the policy has it.
    """
    return _meaning(context) == _meaning(other_context)


def _meaning(context: str) -> tuple[object, ...]:
    match = _CONTEXT.fullmatch(context)
    if match is None:
        return (context,)
    who, low, high = match.groups()
    return (who, _level(low), _level(high or low))


def _level(text: str | None) -> tuple[str, frozenset[int]] | None:
    if text is None:
        return None
    sensitivity, _, categories = text.partition(":")
    members: set[int] = set()
    for part in filter(None, categories.split(",")):
        numbers = [int(word.removeprefix("c")) for word in part.split(".")]
        members.update(range(numbers[0], numbers[-1] + 1))
    return sensitivity, frozenset(members)


def _split(flag: str) -> list[str]:
    words, quoted = [""], False
    for character in flag:
        quoted ^= character == '"'
        if character == "," and not quoted:
            words.append("")
        else:
            words[-1] += character
    return words


def _checked(word: str) -> str:
    if word.startswith(CONTEXT):
        context = word.removeprefix(CONTEXT)
        if len(context) > 1 and context[0] == context[-1] == '"':
            context = context[1:-1]
        if not _CONTEXT.fullmatch(context):
            raise mount_errors.BadOption(word, 'is not of the form context="user:role:type:level"')
        return CONTEXT + context
    if not _WORD.fullmatch(word):
        raise mount_errors.BadOption(word, "is not of the form name or name=value")
    return word


def _refuse_contradictions(words: Sequence[str]) -> None:
    for word in words:
        if (opposite := _DEFAULTS.get(word)) in words:
            raise mount_errors.BadOption(word, f"contradicts {opposite}; give one of them")
    atime = [word for word in words if word in ATIME]
    if len(atime) > 1:
        raise mount_errors.BadOption(atime[0], f"contradicts {atime[1]}; give one of them")
    word_of_stem: dict[str, str] = {}
    for word in words:
        # Refuse options of one stem: `discard` and `nodiscard`, or `commit=5` and `commit=10`.
        name = word.partition("=")[0]
        stem = name.removeprefix("no") if name not in ATTRIBUTES else name
        if stem in word_of_stem:
            raise mount_errors.BadOption(
                word, f"contradicts {word_of_stem[stem]}; give one of them"
            )
        word_of_stem[stem] = word
