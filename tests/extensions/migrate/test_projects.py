"""A training that is spread over several files gets one finding, with the places that are known; other projects get none."""

from __future__ import annotations

import pytest
from support.processes.commands import call_accel

MODELS = "from torch import nn\nclass Net(nn.Linear):\n    pass\n"
ENGINE = (
    "from torch import nn\ndef fit(model, loader, optimizer):\n    for x in loader:\n        loss = model(x).mean()\n"
    "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
)
TRAIN = (
    "import torch\nfrom torch.utils.data import DataLoader\nfrom engine import fit\nfrom models import Net\n"
    "# torch.optim.SGD(\nmodel = Net(8, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "fit(model, DataLoader(torch.randn(8, 8)), optimizer)\n"
)
WHOLE = (
    "import torch\nfrom models import Net\ntorch.manual_seed(0)\nmodel = Net(8, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "loader = torch.utils.data.DataLoader(torch.randn(8, 8))\n" + ENGINE.partition("def")[2].partition("\n")[2]
).replace("\n    ", "\n").replace("    for", "for")  # fmt: skip
BUILT = "import torch\ndef build(params):\n    return torch.optim.SGD(params, lr=0.1)\n"
FACTORY = "import torch\ndef build(model):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n"
STEPS = ENGINE.replace(
    "def fit(model, loader, optimizer):\n",
    "from tools import build\ndef fit(model, loader):\n    optimizer = build(model)\n",
)
ATTACK = "def attack(model, x):\n    model(x).mean().backward()\n    return x.grad.sign()\n"
TRAINER = (
    "class Trainer:\n    def __init__(self, model, optimizer=None):\n        self.model, self.optimizer = model, optimizer\n"
    "    def fit(self, loader):\n        for x in loader:\n            self.optimizer.zero_grad()\n"
    "            self.model(x).mean().backward()\n            self.optimizer.step()\n"
)
LIBRARY = TRAIN.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "timm.optim.create(model)").replace(
    "import torch", "import timm, torch", 1
)
PROJECTS = {
    "three files": (
        {"models.py": MODELS, "engine.py": ENGINE, "train.py": TRAIN},
        "engine.py:6: model: train.py:6; optimizer: train.py:7; backward pass: engine.py:6",
    ),
    "a package with relative imports": (
        {"pkg/__init__.py": "", "pkg/core/loop.py": ENGINE, "pkg/train.py": TRAIN.replace("engine", ".core.loop")},
        "pkg/core/loop.py:6: model: pkg/train.py:6; optimizer: pkg/train.py:7; backward pass: pkg/core/loop.py:6",
    ),
    "a package in src that a script imports": (
        {"src/lib/__init__.py": "from lib.engine import fit\n", "src/lib/engine.py": ENGINE, "tools/run.py": TRAIN.replace("engine", "lib")},
        "src/lib/engine.py:6: model: tools/run.py:6; optimizer: tools/run.py:7; backward pass: src/lib/engine.py:6",
    ),
    "a class with the loop": (
        {"trainer.py": TRAINER, "train.py": TRAIN.replace("engine import fit", "trainer import Trainer as fit")},
        "trainer.py:7: model: train.py:6; optimizer: train.py:7; backward pass: trainer.py:7",
    ),
    "an optimizer that a function of another file creates for a model": (
        {"tools.py": FACTORY, "engine.py": STEPS, "train.py": "from engine import fit\nfrom models import Net\nfit(Net(8, 2), [])\n"},
        "engine.py:8: optimizer: tools.py:3; backward pass: engine.py:8",
    ),
    "an optimizer and a loop that a third file joins": (
        {"tools.py": FACTORY, "engine.py": ENGINE, "train.py": "from engine import fit\nfrom tools import build\nfit(m, [], build(m))\n"},
        "engine.py:6: optimizer: tools.py:3; backward pass: engine.py:6",
    ),
    "an optimizer of a library": (
        {"engine.py": ENGINE, "train.py": LIBRARY},
        "engine.py:6: backward pass: engine.py:6; imported by: train.py",
    ),
    "several scripts with one loop, and one of them with more": (
        {"engine.py": ENGINE, "attacks.py": ATTACK, **{f"{one}.py": TRAIN for one in "abcd"}, "e.py": "import attacks\n" + TRAIN},
        "attacks.py:2: model: a.py:6, b.py:6, c.py:6 and 2 more; optimizer: a.py:7, b.py:7, c.py:7 and 2 more; backward pass: attacks.py:2, engine.py:6",
    ),
}  # fmt: skip
OTHERS = {
    "scripts that share a model": ({"models.py": MODELS, "a.py": WHOLE, "b.py": WHOLE}, []),
    "a loop with an optimizer of another file": (
        {"tools.py": BUILT, "models.py": MODELS, "train.py": "from tools import build\n" + WHOLE.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "build(model.parameters())")},
        [],
    ),
    "gradients of inputs": ({"models.py": MODELS, "attacks.py": ATTACK, "train.py": "import attacks\n" + WHOLE}, ["attacks.py:2: No model"]),
    "a loop and an optimizer that nothing joins": ({"engine.py": ENGINE, "tools.py": FACTORY}, ["engine.py:6: No model", "tools.py:3: An optimizer"]),
    "an optimizer of a library in the file of the loop": (
        {"train.py": STEPS.replace("tools", "timm"), "tools.py": FACTORY, "test.py": "import train, tools\n"},
        ["tools.py:3: An optimizer", "train.py:8: No model"],
    ),
    "a class of another library with the name of an optimizer": ({"train.py": "from keras.optimizers import Adam\nAdam(0.1)\n"}, []),
    "the definition of an optimizer": ({"adam.py": "import torch\nclass Adam(torch.optim.Optimizer):\n    pass\n"}, []),
    "a training that is converted by hand": (
        {
            "engine.py": ENGINE.replace("(model, loader", "(accelerator, model, loader").replace("loss.backward()", "accelerator.backward(loss)"),
            "tools.py": FACTORY, "train.py": "from accel_runtime import Accelerator\nfrom engine import fit\nfrom tools import build\n",
        },
        [],
    ),
}  # fmt: skip
SPREAD = "This training is not converted: it is spread over several files ("


@pytest.fixture
def report(capfd, tmp_path, monkeypatch):
    """Write files, and return the findings about files that are spread and the other findings."""
    monkeypatch.chdir(tmp_path)

    def migrate(texts, path="."):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        lines = call_accel(capfd, "migrate", path).stderr.splitlines()
        lines = [line for line in lines if not line.startswith("accel: ")]
        spread = [line.replace(SPREAD, "").partition(").")[0] for line in lines if SPREAD in line]
        return spread, [line for line in lines if SPREAD not in line]

    return migrate


@pytest.mark.parametrize("project", PROJECTS)
def test_a_training_in_several_files_gets_one_finding_with_the_places_that_are_known(report, project):
    texts, expected = PROJECTS[project]
    assert report(texts) == ([expected], [])


@pytest.mark.parametrize("project", OTHERS)
def test_another_project_gets_no_such_finding(report, project):
    texts, expected = OTHERS[project]
    spread, others = report(texts)
    assert (spread, [line[: len(one)] for line, one in zip(others, expected, strict=True)]) == ([], expected)


@pytest.mark.parametrize("name", ["engine.py", "train.py"])
def test_a_file_that_is_an_argument_is_read_with_those_around_it(report, name):
    texts, expected = PROJECTS["three files"]
    line = {"engine.py": 6, "train.py": 7}[name]
    assert report(texts, name) == ([expected.replace("engine.py:6", f"{name}:{line}", 1)], [])


def test_two_trainings_that_share_nothing_get_a_finding_each(report):
    texts, _ = PROJECTS["three files"]
    spread, others = report({f"{folder}/{name}": text for folder in "ab" for name, text in texts.items()})
    assert [line.partition(";")[0] for line in spread] == [
        f"{one}/engine.py:6: model: {one}/train.py:6" for one in "ab"
    ]
    assert not others


def test_a_conversion_by_hand_of_a_part_is_reported_as_such(report):
    engine = ENGINE + "def pretrain(accelerator, loss):\n    accelerator.backward(loss)\n"
    assert report({"engine.py": engine}) == (
        [],
        [
            "engine.py:6: This is not converted, since the script uses accel already. Convert it as the tables on the page Migrate a script show."
        ],
    )
