"""What objectives of a policy and a reference share (DPO, GRPO).

The reference is the policy as it was at step 0: a frozen copy of its weights, in the compute dtype
where the model casts them to it (`Template.cast`), so that both compute the same; with adapters the
base, or the base and the adapter that training started from.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.trees import merge_dicts
from maxtext.layers.parameters import Template
from maxtext.models.counts import forward_flops_per_token
from maxtext.trainers.objective import ModelObjective
from maxtext.trainers.trainable import has_adapters, optimized_mask, select


@dataclass(frozen=True)
class PolicyObjective(ModelObjective, ABC):
    base_template: Template  # without adapters

    @property
    def compares_passes(self) -> bool:
        return True

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether every step computes the reference."""

    @property
    def reference_flops_per_token(self) -> float:
        return forward_flops_per_token(self.config) if self.needs_reference else 0.0

    @property
    def abstract_reference(self) -> Any:
        """What `reference_weights` returns, as abstract arrays."""
        if not self.needs_reference:
            return None
        return jax.eval_shape(self.reference_weights, self.template.weights)

    @property
    def reference_axes(self) -> Any:
        """Logical axes of the reference, in the same tree."""
        if has_adapters(self.config):
            trained = optimized_mask(self.config, self.template)
            return select(self.template.axes, trained) if self.config.lora_restore_path else {}
        return self.template.axes

    def make_reference(self, initial_weights: Callable[[], Any], shardings: Any) -> Any:
        return jax.jit(self.reference_weights, out_shardings=shardings)(initial_weights())

    def reference_weights(self, weights: Any) -> Any:
        """The reference of a policy that starts with these weights; under jit.

        A new adapter does not change the output, so its reference is the base, which the policy
        has already: {}.
        """
        if has_adapters(self.config):
            if not self.config.lora_restore_path:
                return {}
            trained = optimized_mask(self.config, self.template)
            return jax.tree.map(jnp.copy, select(weights, trained))
        return jax.tree.map(jnp.copy, self.template.cast(weights))

    def reference_model(self, weights: Any, reference: Any) -> tuple[Template, Any]:
        """The template of the reference and its weights, without a gradient. `weights`: those of
        the policy, which hold the base of adapters."""
        if not has_adapters(self.config):
            return self.template, jax.lax.stop_gradient(reference)
        trained = optimized_mask(self.config, self.template)
        base = select(weights, trained, keep=False)
        template = self.template if reference else self.base_template
        return template, jax.lax.stop_gradient(merge_dicts(reference, base))
