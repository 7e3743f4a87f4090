import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_one_epoch(model, loader, optimizer, scheduler, criterion, accum_steps):
    model.train()
    for step, batch in enumerate(loader):
        inputs = batch[0].cuda() if torch.cuda.is_available() else batch[0]
        targets = batch[1]
        loss = criterion(model(inputs), targets) / accum_steps
        loss.backward()
        if (step + 1) % accum_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print("step", step, loss.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum-steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(2)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.mean(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    criterion = nn.MSELoss()
    for epoch in range(2):
        train_one_epoch(model, loader, optimizer, scheduler, criterion, args.accum_steps)


if __name__ == "__main__":
    main()
