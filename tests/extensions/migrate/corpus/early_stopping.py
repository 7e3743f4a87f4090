import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def validate(model, loader, criterion, device):
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for inputs, targets in loader:
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            total += criterion(model(inputs), targets).item()
    return total / len(loader)


def main():
    torch.manual_seed(5)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    x = torch.randn(96, 4)
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    train_set, val_set = random_split(dataset, [64, 32])
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=16)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    criterion = nn.MSELoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    best, best_state, bad_epochs = float("inf"), None, 0
    for epoch in range(8):
        model.train()
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        val_loss = validate(model, val_loader, criterion, device)
        scheduler.step(val_loss)
        print(f"epoch {epoch}: {loss.item()} {val_loss}")
        if val_loss < best:
            best, bad_epochs = val_loss, 0
            best_state = copy.deepcopy(model.state_dict())
        else:
            bad_epochs += 1
            if bad_epochs >= 2:
                print("early stopping")
                break
    model.load_state_dict(best_state)
    print("best", validate(model, val_loader, criterion, device))


if __name__ == "__main__":
    main()
