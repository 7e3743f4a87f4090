"""Aim: a repository in the logging directory."""

from __future__ import annotations

from typing import Any

import aim
from typing_extensions import override

from accel_runtime.foundation.logged_values import split_curves
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["AimTracker"]


class AimTracker(BuiltInTracker):
    """Log numbers as metrics and text as `aim.Text`; objects of `aim` are unchanged, nested names are joined by `/`.

    Args:
        run_name: The name of the project and of the run.
        logging_dir: The repository, created if missing.
        **kwargs: Arguments of `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @override
    @on_main_process
    def start(self) -> None:
        self.writer = aim.Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """Return the run."""
        return self.writer

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = self.convert_configuration(values)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.track`."""
        points, others = split_curves(values)
        self.leave_out(others)
        for key, value in points.items():
            item = aim.Text(value) if isinstance(value, str) else value
            self.writer.track(item, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images: each an image, or a pair of image and caption.

        Args:
            values: Images by name.
            step: The step of the images.
            kwargs: Arguments of `aim.Image` under `aim_image`, of `Run.track` under `track`.
        """
        options = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(picture, name=key, step=step, **options.get("track", {}))

    @override
    @on_main_process
    def finish(self) -> None:
        self.writer.close()
