"""Who watches a run: one protocol, and W&B and TensorBoard as two that follow it. None of them can harm the run."""

from alignment_core.tracking.guard import Trackers, listening
from alignment_core.tracking.listener import Listener, Progress
from alignment_core.tracking.trackers import file_trackers, require

__all__ = ["Listener", "Progress", "Trackers", "file_trackers", "listening", "require"]
