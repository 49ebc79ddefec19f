"""Text of messages to people, such as a number with its noun."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 disk" or "2 disks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
