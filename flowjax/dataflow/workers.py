"""What a rollout worker can play."""

from collections.abc import Collection
from dataclasses import dataclass

from flowjax.dataflow.ledger import Kind

KINDS: frozenset[Kind] = frozenset({"train", "eval"})


@dataclass(frozen=True, slots=True)
class Can:
    """Worlds, policies and kinds of episode; None is any."""

    worlds: frozenset[str] | None = None
    policies: frozenset[str] | None = None
    kinds: frozenset[Kind] = KINDS

    def policies_fit(self, speaking: Collection[str]) -> bool:
        """Whether it can play every policy that speaks in the run's episodes."""
        return self.policies is None or self.policies >= set(speaking)


ANYTHING = Can()
