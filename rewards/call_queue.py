"""Calls cut into pieces, waiting to be merged into batches: no clock, no threads, no loop."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from rewards.records import FailureKind, RewardCall, RewardFailure, RewardValues

Answer = RewardValues | RewardFailure


class AnswerFuture(Protocol):
    """Where a caller waits: the part of asyncio.Future that is used here."""

    def done(self) -> bool: ...
    def set_result(self, result: Answer, /) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class OpenCall:
    """A submitted call that has no answer yet."""

    call: RewardCall
    answer: AnswerFuture
    parts: list[RewardValues | None]
    """[pieces]; filled as they are computed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Piece:
    """At most max_batch images of one call; what batches are made of."""

    owner: OpenCall
    index: int
    call: RewardCall
    submitted_s: float
    """On the caller's monotonic clock."""


class CallQueue:
    """First in, first out; a batch is whole pieces that fit in max_batch and share H and W.

    Invariant: a piece in the queue belongs to a call without an answer.
    """

    def __init__(self, max_batch: int) -> None:
        assert max_batch >= 1
        self._max_batch = max_batch
        self._pieces: deque[Piece] = deque()

    @property
    def num_images(self) -> int:
        """Images waiting."""
        return sum(piece.call.num_images for piece in self._pieces)

    @property
    def oldest_s(self) -> float | None:
        """When the head was submitted; None when nothing waits."""
        return self._pieces[0].submitted_s if self._pieces else None

    def put(self, call: RewardCall, answer: AnswerFuture, now_s: float) -> OpenCall:
        """Append a call, cut into pieces of max_batch images (the last may hold fewer)."""
        firsts = range(0, call.num_images, self._max_batch)
        owner = OpenCall(call=call, answer=answer, parts=[None] * len(firsts))
        for index, first in enumerate(firsts):
            part = call.part(first, first + self._max_batch)
            self._pieces.append(Piece(owner=owner, index=index, call=part, submitted_s=now_s))
        return owner

    def discard(self, owner: OpenCall) -> None:
        """Forget what waits of a call: its caller is gone, or another of its pieces has failed."""
        if any(piece.owner is owner for piece in self._pieces):
            self._pieces = deque(piece for piece in self._pieces if piece.owner is not owner)

    def head(self) -> tuple[int, bool]:
        """Pieces that make the next batch, and whether it can grow no further (it is full)."""
        num_images = 0
        for index, piece in enumerate(self._pieces):
            num_images += piece.call.num_images
            same_size = piece.call.images.shape[1:] == self._pieces[0].call.images.shape[1:]
            if num_images > self._max_batch or not same_size:
                return index, True
            if num_images == self._max_batch:
                return index + 1, True
        return len(self._pieces), False

    def take(self, *, alone: bool = False) -> list[Piece]:
        """Remove the next batch, or only its first piece."""
        num_pieces = self.head()[0]
        return [self._pieces.popleft() for _ in range(min(num_pieces, 1) if alone else num_pieces)]


def settle(piece: Piece, answer: Answer, reward: str) -> RewardFailure | None:
    """Note a piece's result. The last values, put together in order, or a failure, answer the call.

    Returns the failure when this piece made the call fail.
    """
    owner = piece.owner
    if owner.answer.done():
        return None
    if isinstance(answer, RewardValues):
        owner.parts[piece.index] = answer
        parts = [part for part in owner.parts if part is not None]
        if len(parts) < len(owner.parts):
            return None
        try:
            owner.answer.set_result(RewardValues.join(parts))
            return None
        except ValueError as error:
            answer = RewardFailure(
                kind=FailureKind.WRONG_TYPE,
                reward=reward,
                message=str(error),
                num_images=owner.call.num_images,
            )
    failure = replace(answer, num_images=owner.call.num_images)
    owner.answer.set_result(failure)
    return failure
