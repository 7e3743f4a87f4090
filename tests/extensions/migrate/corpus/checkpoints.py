import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "checkpoint.pt"


def save_checkpoint(model, optimizer, epoch):
    torch.save(
        {
            "epoch": epoch,
            "model": model.state_dict(),  # the weights
            "optimizer": optimizer.state_dict(),
        },
        CHECKPOINT,
    )


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    start = 0
    if os.path.exists(CHECKPOINT):
        checkpoint = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epoch"] + 1
    for epoch in range(start, start + 2):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = nn.functional.l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, loss.item())
        save_checkpoint(model, optimizer, epoch)


if __name__ == "__main__":
    main()
