"""Runs the passes of a random program."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from telegrad.autograd.contexts import DistAutogradContext
from telegrad.autograd.service import Autograd
from telegrad.errors import BackwardError
from telegrad.testing.programs import Inputs, Program, inputs_of, roots_of, take_grads


def run_passes(
    program: Program, environment: Sequence[torch.Tensor], autograd: Autograd, context: DistAutogradContext
) -> tuple[list[torch.Tensor | None], bool]:
    """Run them; returns the gradients of inputs, and whether a pass failed because another had freed the graph."""
    wanted: list[torch.Tensor | None] = []
    for number, places in enumerate(program.passes):
        roots = roots_of(environment, places, apart=program.multi)
        asked = program.inputs[number]
        inputs = inputs_of(environment, asked)
        if not roots or inputs == []:
            continue
        ones = [torch.ones_like(root) for root in roots]
        try:
            if asked is not None and inputs is not None:
                wanted += _gradients_of(inputs, asked, roots, ones, autograd, context)
            else:
                retain = number + 1 < len(program.passes)
                autograd.backward(context.id, roots, retain_graph=retain, grad_tensors=ones)
        except BackwardError as error:
            if "second time" not in str(error):
                raise
            return wanted, True
    return wanted, False


def _gradients_of(
    inputs: list[torch.Tensor],
    asked: Inputs,
    roots: list[torch.Tensor],
    ones: list[torch.Tensor],
    autograd: Autograd,
    context: DistAutogradContext,
) -> list[torch.Tensor | None]:
    if asked.kind == "grad":
        return list(autograd.grad(context.id, roots, inputs, ones, retain_graph=asked.retain, allow_unused=True))
    before = [context.gradients.get(tensor) for tensor in inputs]
    for tensor in inputs:
        context.gradients.replace(tensor, None)
    accumulate = "context" if asked.kind == "context" else "grad"
    autograd.backward(
        context.id, roots, retain_graph=asked.retain, grad_tensors=ones, inputs=inputs, accumulate=accumulate
    )
    found = take_grads(inputs)
    if asked.kind == "context":
        found = [context.gradients.get(tensor) for tensor in inputs]
    for tensor, grad in zip(inputs, before, strict=True):
        context.gradients.replace(tensor, grad)
    return found
