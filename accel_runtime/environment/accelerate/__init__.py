"""Accelerate's words, as of Accelerate 1.15, and the translation of its variables; standard library only.

Each setting of Accelerate is declared once, with its names and its meaning in accel: in `launch`, `sharding` and
`sagemaker`. The importer of config files, the variables, the advice about options of `accelerate launch` and the
plugins of a script take their words from there. The arguments of SageMaker's estimator and the keys of DeepSpeed's own
file are not Accelerate's, and stand in the importer; options of torchrun stand in `accel_cli.planning.launch_options`.
"""

from accel_runtime.environment.accelerate.variables import (
    Equivalent,
    Translation,
    decode_variables,
    encode_variables,
    translate,
)

__all__ = ["Equivalent", "Translation", "decode_variables", "encode_variables", "translate"]
