"""Trackers of a run: one protocol, with W&B and TensorBoard among its implementations. None of them can harm the run."""

from alignment_core.tracking.guard import Trackers, listening
from alignment_core.tracking.listener import Listener, Progress
from alignment_core.tracking.trackers import file_trackers, require

__all__ = ["Listener", "Progress", "Trackers", "file_trackers", "listening", "require"]
