"""A clock under the control of a test."""


class Clock:
    """Returns `now_s` when it is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
