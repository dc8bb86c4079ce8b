"""One daemon thread that runs functions in order and can be abandoned when one of them hangs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class ComputeThread(Generic[Result]):
    """Like ThreadPoolExecutor(1), but a hung thread does not keep the process from ending.

    A Python thread can't be killed. `close` tells it to end after the function that it runs, so a
    hung one ends whenever that function returns, and holds its memory until then.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Result], Callable[[], Result]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Run the function after those submitted before; its exception travels in the future."""
        future: Future[Result] = Future()
        self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """Let the thread end after what was submitted; returns at once."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # supervision boundary: goes to the caller
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, function  # an idle thread holds no images
