"""A strategy whose ranks hold different parameters, as the stages of a pipeline do."""

from __future__ import annotations

from itertools import compress

from accel_runtime.parallel.strategy import StateView, Strategy


class StageStrategy(Strategy):
    """Train on each rank some of the layers of a model.

    Args:
        backend: The ranks.
        layers: The names of the layers of each rank.
    """

    shards_models = True

    def __init__(self, backend, layers):
        super().__init__(backend)
        self._layers = layers[backend.topology.rank]
        self._removed = set()

    def wrap_model(self, model, ddp_options):  # noqa: ARG002 - nothing is combined
        """Remove the layers of other ranks."""
        for name, layer in [*model.named_children()]:
            if name not in self._layers:
                self._removed.update(layer.parameters())
                delattr(model, name)
        return model

    def prepare_optimizer(self, optimizer):
        """Remove the parameters of other ranks."""
        for group in optimizer.param_groups:
            kept = [p not in self._removed for p in group["params"]]
            for key in group.keys() & {"params", "param_names"}:
                group[key] = [*compress(group[key], kept)]

    def is_sharded(self, model):  # noqa: ARG002 - all models are
        """Return that each rank has some layers only."""
        return True

    def open_state(self, models, optimizers):
        """Return the state of all ranks, with the ranks that hold each tensor."""
        names = [[*self.unwrap_model(model).state_dict()] for model in models]
        of_ranks = self.backend.all_gather_objects(names, "the names of parameters")
        holders = [
            {
                name: [rank for rank, held in enumerate(of_ranks) if name in held[index]]
                for held in of_ranks
                for name in held[index]
            }
            for index in range(len(models))
        ]
        return StateView([self.unwrap_model(model) for model in models], optimizers, holders)
