"""What a recipe's promotion asks for beside the tag, and whether this machine can do it."""

from __future__ import annotations

from alignment_core.artifacts import Reference, Store
from alignment_core.attestation.attesting import attest
from alignment_core.attestation.model_repo import has_token
from alignment_core.attestation.signing import private_key, sign
from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import PromotionConfig


def check_ready(section: PromotionConfig) -> None:
    """Raise EnvironmentFault where a key or a token is missing: before anything is trained, and not after it."""
    if section.sign:
        private_key()
    if section.publish and not has_token():
        raise EnvironmentFault(
            f"promotion.publish: to publish to {section.publish}, set HF_TOKEN, or `hf auth login`, to a token that may write "
            "there"
        )


def vouch(store: Store, section: PromotionConfig, policy: Reference) -> None:
    """Write attestations and signature beside a policy, before a tag leads anybody to it."""
    if section.attest:
        attest(store, policy)
    if section.sign:
        sign(store, policy, private_key())
