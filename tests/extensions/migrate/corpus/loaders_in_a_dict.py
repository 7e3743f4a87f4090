import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
y = (x.sum(dim=1) > 0).long()
sets = {"train": TensorDataset(x[:48], y[:48]), "val": TensorDataset(x[48:], y[48:])}
loaders = {phase: DataLoader(sets[phase], batch_size=8, shuffle=phase == "train") for phase in ["train", "val"]}
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for phase in ["train", "val"]:
    for inputs, labels in loaders[phase]:
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        if phase == "train":
            loss.backward()
            optimizer.step()
    print(phase, loss.item())
