"""A clock that a test sets."""


class Clock:
    """Returns `now_s` when it is called.

    Args:
        now_s: Seconds at first.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
