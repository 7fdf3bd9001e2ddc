"""Answers that are worked out once."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class Memory:
    """Asks the same question once, and remembers the answer."""

    @cached_property
    def _answers(self) -> dict[object, Any]:
        return {}

    def once(self, key: object, ask: Callable[..., Answer], *question: object) -> Answer:
        """What ``ask`` answers, now or when it was asked under this key before."""
        if key not in self._answers:
            self._answers[key] = ask(*question)
        answer: Answer = self._answers[key]
        return answer
