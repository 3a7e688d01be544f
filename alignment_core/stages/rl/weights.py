"""The way of the policy's weights from the trainer ranks to the engines: all of them in buckets, or its adapter alone."""

from __future__ import annotations

from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup
from alignment_core.environments.episode import version_of
from alignment_core.execution.base import StageContext
from alignment_core.inference.engine import Engine
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training.policy_groups import PolicyGroups
from alignment_core.training.policy_trainer import PolicyTrainer


class WeightSync:
    """Gives the engines the policy's weights. Call it while they sample nothing."""

    def __init__(
        self,
        context: StageContext,
        section: RlConfig,
        engines: ActorGroup[Engine],
        ranks: PolicyGroups,
        policy: str,
    ) -> None:
        """``policy`` is the name of the policy before the first step."""
        self.context = context
        self.section = section
        self.engines = engines
        self.ranks = ranks
        self.policy = policy
        lora = section.training.lora
        self.sends_adapter = lora is not None and context.resources.max_lora_rank is not None and lora.is_addable
        """Whether the engines get the policy's adapter instead of all weights."""
        self.engines_have_start = False
        """Whether they got the weights of the initial policy from here."""

    def send(self, step: int) -> None:
        """Give the engines the weights after so many steps."""
        self.ranks.empty_cache()
        self.ranks.rest(keep_policy=True)
        # An adapter lies on the initial weights, also after a resume; warm engines may hold those of another stage.
        if step == 0 or (self.sends_adapter and not self.engines_have_start):
            self._send_start(adapter_follows=step > 0)
        if step and self.sends_adapter:
            self._send_adapter(step)
        elif step:
            self._send_weights(step)

    def _send_start(self, adapter_follows: bool) -> None:
        """Load the initial policy into the engines; a quantized policy comes from the trainers, which alone quantized it."""
        if self.section.training.base_bits:
            self._send_weights(0, merge=False, adapter_follows=adapter_follows)
        else:
            if not adapter_follows:
                self.ranks.rest()
            self.engines.all(Engine.load, self.context.inputs["policy"], self.policy)
        self.engines_have_start = True

    def _send_weights(self, step: int, merge: bool = True, adapter_follows: bool = False) -> None:
        """Send all weights bucket by bucket, with adapters merged in unless told otherwise."""
        specs = self.ranks.policy.all(PolicyTrainer.buckets)[0]
        buckets = (call(PolicyTrainer.bucket, spec, merge) for spec in specs)
        self.engines.all(Engine.begin_update)
        self.ranks.policy.relay(buckets, self.engines, Engine.load_bucket)
        if not adapter_follows:
            self.ranks.rest()  # before the engines allocate their cache
        self.engines.all(Engine.end_update, version_of(self.policy, step), step)

    def _send_adapter(self, step: int) -> None:
        """Send the adapter; the engines already hold the weights below it."""
        self.ranks.policy.relay([call(PolicyTrainer.adapter)], self.engines, Engine.load_adapter)
        self.ranks.rest()
        self.engines.all(Engine.use_adapter, version_of(self.policy, step), step)
