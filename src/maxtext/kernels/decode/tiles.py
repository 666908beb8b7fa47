"""The part of a product that a program of a decode kernel computes at a time."""

from dataclasses import dataclass

from jax.experimental.pallas import triton


@dataclass(frozen=True)
class Tiles:
    columns: int  # outputs of a program
    depth: int  # inputs of a step
    warps: int
    stages: int = 1  # of the software pipeline

    @property
    def compiler_params(self) -> triton.CompilerParams:
        return triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)
