"""A strategy with gradients of its own, in the shape of the engines of libraries: `parameter.grad` is None between calls."""

from __future__ import annotations

import torch

from accel_runtime.parallel.strategy import GradientAccess, Strategy


class BufferedGradients(GradientAccess):
    """Local gradients in buffers, which are averaged once, when a cycle is finished."""

    in_parameters = False

    def __init__(self, backend):
        self._backend = backend
        self._gradients = {}
        self._writes = 0
        self._versions = {}
        self._is_finished = True

    def take(self, parameter):
        """Move the gradient of a parameter into its buffer."""
        gradient, parameter.grad = parameter.grad, None
        if self._is_finished and parameter in self._gradients and self._backend.topology.world_size > 1:
            raise RuntimeError(
                "a backward pass follows the end of a cycle, whose gradients are averaged already"
            )
        known = self._gradients.get(parameter)
        self._gradients[parameter] = gradient if known is None else known + gradient
        self._touch(parameter)

    def get(self, parameter):
        """Return the gradient of a parameter."""
        return self._gradients.get(parameter)

    def remove(self, parameter):
        """Discard the gradient of a parameter."""
        self._gradients.pop(parameter, None)

    def begin_backward(self):
        """Begin a cycle if there are no gradients."""
        if not self._gradients:
            self._is_finished = False

    def _touch(self, parameter):
        self._writes += 1
        self._versions[parameter] = (1, self._writes)

    def finish(self):
        if self._is_finished:
            return
        self._is_finished = True
        for parameter, gradient in self._gradients.items():
            self._gradients[parameter] = self._backend.all_reduce(gradient, "mean")

    def read_versions(self, parameters):
        return [self._versions[p] if p in self._gradients else None for p in parameters]

    def scale(self, parameters, factor):
        for parameter in parameters:
            if parameter in self._gradients:
                self._gradients[parameter] = self._gradients[parameter] * factor
                self._touch(parameter)

    def compute_norm(self, parameters, norm_type):
        gradients = [self._gradients[p] for p in parameters if p in self._gradients]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def clip_norm(self, parameters, max_norm, norm_type):
        self.finish()
        norm = self.compute_norm(parameters, norm_type)
        self.scale(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clip_value(self, parameters, clip_value):
        self.finish()
        for parameter in parameters:
            self._gradients[parameter] = self._gradients[parameter].clamp(-clip_value, clip_value)

    def read_local(self, models):
        return {} if self._is_finished else {p: self._gradients[p] for m in models for p in m.parameters()}

    def restore_local(self, models, gradients):  # noqa: ARG002 - buffers are by parameter
        self._gradients.update(gradients)
        self._is_finished = self._is_finished and not gradients
        for parameter in gradients:
            self._touch(parameter)


class EngineStrategy(Strategy):
    """Broadcast weights, and train with `BufferedGradients`."""

    def __init__(self, backend):
        super().__init__(backend)
        self.gradients = BufferedGradients(backend)

    def wrap_model(self, model, ddp_options):  # noqa: ARG002 - it averages by itself
        for parameter in model.parameters():
            with torch.no_grad():
                self.backend.broadcast(parameter.detach())
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradients.take)
        return model

    def backward(self, loss, options):
        self.gradients.begin_backward()
        super().backward(loss, options)

    def step(self, optimizer, closure=None):
        self.gradients.finish()
        parameters = [p for group in self.list_parameter_groups(optimizer) for p in group]
        for parameter in parameters:
            parameter.grad = self.gradients.get(parameter)
        loss = super().step(optimizer, closure)
        for parameter in parameters:
            parameter.grad = None
        return loss

    def zero_grad(self, optimizer, *, set_to_none):  # noqa: ARG002 - buffers are removed
        for group in self.list_parameter_groups(optimizer):
            for parameter in group:
                self.gradients.remove(parameter)
