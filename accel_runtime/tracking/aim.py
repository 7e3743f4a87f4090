"""Aim: a repository in the logging directory."""

from __future__ import annotations

from typing import Any

import aim
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import curves, deep

__all__ = ["AimTracker"]


class AimTracker(Provided):
    """Numbers become metrics, text becomes `aim.Text`, objects of `aim` stay; nested names are joined by `/`.

    Args:
        run_name: The project's name; that of the run.
        logging_dir: Where the repository is, or is made.
        **kwargs: For `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs

    @override
    @on_main_process
    def start(self) -> None:
        self.writer = aim.Run(**{"repo": self.aim_repo_path, **self.init_kwargs})
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.writer

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = deep(values)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; `kwargs` go to `Run.track`."""
        kept, left = curves(values)
        self.leave_out(left)
        for key, value in kept.items():
            item = aim.Text(value) if isinstance(value, str) else value
            self.writer.track(item, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images: each an image, or a pair of image and caption.

        Args:
            values: Images by name.
            step: The step they belong to.
            kwargs: Arguments of `aim.Image` under `aim_image`, of `Run.track` under `track`.
        """
        told = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            drawn = aim.Image(image, caption=caption, **told.get("aim_image", {}))
            self.writer.track(drawn, name=key, step=step, **told.get("track", {}))

    @override
    @on_main_process
    def finish(self) -> None:
        self.writer.close()
