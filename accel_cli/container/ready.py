"""A host that is ready to start, and its part of the job as a plan: that of machines whose numbers are known."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_cli.container import gpus, told
from accel_cli.container.told import Told
from accel_cli.container.work import Work
from accel_cli.planning import plan
from accel_cli.planning.machine import cpus
from accel_cli.planning.plan import Plan
from accel_cli.runner import run_dir
from accel_runtime.env import Settings, check_layout

__all__ = ["Ready"]

_MEET_S = 1800
"""Seconds hosts wait for each other: one may install packages that another has built already."""


@dataclass(frozen=True)
class Ready:
    """A host whose source, packages and variables are there."""

    root: Path
    """`/opt/ml`."""
    work: Work
    told: Told
    environ: Mapping[str, str]
    """What its processes inherit."""
    again: bool = False
    """Whether there are checkpoints of a run that was interrupted."""

    def plan(self) -> Plan:
        """What will happen on this host.

        Raises:
            SettingsError: A variable of accel says something it cannot do.
        """
        settings = Settings.from_env(self.work.settings, accelerate=False)
        settings = replace(settings, resume=settings.resume or self.again)
        machines, found = len(self.told.hosts), gpus.count(self.environ)
        # Every host has a folder for checkpoints of its own; what is in them is together in S3.
        settings = replace(settings, shared_files=settings.shared_files and machines == 1)
        device = "cuda" if found and settings.device != "cpu" else "cpu"
        asked = self.work.nproc_per_node
        count = asked if isinstance(asked, int) else max(1, found) if device == "cuda" else 1
        check_layout(settings.parallel, settings.fully_shard, machines * count)
        method = "exec" if self.work.kind == "program" else "forkserver"
        threads = {"OMP_NUM_THREADS": str(max(1, cpus() // count))}
        return Plan(
            launcher="sagemaker",
            runner=plan.get_runner(method),
            argv=plan.build_worker_command(sys.executable, self.work.what),
            env=plan.build_environment(
                self.environ, {**threads, **plan.get_loopback_interfaces(machines)}, {}, settings
            ),
            device=device,
            target=self.work.target,
            nnodes=machines,
            nproc_per_node=count,
            derived=f"SageMaker's hosts: {', '.join(self.told.hosts)}",
            agent=self._agent(settings.process_group_timeout),
            start_method=method,
        )

    @property
    def _endpoint(self) -> str:
        return f"{self.told.hosts[0]}:{self.environ.get('SM_MASTER_PORT', told.PORT)}"

    def _agent(self, patience: int) -> dict[str, Any]:
        machines = len(self.told.hosts)
        known: dict[str, Any] = {
            "run_id": self.environ.get("TRAINING_JOB_NAME") or "accel",
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "static": None,
            "rdzv_timeout": _MEET_S,
            "last_call_timeout": 5,
            "ranks": 0,
            # What is in there comes home: the logs of the ranks that are not shown.
            "log_dir": str(self.root / "output" / "data" / "accel-runs"),
            "shutdown_timeout": 110,
            "stall_timeout": None,
            run_dir.REASON_FILE: str(self.root / "output" / "failure"),
            run_dir.HOST_KEY: self.told.host,
        }
        known |= {name: value for name, value in self.work.agent.items() if name in known}
        return plan.build_agent_settings(
            (machines, machines),
            rdzv_endpoint=self._endpoint,
            node_rank=self.told.rank,
            patience=patience,
            **known,
        )
