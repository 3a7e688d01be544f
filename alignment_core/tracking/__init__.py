"""Trackers of a run: one protocol, implemented for W&B, TensorBoard and others. A failing tracker does not affect the run."""

from alignment_core.tracking.guard import Trackers, listening
from alignment_core.tracking.listener import Listener, Progress
from alignment_core.tracking.trackers import file_trackers, require

__all__ = ["Listener", "Progress", "Trackers", "file_trackers", "listening", "require"]
