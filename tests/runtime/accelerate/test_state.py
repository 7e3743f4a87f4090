"""Libraries that look at the `PartialState` of Accelerate find the ranks of accel there, and compute the same losses."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from support.processes.ranks import run_script

from accel_runtime import Accelerator, PartialState

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

NUM_BOXES = (1, 5, 2, 3)
"""Boxes or masks of each image: the ranks have different numbers."""
FACTS = ("num_processes", "process_index", "local_process_index", "is_main_process", "device", "backend")


@pytest.fixture(autouse=True)
def _no_state():
    """Begin without a state, ours or Accelerate's: libraries that earlier tests of this process called have made theirs."""
    PartialState().destroy_process_group()
    accelerate.PartialState._reset_state()


def read_state():
    """Return what Accelerate's state says, and what ours does."""
    ours, theirs = Accelerator().state, accelerate.PartialState()
    return [
        [(name, getattr(state, name)) for name in FACTS] + [state.distributed_type.value]
        for state in (theirs, ours)
    ]


@pytest.mark.slow
def test_the_state_of_accelerate_has_the_ranks_and_device_of_accel(ranks):
    for theirs, ours in ranks.run(read_state):
        assert theirs == ours


def test_the_state_is_filled_when_a_library_imports_accelerate_later(cwd):
    script = (
        "from accel_runtime import Accelerator\nimport sys\naccelerator = Accelerator()\n"
        "assert 'accelerate' not in sys.modules\nimport accelerate.logging\n"
        "accelerate.logging.get_logger(__name__).warning('logged')\n"
        "print(accelerate.PartialState._shared_state['num_processes'])\n"
    )
    (cwd / "train.py").write_text(script)
    ((out, err, code),) = run_script(cwd / "train.py", [{}])
    assert (code, out) == (0, "1\n"), err


def test_a_state_of_the_script_stays():
    theirs = accelerate.PartialState(cpu=True)
    theirs.num_processes = 7
    try:
        Accelerator()
        assert accelerate.PartialState().num_processes == 7
        PartialState().destroy_process_group()
        assert accelerate.PartialState().num_processes == 7
    finally:
        accelerate.PartialState._reset_state()


def test_the_state_ends_with_the_process_group():
    PartialState()
    assert accelerate.PartialState._shared_state
    PartialState().destroy_process_group()
    assert not accelerate.PartialState._shared_state


# Losses that average counts over the ranks ------------------------------------------------


def compute_losses(build):
    """Return the losses of a model for the images of this rank, averaged over the ranks."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model, draw_target = build()
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(len(NUM_BOXES), 3, 64, 64, generator=generator)
    targets = [draw_target(number, generator) for number in NUM_BOXES]
    model = accelerator.prepare_model(model.eval())
    begin, end = (
        len(NUM_BOXES) * rank // accelerator.num_processes
        for rank in (accelerator.process_index, accelerator.process_index + 1)
    )
    inputs = {key: [target[key] for target in targets[begin:end]] for key in targets[0]}
    output = model(pixel_values=images[begin:end], **inputs)
    return accelerator.reduce(output.loss.detach(), "mean").item()


def build_backbone():
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage4"]
    )


def build_detr_config(**options):
    sizes = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 6, "num_labels": 3}
    # With its default, the loss of the classes is a weighted mean, with other weights on each rank.
    return transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=build_backbone(),
        eos_coefficient=1.0,
        auxiliary_loss=True,
        **sizes,
        **layers,
        **options,
    )


def build_detr():
    def draw_target(number, generator):
        centers = 0.25 + torch.rand(number, 2, generator=generator) / 2
        boxes = torch.cat([centers, torch.full((number, 2), 0.2)], 1)
        return {
            "labels": {
                "class_labels": torch.randint(0, 3, (number,), generator=generator),
                "boxes": boxes,
            }
        }

    return transformers.DetrForObjectDetection(build_detr_config()), draw_target


def build_maskformer():
    backbone = transformers.SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=2,
        image_size=64,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.MaskFormerConfig(
        fpn_feature_size=32,
        mask_feature_size=32,
        backbone_config=backbone,
        decoder_config=build_detr_config(),
        num_labels=3,
        no_object_weight=1.0,
    )

    def draw_target(number, generator):
        return {
            "class_labels": torch.randint(0, 3, (number,), generator=generator),
            "mask_labels": (torch.rand(number, 64, 64, generator=generator) > 0.5).float(),
        }

    return transformers.MaskFormerForInstanceSegmentation(config), draw_target


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_detr, build_maskformer])
def test_losses_of_boxes_and_masks_are_those_of_one_process(pair, build):
    one = compute_losses(build)
    assert pair.run(compute_losses, build) == [pytest.approx(one, rel=1e-5)] * 2


LOSSES = {
    "eomt": "EomtLoss",
    "eomt_dinov3": "EomtDinov3Loss",
    "mask2former": "Mask2FormerLoss",
    "maskformer": "MaskFormerLoss",
    "oneformer": "OneFormerLoss",
    "videomt": "VideomtLoss",
}


def count_masks():
    """Return the number of masks by which the losses of each model divide."""
    accelerator = Accelerator()
    labels = [torch.zeros(1 + 2 * accelerator.process_index)]
    counts = {}
    for model, name in LOSSES.items():
        loss = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
        counts[model] = loss.get_num_masks(None, labels, accelerator.device).item()
    return counts


def test_each_model_divides_by_the_mean_number_of_masks(pair):
    """Those whose losses draw random points cannot be compared with one process as a whole."""
    assert pair.run(count_masks) == [dict.fromkeys(LOSSES, 2.0)] * 2


def test_a_module_of_the_script_with_the_name_of_accelerates_state_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.state", ModuleType("accelerate.state"))
    assert Accelerator().num_processes == 1
