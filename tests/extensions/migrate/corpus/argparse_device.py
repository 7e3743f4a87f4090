import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--device", type=str, default="cpu", help="cpu or cuda")
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(64, 4)
dataset = TensorDataset(x, x @ torch.tensor([1.0, -2.0, 3.0, 0.5]).view(4, 1))
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model = nn.Linear(4, 1)
model.to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
weights = torch.ones(1, device=args.device)

for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        x = x.to(args.device)
        y = y.to(args.device)
        loss = ((model(x) - y) ** 2 * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, "loss", loss.item())
