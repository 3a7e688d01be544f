"""What every recipe holds; a method adds its own sections, see :mod:`alignment_core.recipes.methods`."""

from __future__ import annotations

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import FolderPath
from alignment_core.recipes.sections.evaluation import EvaluationConfig, PromotionConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.retention import RetentionConfig
from alignment_core.recipes.sections.tracking import TrackingConfig


class BaseRecipe(Config):
    """What every recipe holds."""

    method: str
    """What to run."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name of the run in tables, logs and the Prefect UI."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed, from which all others are derived."""
    model: ModelConfig
    """The model to start from."""
    evaluation: EvaluationConfig | None = None
    """How the policy is evaluated. Default: no evaluation."""
    promotion: PromotionConfig | None = None
    """Which tag to move, and the gates that must pass. Default: no promotion."""
    store: FolderPath | None = None
    """Folder or URI of the artifact store. Default: `$ALIGN_HOME/store`."""
    reuse_across_versions: tuple[str, ...] = ()
    """Reuse cached results that were computed with other versions of these packages, such as `[torch, vllm]`. Default: a
    stage runs again after an upgrade of a package that computes its result."""
    resources: ResourcesConfig = ResourcesConfig()
    """Placement, memory and deadlines; not part of any stage's key. With few exceptions (docs/design.md, Determinism)
    they change a result by rounding at most."""
    retention: RetentionConfig = RetentionConfig()
    """What is dropped at the end of the run."""
    tracking: TrackingConfig = TrackingConfig()
    """W&B and TensorBoard; they never change a result."""

    @property
    def samples(self) -> bool:
        """Whether a stage samples completions."""
        return self.evaluation is not None

    @model_validator(mode="after")
    def _gates_have_metrics(self) -> BaseRecipe:
        if self.promotion and self.promotion.gates and self.evaluation is None:
            raise ValueError("`promotion.gates` need an `evaluation` that measures their metrics")
        return self
