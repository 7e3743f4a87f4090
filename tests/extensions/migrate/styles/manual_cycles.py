import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--cycle", type=int, default=4)
parser.add_argument("--own-update", action="store_true")
args = parser.parse_args()


def load(seed, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    print(f"{size} samples")
    return TensorDataset(x, x.sum(1, keepdim=True))


train_set = load(0, 64)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)
loader = DataLoader(train_set, batch_size=4)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
seen = 0
for epoch in range(2):
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        if seen % args.cycle == 0:
            optimizer.zero_grad()
        loss = criterion(model(x), y)
        (loss / args.cycle).backward()
        seen += 1
        if seen % args.cycle == 0:
            if args.own_update:
                for weight in model.parameters():
                    weight.data.add_(weight.grad, alpha=-0.05)
            else:
                optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
torch.save(model.state_dict(), "weights.pt")
