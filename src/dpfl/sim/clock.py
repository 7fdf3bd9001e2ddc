"""How long the stages of a round take."""

import time


class Clock:
    """Seconds of the stages of a round, one after the other.

    A stage lasts from the end of the one before it. Seconds are kept apart from the record of a
    round: they differ from run to run, the record does not.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """End a stage, and begin the next one."""
        now = time.perf_counter()
        self.laps[stage], self._since = now - self._since, now
