"""Forward passes over the trainer ranks, in blocks for idle ranks; finished blocks are saved in the stage's progress."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from alignment_core.cluster.actor import call
from alignment_core.errors import Stopped
from alignment_core.execution.base import StageContext
from alignment_core.files import write_whole
from alignment_core.models.microbatch import Images, Pair, distinct
from alignment_core.models.model_ref import Model

if TYPE_CHECKING:
    from alignment_core.models.loading import Head
    from alignment_core.rewards.base import Scores
    from alignment_core.training.ranks import TrainerActors


class ForwardPasses:
    """Forward passes of models over the trainer ranks, one model at a time. Use it from any thread, within ``using_trainers``.

    Finished blocks are files in the progress folder, so a later attempt does not compute them again.
    """

    def __init__(self, context: StageContext, block: int) -> None:
        """``block``: completions per block, which one rank computes at a time and a kill may lose."""
        self.context = context
        self.block = block
        self._alone = threading.Lock()
        self._trainers: TrainerActors | None = None
        self.over = threading.Event()
        """Set once no caller waits for scores any more."""

    @contextmanager
    def using_trainers(self) -> Iterator[None]:
        """Use the trainers, for this stage alone."""
        with self.context.machines.trainers(self.context.ticket) as self._trainers:
            yield

    @contextmanager
    def scores(self, model: Model, name: str, verdicts: tuple[int, int] | None = None) -> Iterator[Scores]:
        """The scores of a reward model, for :class:`alignment_core.rewards.base.Opening`."""
        head: Head = "lm" if verdicts else "score"
        yield lambda pairs: self(model, head, name, pairs, over=self.over, verdicts=verdicts).tolist()

    def __call__(
        self,
        model: Model,
        head: Head,
        name: str,
        pairs: Sequence[Pair],
        bf16: bool | None = None,
        over: threading.Event | None = None,
        verdicts: tuple[int, int] | None = None,
        temperature: float = 1.0,
        longest: int | None = None,
    ) -> np.ndarray:
        """One number for each pair, [len(pairs)] float32; the same completion of the same prompt is computed once.

        The files of the blocks begin with ``name``. ``bf16`` is whether the model computes in bfloat16; None: if it is stored
        in half precision; ``verdicts`` are the verdict tokens of a judge; ``temperature`` is that of a language model's
        distribution over tokens; ``longest`` is ``max_model_len`` of the engine that sampled the completions, for rotary
        positions that depend on it. Raises Stopped after the present block once ``over`` is set.
        """
        from alignment_core.training.forward import Forward, ForwardJob
        from alignment_core.training.rank_folders import bring
        from alignment_core.training.ranks import open_job, run_blocks

        assert self._trainers is not None, "call it within `using_trainers`"
        context = self.context
        unique, places = distinct(pairs)
        blocks = [unique[first : first + self.block] for first in range(0, len(unique), self.block)]
        settings = f"{model.reference} {head} {verdicts} {temperature} {longest}"
        files = [context.progress / f"{name}-{_digest(settings, block)}.npy" for block in blocks]
        values = {number: np.load(file) for number, file in enumerate(files) if file.is_file()}
        left = [(number, block) for number, block in enumerate(blocks) if number not in values]
        with self._alone:
            _check(over)
            started = time.monotonic()
            bring(self._trainers.group, model.path)  # this stage may have just written it
            has_images = any(isinstance(ids, Images) for pair in pairs for ids in pair)
            job = ForwardJob(model, head, bf16, verdicts, temperature, longest, has_images)
            ranks = open_job(self._trainers, job, context.resources)
            context.report(len(values), len(blocks), "blocks")
            used = ranks.processor_seconds()
            calls = ((number, call(Forward.run, block)) for number, block in left)
            for number, results in run_blocks(ranks, calls, context.resources):
                values[number] = np.sum(results, axis=0, dtype=np.float32)
                write_whole(files[number], partial(np.save, arr=values[number]))
                _check(over)
                context.report(len(values), len(blocks), "blocks")
            scored = sum(len(ids) for _, block in left for pair in block for ids in pair if not isinstance(ids, Images))
            measured = {
                "score_seconds": time.monotonic() - started,
                "score_processor_seconds": ranks.processor_seconds() - used,
                "score_tokens": scored,
                "score_computed_tokens": sum(ranks.all(Forward.computed)),
            }
            for part, value in measured.items():
                context.cost[part] = round(context.cost.get(part, 0.0) + value, 3)
        return np.concatenate([values[number] for number in range(len(blocks))])[places]


def _check(over: threading.Event | None) -> None:
    if over is not None and over.is_set():
        raise Stopped("no caller waits for these scores any more")


def _digest(settings: str, block: Sequence[Pair]) -> str:
    """Digest of the settings and token ids of a block: a stage may use several models and settings under one name."""
    digest = hashlib.sha256(settings.encode())
    for ids in (ids for pair in block for ids in pair):
        digest.update(len(ids).to_bytes(8, "little"))
        if isinstance(ids, Images):  # their names are digests
            digest.update("\n".join(image.name for image in ids).encode())
        else:
            digest.update(np.asarray(ids, np.int32).tobytes())
    return digest.hexdigest()[:32]
