"""SIGINT and SIGTERM of a stage that runs episodes (adapters.run): one ends it cleanly, a second one at once."""

import asyncio
import os
import signal
import threading


class Signals:
    """While it is open, SIGINT and SIGTERM cancel `task`, once; `name` is the one that came. One more, later than 2 s after the first
    (timeout(1), terminals and schedulers may deliver one signal twice), ends the process as it stands."""

    def __enter__(self):
        self.task, self.name, self.loop, self.before = None, None, asyncio.get_running_loop(), {}
        if threading.current_thread() is threading.main_thread():            # others cannot have handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.getsignal(number)
                signal.signal(number, self.arrived)          # at once: the loop's own handlers forget one that comes at its end
        return self

    def arrived(self, number, frame=None):
        if self.name is None:
            self.first, self.name = self.loop.time(), signal.Signals(number).name
            if self.task:
                self.task.cancel()
                self.loop.call_soon_threadsafe(lambda: None)               # wakes it up
        elif self.loop.time() - self.first > 2:
            os._exit(128 + number)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.name and self.task and not self.task.cancelled():        # it came when the work was done: it is for what follows
            os.kill(os.getpid(), signal.Signals[self.name])
