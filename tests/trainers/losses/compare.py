"""Values and gradients of a JAX loss and of the same formula in torch, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch


def jax_loss(function: Callable, *arrays: Any) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
    """(loss, gradients of all arrays, metrics)"""
    inputs = tuple(jnp.asarray(np.asarray(array), jnp.float32) for array in arrays)
    (loss, metrics), gradients = jax.value_and_grad(lambda inputs: function(*inputs), has_aux=True)(
        inputs
    )
    return loss, [np.asarray(gradient) for gradient in gradients], metrics


def torch_loss(function: Callable, *arrays: Any) -> tuple[float, list[np.ndarray]]:
    """(loss, gradients of all arrays)"""
    inputs = [torch.tensor(np.asarray(array, np.float64), requires_grad=True) for array in arrays]
    loss = function(*inputs)
    loss.backward()
    return loss.item(), [leaf.grad.numpy() for leaf in inputs]


def assert_same_loss(jax_function: Callable, torch_function: Callable, *arrays: Any) -> None:
    arrays = tuple(np.asarray(array, np.float32) for array in arrays)
    loss, gradients, _ = jax_loss(jax_function, *arrays)
    expected, expected_gradients = torch_loss(torch_function, *arrays)
    np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=1e-6)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        scale = max(np.abs(wanted).max(), 1e-3)
        np.testing.assert_allclose(gradient, wanted, rtol=2e-4, atol=2e-6 * scale)
