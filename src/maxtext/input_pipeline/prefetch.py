"""prefetch: a thread that prepares batches while the device computes.

The state is that of the batch last delivered, not of the batch last prepared, so resuming repeats
and skips nothing. An exception, including StopIteration, reaches the consumer after the batches
that preceded it.
"""

import threading
from collections import deque

from maxtext.input_pipeline.interface import Batch, BatchIterator, State


def prefetch(iterator: BatchIterator, depth: int) -> BatchIterator:
    """The same batches, up to `depth` of them prepared in advance. With 0 it is the iterator
    itself.
    """
    return PrefetchIterator(iterator, depth) if depth > 0 else iterator


class PrefetchIterator(BatchIterator):
    """While the thread runs, it alone uses the inner iterator. Methods that change the position
    stop the thread first.
    """

    def __init__(self, iterator: BatchIterator, depth: int):
        self.iterator = iterator
        self.depth = depth
        self.state = iterator.get_state()
        self.ready: deque[tuple[Batch, State]] = deque()
        self.error: BaseException | None = None
        self.stopping = False
        self.closed = False
        self.changed = threading.Condition()
        # Started by the first next(): a run that resumes sets its state before that.
        self.thread: threading.Thread | None = None

    def __next__(self) -> Batch:
        if self.closed:
            raise ValueError("next() of a prefetch iterator that was closed")
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name="maxtext-prefetch", daemon=True)
            self.thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.error)
            if self.ready:
                batch, self.state = self.ready.popleft()
                self.changed.notify_all()
                return batch
            assert self.error is not None
            raise self.error

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopping or len(self.ready) < self.depth)
                if self.stopping:
                    return
            try:
                prepared = next(self.iterator), self.iterator.get_state()
            except BaseException as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.ready.append(prepared)
                self.changed.notify_all()

    def stop(self) -> None:
        """End the thread and discard the prepared batches. Waits for the batch in preparation."""
        if self.thread is not None:
            with self.changed:
                self.stopping = True
                self.changed.notify_all()
            self.thread.join()
        self.thread = None
        self.error = None
        self.stopping = False
        self.ready.clear()

    def get_state(self) -> State:
        return self.state

    def set_state(self, state: State) -> None:
        self.stop()
        self.iterator.set_state(state)
        self.state = self.iterator.get_state()

    def reset(self) -> None:
        self.stop()
        self.iterator.reset()
        self.state = self.iterator.get_state()

    def close(self) -> None:
        self.stop()
        self.closed = True
        self.iterator.close()
